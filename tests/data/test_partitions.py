"""Partitions put every sample in one client; synthetic populations have the documented distributions."""

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from logistic_population import logistic_population
from synthetic_limits import bayes_accuracy

import ppfl.data as data
from ppfl.data.partitions import equal_sizes, random_sizes

N = 600
X = torch.arange(N, dtype=torch.float32)[:, None]
Y = np.random.default_rng(0).integers(0, 10, N)
PARTITIONS = {
    "label_groups": lambda seed: data.label_groups(Y, data.MNIST_GROUPS, 5, seed),
    "dirichlet_sources": lambda seed: data.dirichlet_sources(Y, data.MNIST_GROUPS, 20, 0.5, seed),
    "dirichlet_labels": lambda seed: data.dirichlet_labels(Y, 12, 0.3, seed),
    "iid": lambda seed: data.iid(Y, 7, seed),
}


def parted(clients, seed=0):
    return data.Federation.from_arrays(X, Y, clients, seed=seed)


def sizes(f):
    return f.train.sizes + f.test.sizes


def dirichlet_variance(alpha):
    """Of one of three shares."""
    return 2 / (9 * (3 * alpha + 1))


@pytest.mark.parametrize("name", PARTITIONS)
def test_every_sample_is_in_one_client_with_its_own_label_as_the_seed_says(name):
    f, again, other = (parted(PARTITIONS[name](seed), seed) for seed in (0, 0, 1))
    rows = torch.cat([f.train.x, f.test.x]).flatten().long()
    assert rows.sort().values.tolist() == list(range(N))
    assert torch.equal(torch.cat([f.train.y, f.test.y]), torch.from_numpy(Y)[rows])
    assert torch.equal(f.train.x, again.train.x)
    assert f.train.x.shape != other.train.x.shape or not torch.equal(f.train.x, other.train.x)


def test_clients_of_a_group_have_labels_of_that_group_only():
    f = parted(data.label_groups(Y, data.MNIST_GROUPS, (2, 3, 4, 5)))
    groups = f.truth.memberships.argmax(1)
    assert f.ids[:3] == ("g0-c0", "g0-c1", "g1-c0") and groups.bincount().tolist() == [2, 3, 4, 5]
    counts = f.label_counts() + f.label_counts("test")
    for i, g in enumerate(groups.tolist()):
        assert set(counts[i].nonzero().flatten().tolist()) <= set(data.MNIST_GROUPS[g])
        assert sizes(f)[groups == g].max() - sizes(f)[groups == g].min() <= 1


def test_mixtures_of_sources_are_those_of_the_samples():
    f = parted(data.dirichlet_sources(Y, data.MNIST_GROUPS, 20, 0.5))
    counts = f.label_counts() + f.label_counts("test")
    realised = torch.stack([counts[:, list(g)].sum(1) for g in data.MNIST_GROUPS], 1) / sizes(f)[:, None]
    torch.testing.assert_close(f.truth.memberships, realised)


@example([5] * 5, 8, 20.0)  # where rounding leaves a sample over
@given(st.lists(st.integers(5, 300), min_size=1, max_size=5), st.integers(1, 20), st.floats(0.1, 20))
def test_allocations_use_every_sample_once(supply, clients, alpha):
    clients = min(clients, sum(supply))
    least = sum(supply) // clients // 2
    equal = equal_sizes(np.array(supply), clients, alpha, np.random.default_rng(0))
    varied = random_sizes(np.array(supply), clients, alpha, np.random.default_rng(0), least)
    for counts in (equal, varied):
        assert (counts >= 0).all() and counts.sum(0).tolist() == supply
    assert np.ptp(equal.sum(1)) <= 1 and varied.sum(1).min() >= least


def test_equal_and_random_sizes_draw_dirichlet_mixtures():
    supply, rng = np.full(3, 100_000), np.random.default_rng(0)
    for counts in (equal_sizes(supply, 500, 0.5, rng), random_sizes(supply, 500, 0.5, rng, 1)):
        variance = (counts / counts.sum(1, keepdims=True)).var(0).mean()
        assert variance == pytest.approx(dirichlet_variance(0.5), rel=0.15)


MAKERS = {
    "classification": lambda seed: data.synthetic_classification(20, 10, test_points=20, seed=seed),
    "groups": lambda seed: data.synthetic_groups(seed=seed),
    "groups, regression": lambda seed: data.synthetic_groups(seed=seed, task="regression"),
    "linear": lambda seed: data.synthetic_linear(seed=seed),
    "logistic": lambda seed: logistic_population(50, seed=seed),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_truth_is_on_the_simplex_and_data_depend_on_the_seed(maker):
    first, again, other = (MAKERS[maker](seed) for seed in (0, 0, 1))
    c = first.truth.memberships
    assert (c >= 0).all() and first.truth.sources.shape == (c.shape[1], first.train.x.shape[1])
    torch.testing.assert_close(c.sum(1), torch.ones(first.n_clients))
    assert torch.equal(first.train.x, again.train.x) and torch.equal(first.test.y, again.test.y)
    assert not torch.equal(first.train.x[:5], other.train.x[:5])
    if maker.startswith("groups"):  # the source of its own group fits a client best
        score, y = first.train.x @ first.truth.sources.T, first.train.y[:, None]
        fits = -(score - y).square() if y.is_floating_point() else (score > 0) == y
        by_client = torch.zeros(first.n_clients, 3).index_add_(0, first.train.client_of(), fits.float())
        assert torch.equal(by_client.argmax(1), c.argmax(1))


def test_sizes_are_those_of_the_paper_features_uniform_and_memberships_dirichlet():
    sizes = data.synthetic_classification(3000, 2, test_points=0).train.sizes.double()
    assert (sizes.min(), sizes.max()) == (50, 1000)
    # for lognormal(4, 2), half are below e^4 and P(50 + e^(4 + 2z) > 1000) = P(z > 1.428)
    assert float(sizes.median()) == pytest.approx(50 + np.exp(4), abs=8)
    assert float((sizes == 1000).double().mean()) == pytest.approx(0.0766, abs=0.02)
    labelled = data.synthetic_classification(4000, 5, test_points=0, min_size=9, max_size=10)
    logistic = logistic_population(4000, dim=5, k=3, alpha=0.3, test_points=0)
    for f, alpha in ((labelled, 0.4), (logistic, 0.3)):
        x, c = f.train.x, f.truth.memberships
        assert f.test is None and (x.min(), x.max()) == (pytest.approx(-1, abs=1e-3), pytest.approx(1, abs=1e-3))
        assert float(x.mean()) == pytest.approx(0, abs=0.01) and float(x.var()) == pytest.approx(1 / 3, abs=0.01)
        assert float(c.var(0).mean()) == pytest.approx(dirichlet_variance(alpha), rel=0.05)


def test_points_come_from_the_sources_in_the_proportions_of_the_client():
    """Without noise, a label agrees with source k if k generated it, otherwise with a probability set by the angle."""
    f = data.synthetic_classification(4, 400, alpha=1.0, noise=0.0, test_points=20_000, seed=2)
    agree = ((f.test.x @ f.truth.sources.T > 0).long() == f.test.y[:, None]).float()
    unit = torch.nn.functional.normalize(f.truth.sources, dim=1)
    same_side = 1 - torch.arccos((unit @ unit.T).clamp(-1, 1)) / torch.pi  # probability that two half-spaces agree
    torch.testing.assert_close(agree.reshape(4, -1, 3).mean(1), f.truth.memberships @ same_side, atol=0.015, rtol=0)


def test_labels_and_training_data_do_not_depend_on_order_or_number_of_test_points_or_clients():
    """In the published generator the last points of every client all have label 0."""
    few, many = (data.synthetic_classification(30, 20, test_points=n) for n in (0, 200))
    assert few.test is None and torch.equal(few.train.x, many.train.x)
    assert 0.4 < many.test.y.reshape(30, 200)[:, 150:].double().mean() < 0.6
    few, many = logistic_population(7, seed=3, test_points=0).train, logistic_population(40, seed=3).train
    assert few.x.equal(many.x[: len(few)]) and few.y.equal(many.y[: len(few)])


def test_the_bayes_rule_is_right_up_to_noise_and_better_than_similar_rules():
    assert bayes_accuracy(data.synthetic_classification(10, 50, sources=1, noise=0.0, test_points=200)) == 1
    f = data.synthetic_classification(100, 150, test_points=300, seed=5)
    best = bayes_accuracy(f)
    assert 0.83 < best < 0.90
    score, own = f.test.x @ f.truth.sources.T, f.truth.memberships[f.test.client_of()]
    main_source, mixed_weights = score.gather(1, own.argmax(1, keepdim=True)).flatten(), (own * score).sum(1)
    assert all(((rule > 0) == f.test.y).double().mean() <= best for rule in (main_source, mixed_weights))


def test_targets_follow_the_model_of_the_client():
    """Linear targets differ by the noise only; of labels with probability p a share p is 1, to 4.5 standard errors."""
    f = data.synthetic_linear(n_clients=100, noise=0.3)
    own = (f.truth.memberships @ f.truth.sources)[f.train.client_of()]
    assert float((f.train.y - (f.train.x * own).sum(1)).std()) == pytest.approx(0.3, rel=0.05)
    f = logistic_population(4000, samples=10, dim=6, k=3)
    own = f.truth.memberships @ f.truth.sources
    p = torch.sigmoid((f.train.x * own[f.train.client_of()]).sum(1)).double()
    for low in torch.arange(0, 1, 0.1):
        near = (p >= low) & (p < low + 0.1)
        error = (p[near] * (1 - p[near])).sum().sqrt()
        assert abs(float((f.train.y[near] - p[near]).sum())) < 4.5 * float(error)
