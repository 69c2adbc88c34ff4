"""A federation has clients as named slices, and a client does not depend on the other clients."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppfl.core.errors import DataError
from ppfl.data import Federation, Samples, Truth, samples
from ppfl.data.client_rows import group_rows


def rows(n: int = 30, clients: int = 3, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Rows in random order; the single feature is the row number, so each sample can be recognised."""
    rng = np.random.default_rng(seed)
    client = rng.permutation(np.resize(np.arange(clients), n))
    return np.arange(n, dtype=np.float32)[:, None], np.arange(n) % 2, client


def values(samples: Samples | None) -> list[float]:
    return [] if samples is None else samples.x.flatten().tolist()


@settings(deadline=None, max_examples=50)
@given(
    client=st.lists(st.integers(0, 6), min_size=12, max_size=60).filter(lambda c: max(c.count(i) for i in c) > 2),
    seed=st.integers(0, 5),
)
def test_every_row_is_in_one_split_of_its_own_client(client, seed):
    x = np.arange(len(client), dtype=np.float32)[:, None]
    f = Federation.from_arrays(x, np.arange(len(client)) % 2, client, test_fraction=0.3, seed=seed)
    assert sorted(values(f.train) + values(f.test)) == x.flatten().tolist()
    assert f.ids == tuple(dict.fromkeys(str(c) for c in client))
    for id in f.ids:
        own = f.client(id)
        assert {client[int(v)] for part in own.values() for v in values(part)} == {int(id)}
        assert len(own["train"]) >= 1
    for part in f.splits.values():
        assert part.offsets[0] == 0
        assert part.offsets[-1] == len(part)
        assert torch.equal(part.sizes, torch.bincount(part.client_of(), minlength=f.n_clients))


def test_rows_keep_their_order_within_a_client():
    f = Federation.from_arrays(*rows(), test_fraction=0)
    for id in f.ids:
        assert values(f.client(id)["train"]) == sorted(values(f.client(id)["train"]))


@given(st.lists(st.integers(0, 6), min_size=1, max_size=40), st.sampled_from(["runs", "rows"]))
def test_grouping_does_not_depend_on_order_or_type_of_ids(client, order):
    """The same as naive grouping, for sorted and mixed rows and for ids of any type."""
    client = sorted(client) if order == "runs" else client
    names = list(dict.fromkeys(client))
    expected = [[row for row, name in enumerate(client) if name == one] for one in names]
    for column in (
        client,
        np.array(client, float),
        torch.tensor(client),
        list(map(str, client)),
        np.array(client, "O"),
    ):
        found = group_rows(column)
        assert found.ids == tuple(map(str, names)) and found.sizes.tolist() == [len(rows) for rows in expected]
        assert found.take(torch.arange(len(client))).tolist() == [row for rows in expected for row in rows]
        turned = group_rows(column, ids=names[::-1])
        assert turned.take(torch.arange(len(client))).tolist() == [row for rows in expected[::-1] for row in rows]


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.uint64])
def test_client_numbers_may_be_the_largest_of_their_type(dtype):
    ends = [np.iinfo(dtype).max, np.iinfo(dtype).min, np.iinfo(dtype).max - 1]
    for numbers in (ends, ends[::2]):
        column = np.array(numbers * 3, dtype)
        found = group_rows(column)
        assert found.ids == tuple(str(number) for number in numbers)
        assert found.take(torch.arange(len(column))).reshape(len(numbers), 3).diff().unique().tolist() == [len(numbers)]


def test_rows_already_sorted_by_client_are_not_copied():
    x, y, client = torch.randn(30, 2), torch.arange(30) % 2, torch.arange(30) // 10
    assert Federation.from_arrays(x, y, client, test_fraction=0).train.x.data_ptr() == x.data_ptr()
    spread = torch.randn(30, 4)[:, ::2]
    f = Federation.from_arrays(spread, y, client, test_fraction=0)
    assert f.train.x.is_contiguous() and f.train.x.equal(spread)


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


def test_default_weights_are_shares_of_the_training_samples():
    f = Federation.from_arrays(np.zeros((10, 2)), [0, 1] * 5, ["a"] * 8 + ["b"] * 2, test_fraction=0)
    torch.testing.assert_close(f.weights, torch.tensor([0.8, 0.2]))
    held = f.holdout(0.5)
    torch.testing.assert_close(held.weights, held.train.sizes / len(held.train))


def test_given_weights_are_matched_by_id_and_survive_a_holdout():
    f = Federation.from_arrays(*rows(), weights={2: 1, 1: 1, 0: 2}, test_fraction=0).holdout(0.2)
    assert dict(zip(f.ids, f.weights.tolist(), strict=True)) == {"0": 0.5, "1": 0.25, "2": 0.25}


@pytest.mark.parametrize("into", ["test", "validation"])
def test_a_holdout_does_not_depend_on_other_clients(into):
    all_clients = Federation.from_arrays(*rows(60, 5), test_fraction=0)
    some = all_clients.select([all_clients.ids[3], all_clients.ids[1]])
    for seed in range(3):
        whole, part = all_clients.holdout(0.3, seed, into), some.holdout(0.3, seed, into)
        for id in some.ids:
            assert values(whole.client(id)[into]) == values(part.client(id)[into])


def test_a_holdout_depends_on_seed_and_purpose():
    f = Federation.from_arrays(*rows(60, 3), test_fraction=0)
    first = values(f.holdout(0.3, seed=0).test)
    assert values(f.holdout(0.3, seed=0).test) == first
    assert values(f.holdout(0.3, seed=1).test) != first
    assert values(f.holdout(0.3, seed=0, into="validation").validation) != first


@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.floats(0.3, 0.95), st.integers(1, 100))
def test_a_holdout_does_not_depend_on_the_block_size(sizes, fraction, block):
    if max(sizes) == 1:
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


def test_from_arrays_and_holdout_hold_out_the_same_samples():
    at_once = Federation.from_arrays(*rows(), test_fraction=0.2, validation_fraction=0.25, seed=4)
    stepwise = Federation.from_arrays(*rows(), test_fraction=0).holdout(0.2, 4).holdout(0.25, 4, into="validation")
    for split in ("train", "test", "validation"):
        assert values(at_once.split(split)) == values(stepwise.split(split))
    torch.testing.assert_close(at_once.weights, stepwise.weights)


def test_a_small_client_has_no_test_sample_but_still_trains():
    f = Federation.from_arrays(np.zeros((6, 1)), [0, 1] * 3, ["tiny"] + ["large"] * 5)
    assert f.train.sizes.tolist() == [1, 4]
    assert f.test.sizes.tolist() == [0, 1]
    assert f.test.client_of().tolist() == [1]
    assert f.select(["large", "tiny"]).test.sizes.tolist() == [1, 0]
    assert f.select(["tiny"]).test.sizes.tolist() == [0]


def test_a_holdout_of_nothing_changes_nothing():
    f = Federation.from_arrays(*rows(), test_fraction=0)
    assert f.holdout(0.0) is f


def test_marked_rows_are_the_test_rows():
    x, y, client = rows()
    mark = np.arange(30) % 5 == 0
    f = Federation.from_arrays(x, y, client, is_test=mark)
    assert sorted(values(f.test)) == x[mark].flatten().tolist()


def test_selection_is_by_id_and_keeps_everything_else():
    truth = Truth(torch.eye(3))
    f = Federation.from_arrays(*rows(), ids=["0", "1", "2"], truth=truth, classes=("no", "yes", "maybe"))
    picked = f.select(["2", "0"])
    assert picked.ids == ("2", "0")
    assert picked.classes == f.classes
    assert picked.weights.sum() == pytest.approx(1)
    assert picked.truth.memberships.tolist() == [[0, 0, 1], [1, 0, 0]]
    for id in picked.ids:
        for split in ("train", "test"):
            assert values(picked.client(id)[split]) == values(f.client(id)[split])


def test_a_selection_of_one_class_keeps_all_classes():
    f = Federation.from_arrays(np.zeros((6, 1)), [0, 0, 0, 3, 3, 3], list("aaabbb"), test_fraction=0)
    assert f.select(["a"]).n_classes == f.n_classes == 4


def test_label_counts_count_labels():
    x, y, client = rows()
    f = Federation.from_arrays(x, y, client, test_fraction=0.2)
    total = f.label_counts() + f.label_counts("test")
    for i, id in enumerate(f.ids):
        assert total[i].tolist() == np.bincount(y[client == int(id)], minlength=2).tolist()


def test_feature_means_are_means():
    f = Federation.from_arrays(torch.randn(30, 2, 3), *rows()[1:])
    assert f.feature_means().shape == (3, 6)
    for i, id in enumerate(f.ids):
        torch.testing.assert_close(f.feature_means()[i], f.client(id)["train"].x.mean(0).flatten())


def test_a_client_is_a_view():
    f = Federation.from_arrays(*rows(), test_fraction=0)
    f.client(f.ids[1])["train"].x.fill_(-1)
    assert (f.train.x == -1).sum() == f.train.sizes[1]


@pytest.mark.parametrize("kind", ["list", "numpy", "torch", "pandas"])
def test_the_type_of_container_does_not_matter(kind):
    x, y, client = rows()
    if kind == "pandas":
        pd = pytest.importorskip("pandas")
        table = pd.DataFrame({"f": x[:, 0], "g": x[:, 0] > 3})
        given = (table, pd.Series(y), pd.Series(client))
        assert Federation.from_arrays(*given).features == ("f", "g")
        given = (table[["f"]], *given[1:])
    else:
        turn = {"list": lambda a: a.tolist(), "numpy": lambda a: a, "torch": torch.from_numpy}[kind]
        given = tuple(turn(a) for a in (x, y, client))
    f, g = Federation.from_arrays(*given), Federation.from_arrays(x, y, client)
    assert (f.ids, f.train.x.dtype, f.train.y.dtype) == (g.ids, torch.float32, torch.int64)
    assert torch.equal(f.train.x, g.train.x)
    assert torch.equal(f.test.y, g.test.y)


def test_strings_become_classes_and_floats_targets():
    f = Federation.from_arrays(np.zeros((4, 1)), ["b", "a", "b", "a"], [1, 1, 2, 2], test_fraction=0)
    assert (f.classes, f.train.y.tolist()) == (("a", "b"), [1, 0, 1, 0])
    f = Federation.from_arrays(np.zeros((4, 1)), [0.5, 1.0, 2.0, 3.0], [1, 1, 2, 2], test_fraction=0)
    assert (f.n_classes, f.train.y.dtype) == (None, torch.float32)
    f = Federation.from_arrays(np.zeros((4, 1)), [0.0, 1.0, 2.0, 0.0], list("aaab"), task="classification")
    assert f.n_classes == 3
    f = Federation.from_arrays(np.zeros((4, 1)), ["b"] * 4, [1] * 4, classes=("a", "b"))
    assert f.train.y.unique().tolist() == [1]


def test_tokens_stay_integers():
    f = Federation.from_arrays([[1, 2]] * 4, [0, 1, 0, 1], list("aabb"), tokens=True, test_fraction=0)
    assert f.train.x.dtype == torch.int64
    with pytest.raises(DataError, match="tokens have no mean"):
        f.feature_means()


def test_a_dtype_is_applied_to_floats_only():
    f = Federation.from_arrays(*rows(), ids=[0, 1, 2], truth=Truth(torch.eye(3), sources=torch.eye(3)))
    g = f.to("cpu", torch.float64)
    assert (g.train.x.dtype, g.test.x.dtype, g.train.y.dtype) == (torch.float64, torch.float64, torch.int64)
    assert torch.equal(g.truth.memberships, f.truth.memberships)


def test_a_description_is_one_line():
    text = Federation.from_arrays(*rows(), name="toy").describe()
    assert text == "toy: 3 clients, 24 train / 6 test samples (8-8 per client), x (1,), 2 classes"


def test_a_federation_is_immutable():
    f = Federation.from_arrays(*rows())
    with pytest.raises(AttributeError):
        f.name = "other"
