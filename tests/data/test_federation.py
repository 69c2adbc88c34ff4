"""A federation has clients as named slices, and a client does not depend on the other clients."""

from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kit.refusals import DataError, assert_refused
from ppfl.data import Federation, Samples, Truth, samples
from ppfl.data.client_rows import group_rows


def rows(n: int = 30, clients: int = 3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows in random order; the single feature is the row number, so each sample can be recognised."""
    client = np.random.default_rng(0).permutation(np.resize(np.arange(clients), n))
    return np.arange(n, dtype=np.float32)[:, None], np.arange(n) % 2, client


def values(samples: Samples | None) -> list[float]:
    return [] if samples is None else samples.x.flatten().tolist()


@given(
    client=st.lists(st.integers(0, 6), min_size=12, max_size=60).filter(lambda c: max(c.count(i) for i in c) > 2),
    seed=st.integers(0, 5),
)
def test_every_row_is_in_one_split_of_its_own_client_in_order(client, seed):
    x = np.arange(len(client), dtype=np.float32)[:, None]
    f = Federation.from_arrays(x, np.arange(len(client)) % 2, client, test_fraction=0.3, seed=seed)
    assert sorted(values(f.train) + values(f.test)) == x.flatten().tolist()
    assert f.ids == tuple(dict.fromkeys(str(c) for c in client))
    for id in f.ids:
        own = f.client(id)
        assert {client[int(v)] for part in own.values() for v in values(part)} == {int(id)}
        assert len(own["train"]) >= 1 and values(own["train"]) == sorted(values(own["train"]))
    for part in f.splits.values():
        assert part.offsets[0] == 0 and part.offsets[-1] == len(part)
        assert torch.equal(part.sizes, torch.bincount(part.client_of(), minlength=f.n_clients))


@given(st.lists(st.integers(0, 6), min_size=1, max_size=40), st.sampled_from(["runs", "rows"]))
def test_grouping_does_not_depend_on_order_or_type_of_ids(client, order):
    """The same as naive grouping, for sorted and mixed rows and for ids of any type."""
    client = sorted(client) if order == "runs" else client
    names, every = list(dict.fromkeys(client)), torch.arange(len(client))
    expected = [[row for row, name in enumerate(client) if name == one] for one in names]
    numbers = np.array(client)
    for column in (client, numbers.astype(float), torch.tensor(client), [*map(str, client)], numbers.astype("O")):
        found, turned = group_rows(column), group_rows(column, ids=names[::-1])
        assert found.ids == tuple(map(str, names)) and found.sizes.tolist() == [len(rows) for rows in expected]
        assert found.take(every).tolist() == [row for rows in expected for row in rows]
        assert turned.take(every).tolist() == [row for rows in expected[::-1] for row in rows]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.uint64])
def test_client_numbers_may_be_the_largest_of_their_type(dtype):
    ends = [np.iinfo(dtype).max, np.iinfo(dtype).min, np.iinfo(dtype).max - 1]
    for numbers in (ends, ends[::2]):
        found = group_rows(np.array(numbers * 3, dtype))
        assert found.ids == tuple(str(number) for number in numbers)
        order = found.take(torch.arange(3 * len(numbers))).reshape(len(numbers), 3)
        assert order.diff().unique().tolist() == [len(numbers)]


def test_rows_already_sorted_by_client_are_not_copied_and_a_client_is_a_view():
    x, y, client = torch.arange(60.0).reshape(30, 2), torch.arange(30) % 2, torch.arange(30) // 10
    f = Federation.from_arrays(x, y, client, test_fraction=0)
    assert f.train.x.data_ptr() == x.data_ptr()
    f.client(f.ids[1])["train"].x.fill_(-7)
    assert (f.train.x == -7).all(1).nonzero().flatten().tolist() == list(range(10, 20))
    spread = torch.arange(120.0).reshape(30, 4)[:, ::2]
    apart = Federation.from_arrays(spread, y, client, test_fraction=0).train.x
    assert apart.is_contiguous() and apart.equal(spread)
    with pytest.raises(AttributeError):
        f.name = "other"


@given(st.lists(st.integers(0, 4), min_size=1, max_size=6), st.data())
def test_taking_clients_and_samples_is_slicing_and_masking(sizes, data):
    offsets = torch.tensor([0, *np.cumsum(sizes)])
    n = int(offsets[-1])
    whole = Samples(torch.arange(2.0 * n).reshape(n, 2), torch.arange(n), offsets)
    at = data.draw(st.lists(st.integers(0, len(sizes) - 1), max_size=8))
    taken, own = whole.take(at), [whole.client(i) for i in at]
    assert taken.sizes.tolist() == [len(part) for part in own]
    assert taken.y.tolist() == [y for part in own for y in part.y.tolist()] == taken.x[:, 0].div(2).tolist()
    keep = torch.tensor(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)), dtype=torch.bool)
    kept = whole.where(keep)
    assert kept.y.equal(whole.y[keep]) and kept.x.equal(whole.x[keep])
    assert kept.sizes.tolist() == [int(keep[a:b].sum()) for a, b in pairwise(offsets)]


def test_weights_are_shares_of_training_samples_unless_they_are_given():
    f = Federation.from_arrays(np.zeros((10, 2)), [0, 1] * 5, ["a"] * 8 + ["b"] * 2, test_fraction=0)
    torch.testing.assert_close(f.weights, torch.tensor([0.8, 0.2]))
    held = f.holdout(0.5)
    torch.testing.assert_close(held.weights, held.train.sizes / len(held.train))
    given = Federation.from_arrays(*rows(), weights={2: 1, 1: 1, 0: 2}, test_fraction=0).holdout(0.2)
    assert dict(zip(given.ids, given.weights.tolist(), strict=True)) == {"0": 0.5, "1": 0.25, "2": 0.25}


@pytest.mark.parametrize("into", ["test", "validation"])
def test_a_holdout_depends_on_seed_and_purpose_and_not_on_other_clients(into):
    everyone = Federation.from_arrays(*rows(60, 5), test_fraction=0)
    assert everyone.holdout(0.0) is everyone
    some = everyone.select([everyone.ids[3], everyone.ids[1]])
    for seed in range(3):
        whole, part = everyone.holdout(0.3, seed, into), some.holdout(0.3, seed, into)
        for id in some.ids:
            assert values(whole.client(id)[into]) == values(part.client(id)[into])
    other = "validation" if into == "test" else "test"
    first = values(everyone.holdout(0.3, 0, into).split(into))
    assert first != values(everyone.holdout(0.3, 1, into).split(into))
    assert first != values(everyone.holdout(0.3, 0, other).split(other))


@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.floats(0.3, 0.95), st.integers(1, 100))
def test_a_holdout_does_not_depend_on_the_block_size(sizes, fraction, block):
    sizes = [*sizes, 2]
    ids = [f"client {i}" for i in range(len(sizes))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samples, "BLOCK", block)
        together = samples.held_out(torch.tensor(sizes), ids, fraction, 3, "test")
    for size, id, own in zip(sizes, ids, together.split(sizes), strict=True):
        assert int(own.sum()) == min(size - 1, int(fraction * size + 0.5))
        if size > 1:
            assert own.equal(samples.held_out(torch.tensor([size]), [id], fraction, 3, "test"))


def test_a_holdout_takes_every_sample_equally_often():
    ids = [f"client {i}" for i in range(6000)]
    times = samples.held_out(torch.full((6000,), 5), ids, 0.2, 0, "test").reshape(6000, 5).sum(0).double()
    assert float(((times - 1200) ** 2 / 1200).sum()) < 18.5  # 99.9 % quantile with 4 degrees of freedom


def test_from_arrays_holdout_and_marks_hold_out_the_same_samples():
    x, y, client = rows()
    at_once = Federation.from_arrays(x, y, client, test_fraction=0.2, validation_fraction=0.25, seed=4)
    stepwise = Federation.from_arrays(x, y, client, test_fraction=0).holdout(0.2, 4).holdout(0.25, 4, into="validation")
    marked = Federation.from_arrays(x, y, client, is_test=np.isin(x[:, 0], values(at_once.test)))
    for split in ("train", "test", "validation"):
        assert values(at_once.split(split)) == values(stepwise.split(split))
    torch.testing.assert_close(at_once.weights, stepwise.weights)
    assert values(marked.test) == values(at_once.test)


def test_a_small_client_has_no_test_sample_but_still_trains():
    f = Federation.from_arrays(np.zeros((6, 1)), [0, 1] * 3, ["tiny"] + ["large"] * 5)
    assert (f.train.sizes.tolist(), f.test.sizes.tolist(), f.test.client_of().tolist()) == ([1, 4], [0, 1], [1])
    assert f.select(["large", "tiny"]).test.sizes.tolist() == [1, 0]
    assert f.select(["tiny"]).test.sizes.tolist() == [0]


def test_selection_is_by_id_and_keeps_everything_else():
    truth = Truth(torch.eye(3))
    f = Federation.from_arrays(*rows(), ids=["0", "1", "2"], truth=truth, classes=("no", "yes", "maybe"))
    picked = f.select(["2", "0"])
    assert (picked.ids, picked.classes) == (("2", "0"), f.classes)
    assert picked.weights.sum() == pytest.approx(1)
    assert picked.truth.memberships.tolist() == [[0, 0, 1], [1, 0, 0]]
    for id in picked.ids:
        for split in ("train", "test"):
            assert values(picked.client(id)[split]) == values(f.client(id)[split])


def test_counts_and_means_are_those_of_each_client():
    x, y, client = rows()
    f = Federation.from_arrays(x.repeat(6, 1).reshape(30, 2, 3), y, client, test_fraction=0.2)
    total = f.label_counts() + f.label_counts("test")
    assert f.feature_means().shape == (3, 6)
    for i, id in enumerate(f.ids):
        assert total[i].tolist() == np.bincount(y[client == int(id)], minlength=2).tolist()
        torch.testing.assert_close(f.feature_means()[i], f.client(id)["train"].x.mean(0).flatten())
    tokens = Federation.from_arrays([[1, 2]] * 4, [0, 1, 0, 1], list("aabb"), tokens=True, test_fraction=0)
    assert tokens.train.x.dtype == torch.int64
    assert_refused(tokens.feature_means, DataError, "tokens have no mean")


@pytest.mark.parametrize("kind", ["list", "torch", "pandas"])
def test_the_type_of_container_does_not_matter(kind):
    x, y, client = rows()
    turn = {"list": lambda a: a.tolist(), "torch": torch.from_numpy, "pandas": pd.Series}[kind]
    given = pd.DataFrame({"f": x[:, 0]}) if kind == "pandas" else turn(x)
    f, g = Federation.from_arrays(given, turn(y), turn(client)), Federation.from_arrays(x, y, client)
    assert (f.ids, f.train.x.dtype, f.train.y.dtype) == (g.ids, torch.float32, torch.int64)
    assert torch.equal(f.train.x, g.train.x) and torch.equal(f.test.y, g.test.y)
    table = pd.DataFrame({"f": x[:, 0], "g": x[:, 0] > 3})
    assert Federation.from_arrays(table, y, client).features == ("f", "g")


def test_strings_become_classes_floats_targets_and_one_class_may_be_all():
    def made(y, **settings) -> Federation:
        return Federation.from_arrays(np.zeros((4, 1)), y, list("aabb"), test_fraction=0, **settings)

    named, numbers, apart = made(["b", "a", "b", "a"]), made([0.5, 1.0, 2.0, 3.0]), made([0, 0, 3, 3])
    assert (named.classes, named.train.y.tolist()) == (("a", "b"), [1, 0, 1, 0])
    assert (numbers.n_classes, numbers.train.y.dtype) == (None, torch.float32)
    assert made([0.0, 1.0, 2.0, 0.0], task="classification").n_classes == 3
    assert apart.label_counts().tolist() == [[2, 0, 0, 0], [0, 0, 0, 2]] and apart.select(["a"]).n_classes == 4
    assert made([1] * 4, classes=("n", "y")).n_classes == made(["y"] * 4, classes=("n", "y")).n_classes == 2


def test_a_dtype_is_applied_to_floats_only_and_a_description_is_one_line():
    f = Federation.from_arrays(
        *rows(), ids=[0, 1, 2], truth=Truth(torch.eye(3), sources=torch.eye(3)), classes=("no", "yes"), name="toy"
    )
    g = f.to("cpu", torch.float64)
    assert (g.train.x.dtype, g.test.x.dtype, g.train.y.dtype) == (torch.float64, torch.float64, torch.int64)
    assert torch.equal(g.truth.memberships, f.truth.memberships)
    assert (
        f.describe() == "toy: 3 clients, 24 train / 6 test samples (8-8 per client), x (1,), 2 classes, 3 true sources"
    )
