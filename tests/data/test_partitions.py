"""Partitions put every sample in one client, with the documented sizes and proportions."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppfl.core.errors import DataError
from ppfl.data import (
    CIFAR10_CLASSES,
    CIFAR10_CLIENTS,
    CIFAR10_GROUPS,
    MNIST_GROUPS,
    Federation,
    by_column,
    by_label_groups,
    digits_federation,
    dirichlet_labels,
    dirichlet_sources,
    iid,
)
from ppfl.data.allocation import equal_sizes, random_sizes

N = 600
X = torch.arange(N, dtype=torch.float32)[:, None]
Y = np.random.default_rng(0).integers(0, 10, N)

PARTITIONS = {
    "by_label_groups": lambda seed: by_label_groups(X, Y, MNIST_GROUPS, 5, seed),
    "dirichlet_sources": lambda seed: dirichlet_sources(X, Y, MNIST_GROUPS, 20, 0.5, seed),
    "dirichlet_sources, sizes vary": lambda seed: dirichlet_sources(X, Y, clients=9, seed=seed, equal=False),
    "dirichlet_labels": lambda seed: dirichlet_labels(X, Y, 12, 0.3, seed),
    "iid": lambda seed: iid(X, Y, 7, seed),
    "by_column": lambda seed: by_column(X, Y, Y % 4, seed),
}


def sizes(f: Federation) -> torch.Tensor:
    return f.train.sizes + f.test.sizes


@pytest.mark.parametrize("name", PARTITIONS)
def test_every_sample_is_in_exactly_one_client_with_its_own_label(name):
    f = PARTITIONS[name](0)
    rows = torch.cat([f.train.x, f.test.x]).flatten().long()
    assert rows.sort().values.tolist() == list(range(N))
    assert torch.equal(torch.cat([f.train.y, f.test.y]), torch.from_numpy(Y)[rows])
    assert len(set(f.ids)) == f.n_clients


@pytest.mark.parametrize("name", PARTITIONS)
def test_a_partition_depends_on_the_seed_only(name):
    first, again, other = (PARTITIONS[name](seed) for seed in (0, 0, 1))
    assert torch.equal(first.train.x, again.train.x)
    assert first.train.x.shape != other.train.x.shape or not torch.equal(first.train.x, other.train.x)


def test_clients_of_a_group_have_labels_of_that_group_only():
    f = by_label_groups(X, Y, MNIST_GROUPS, (2, 3, 4, 5))
    assert f.ids[:3] == ("g0-c0", "g0-c1", "g1-c0")
    groups = f.truth.memberships.argmax(1)
    assert groups.bincount().tolist() == [2, 3, 4, 5]
    counts = f.label_counts() + f.label_counts("test")
    for i, g in enumerate(groups.tolist()):
        assert set(counts[i].nonzero().flatten().tolist()) <= set(MNIST_GROUPS[g])
        own = sizes(f)[groups == g]
        assert own.max() - own.min() <= 1


def test_client_ids_sort_by_number():
    ids = by_label_groups(X, Y, MNIST_GROUPS, 12).ids
    assert ids[3] == "g0-c03"
    assert list(ids) == sorted(ids)


def test_the_papers_groups_cover_ten_classes():
    for groups in (MNIST_GROUPS, CIFAR10_GROUPS):
        assert sorted(label for group in groups for label in group) == list(range(10))
    names = [{CIFAR10_CLASSES[i] for i in group} for group in CIFAR10_GROUPS]
    assert names[:2] == [{"automobile", "truck"}, {"airplane", "ship"}]
    assert sum(CIFAR10_CLIENTS) == 80


def test_the_truth_is_the_mixture_of_the_actual_samples():
    f = dirichlet_sources(X, Y, MNIST_GROUPS, 20, 0.5)
    counts = f.label_counts() + f.label_counts("test")
    realised = torch.stack([counts[:, list(g)].sum(1) for g in MNIST_GROUPS], 1) / sizes(f)[:, None]
    torch.testing.assert_close(f.truth.memberships, realised)
    assert set(sizes(f).tolist()) == {30}


def test_a_small_alpha_makes_purer_clients():
    def purity(alpha: float) -> float:
        return float(dirichlet_sources(X, Y, clients=30, alpha=alpha).truth.memberships.max(1).values.mean())

    assert purity(0.1) > purity(1.0) > purity(100.0)


@settings(deadline=None, max_examples=60)
@given(
    supply=st.lists(st.integers(5, 300), min_size=1, max_size=5),
    clients=st.integers(1, 20),
    alpha=st.floats(0.1, 20),
    seed=st.integers(0, 100),
)
def test_allocations_use_every_sample_once(supply, clients, alpha, seed):
    clients = min(clients, sum(supply))
    counts = equal_sizes(np.array(supply), clients, alpha, np.random.default_rng(seed))
    assert (counts >= 0).all()
    assert counts.sum(0).tolist() == supply
    assert np.ptp(counts.sum(1)) <= 1
    least = sum(supply) // clients // 2
    counts = random_sizes(np.array(supply), clients, alpha, np.random.default_rng(seed), least)
    assert (counts >= 0).all()
    assert counts.sum(0).tolist() == supply
    assert counts.sum(1).min() >= least


def test_mixtures_stay_near_the_draw_if_supply_meets_demand():
    drawn = np.random.default_rng(3).dirichlet(np.full(4, 0.5), 400)
    counts = equal_sizes(np.full(4, 50_000), 400, 0.5, np.random.default_rng(3))
    assert np.abs(counts / counts.sum(1, keepdims=True) - drawn).mean() < 0.02


@pytest.mark.parametrize("equal", [True, False])
def test_both_readings_of_table_2_draw_the_same_mixtures(equal):
    """Variance of a Dirichlet(a) share over s sources is (s - 1) / (s^2 (s a + 1)), for any client sizes."""
    supply, alpha = np.full(3, 100_000), 0.5
    rng = np.random.default_rng(0)
    counts = equal_sizes(supply, 500, alpha, rng) if equal else random_sizes(supply, 500, alpha, rng, 1)
    variance = (counts / counts.sum(1, keepdims=True)).var(0).mean()
    assert variance == pytest.approx(2 / 9 / (3 * alpha + 1), rel=0.15)


def test_every_client_has_at_least_min_samples():
    f = dirichlet_labels(X, Y, 30, 0.05, min_samples=15)
    assert sizes(f).min() >= 15


def test_digits_have_four_groups():
    f = digits_federation(clients_per_group=3, seed=1)
    assert (f.n_clients, f.n_classes, f.name) == (12, 10, "digits")
    assert 0 <= f.train.x.min() < f.train.x.max() <= 1
    assert len(f.train) + len(f.test) == 1797


ERRORS = {
    "a label in two groups": (lambda: by_label_groups(X, Y, [[0, 1], [1]], 2), "must not overlap"),
    "a label in no group": (lambda: by_label_groups(X, Y, [[0, 1], [2]], 2), "labels .* not in any group"),
    "an empty group": (lambda: by_label_groups(X, Y, [list(range(10)), [11]], 2), r"group \[11\]"),
    "too many clients": (lambda: by_label_groups(X, Y, MNIST_GROUPS, 400), "too few for 400"),
    "numbers of clients": (lambda: by_label_groups(X, Y, MNIST_GROUPS, (1, 2)), "2 numbers for 4 groups"),
    "iid with too many": (lambda: iid(X, Y, N + 1), "601 clients for 600"),
    "alpha of zero": (lambda: dirichlet_labels(X, Y, 3, 0.0), "alpha is 0"),
    "too many clients for min_samples": (lambda: dirichlet_labels(X, Y, 100, 0.5), "at least 10 each"),
    "float targets": (lambda: dirichlet_labels(X, Y + 0.5, 3, 1.0), "needs labels"),
    "unpaired": (lambda: iid(X[:-1], Y, 3), "pair row by row"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_wrong_input_gives_an_error_of_one_line(case):
    build, pattern = ERRORS[case]
    with pytest.raises(DataError, match=pattern) as caught:
        build()
    assert "\n" not in str(caught.value)
