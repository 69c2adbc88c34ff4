"""A federation has clients as named slices, and a client does not depend on the other clients."""

from dataclasses import replace
from decimal import Decimal
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lazy_population import lazy_population

from kit.refusals import DataError, assert_refused
from ppfl.data import Federation, Samples, Truth, checks, samples
from ppfl.data.ids import group_rows, text_ids


def rows(n=30, clients=3):
    """Rows in random order; the single feature is the row number, so each sample can be recognised."""
    client = np.random.default_rng(0).permutation(np.resize(np.arange(clients), n))
    return np.arange(n, dtype=np.float32)[:, None], np.arange(n) % 2, client


def values(part):
    return [] if part is None else part.x.flatten().tolist()


@given(st.lists(st.integers(0, 6), min_size=15, max_size=60), st.integers(0, 5))
def test_every_row_is_in_one_split_of_its_own_client_in_order(client, seed):
    x = np.arange(len(client), dtype=np.float32)[:, None]
    f = Federation.from_arrays(x, np.arange(len(client)) % 2, client, test_fraction=0.3, seed=seed)
    assert sorted(values(f.train) + values(f.test)) == x.flatten().tolist()
    assert f.ids == tuple(dict.fromkeys(str(c) for c in client))
    for id in f.ids:
        own = f.client(id)
        assert {client[int(v)] for part in own.values() for v in values(part)} == {int(id)}
        assert len(own["train"]) >= 1 and values(own["train"]) == sorted(values(own["train"]))


NUMBERS_AS_STORED = [
    [7, 12], [7.0, 12.0], ["7", "12"], np.array([7, 12], np.uint8), np.array([7.0, 12.0], np.float32),
    np.array([7, 12.0], object), np.array([np.float32(7), Decimal("12.0")], object), pd.array([7, 12], "Int64"),
    pd.Categorical([7, 12]), torch.tensor([7, 12]),
]  # fmt: skip


@pytest.mark.parametrize("ids", NUMBERS_AS_STORED, ids=repr)
def test_a_whole_number_is_one_client_however_it_is_stored_and_text_stays_as_it_is(ids):
    assert text_ids(ids).tolist() == ["7", "12"]
    assert text_ids(["007", "7.0", "NA", "7"]).tolist() == ["007", "7.0", "NA", "7"]
    for odd in ([7.5, 1.0], np.array([7, 7.5], object)):
        assert_refused(lambda: text_ids(odd), DataError, "fractions", str(max(odd)))


@given(st.lists(st.integers(0, 6), min_size=1, max_size=40), st.booleans())
def test_rows_are_grouped_as_a_loop_does_for_ids_of_any_type(client, in_order):
    client = sorted(client) if in_order else client
    names, every = list(dict.fromkeys(client)), torch.arange(len(client))
    expected = [[row for row, name in enumerate(client) if name == one] for one in names]
    numbers = np.array(client)
    for column in (client, numbers.astype(float), torch.tensor(client), [*map(str, client)], numbers.astype("O")):
        found, turned = group_rows(column), group_rows(column, ids=names[::-1])
        assert found.ids == tuple(map(str, names)) and found.sizes.tolist() == [len(rows) for rows in expected]
        assert found.take(every).tolist() == [row for rows in expected for row in rows]
        assert turned.take(every).tolist() == [row for rows in expected[::-1] for row in rows]


def test_client_numbers_may_be_the_largest_of_their_type():
    for type in map(np.iinfo, (np.int8, np.int64, np.uint64)):
        ends = [type.max, type.min, type.max - 1]
        found = group_rows(np.array(ends * 2, type.dtype))
        assert found.ids == tuple(map(str, ends)) and found.take(torch.arange(6)).tolist() == [0, 3, 1, 4, 2, 5]


def test_rows_already_sorted_by_client_are_not_copied_and_a_client_is_a_view():
    x, y, client = torch.arange(60.0).reshape(30, 2), torch.arange(30) % 2, torch.arange(30) // 10
    f = Federation.from_arrays(x, y, client, test_fraction=0)
    assert f.train.x.data_ptr() == x.data_ptr()
    f.client(f.ids[1])["train"].x.fill_(-7)
    assert (f.train.x == -7).all(1).nonzero().flatten().tolist() == list(range(10, 20))


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
    assert f.holdout(0.0) is f
    torch.testing.assert_close(held.weights, held.train.sizes / len(held.train))
    lazy = lazy_population(10_000_000, dim=1, k=1, test_points=0)
    weights = lazy.weights * torch.tensor([0.9, 1.1]).repeat(5_000_000)
    some = replace(lazy, weights=weights / weights.double().sum(), by_size=False).importance[:2]
    assert float(some[1] / some[0]) == pytest.approx(1.1 / 0.9)  # however small the shares of so many clients are
    assert lazy.importance[:2].tolist() == [10, 10]
    given = Federation.from_arrays(*rows(), weights={2: 1, 1: 1, 0: 2}, test_fraction=0).holdout(0.2)
    assert dict(zip(given.ids, given.weights.tolist(), strict=True)) == {"0": 0.5, "1": 0.25, "2": 0.25}


def test_a_holdout_is_uniform_and_depends_on_seed_and_purpose_and_not_on_other_clients():
    everyone = Federation.from_arrays(*rows(60, 5), test_fraction=0)
    some, found = everyone.select([everyone.ids[3], everyone.ids[1]]), set()
    for seed, into in ((0, "test"), (1, "test"), (0, "validation")):
        whole, part = everyone.holdout(0.3, seed, into), some.holdout(0.3, seed, into)
        assert all(values(whole.client(id)[into]) == values(part.client(id)[into]) for id in some.ids)
        found.add(tuple(values(whole.split(into))))
    assert len(found) == 3
    ids = [f"client {i}" for i in range(6000)]
    times = samples.held_out(torch.full((6000,), 5), ids, 0.2, 0, "test").reshape(6000, 5).sum(0).double()
    assert float(((times - 1200) ** 2 / 1200).sum()) < 18.5  # 99.9 % quantile with 4 degrees of freedom


@given(st.lists(st.integers(1, 40), min_size=1, max_size=9), st.floats(0.3, 0.95), st.integers(1, 100))
def test_a_holdout_does_not_depend_on_the_block_size(sizes, fraction, block):
    sizes = [*sizes, 2]
    ids = [f"client {i}" for i in range(len(sizes))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(samples, "BLOCK", block)
        together = samples.held_out(torch.tensor(sizes), ids, fraction, 3, "test")
    for size, id, own in zip(sizes, ids, together.split(sizes), strict=True):
        assert int(own.sum()) == min(size - 1, int(fraction * size + 0.5))
        assert size == 1 or own.equal(samples.held_out(torch.tensor([size]), [id], fraction, 3, "test"))


def test_from_arrays_holdout_and_marks_hold_out_the_same_samples():
    x, y, client = rows()
    at_once = Federation.from_arrays(x, y, client, test_fraction=0.2, validation_fraction=0.25, seed=4)
    stepwise = Federation.from_arrays(x, y, client, test_fraction=0).holdout(0.2, 4).holdout(0.25, 4, into="validation")
    marked = Federation.from_arrays(x, y, client, is_test=np.isin(x[:, 0], values(at_once.test)))
    for split in ("train", "test", "validation"):
        assert values(at_once.split(split)) == values(stepwise.split(split))
    assert values(marked.test) == values(at_once.test)


def test_a_selection_is_by_id_and_keeps_everything_else():
    classes = ("no", "yes", "maybe")
    f = Federation.from_arrays(*rows(), ids=["0", "1", "2"], truth=Truth(torch.eye(3)), classes=classes)
    picked = f.select(["2", "0"])
    assert (picked.ids, picked.classes) == (("2", "0"), classes)
    assert picked.truth.memberships.tolist() == [[0, 0, 1], [1, 0, 0]]
    for id in picked.ids:
        assert all(values(part) == values(f.client(id)[split]) for split, part in picked.client(id).items())
    double = f.to("cpu", torch.float64)
    assert (double.test.x.dtype, double.train.y.dtype) == (torch.float64, torch.int64)
    f = Federation.from_arrays(np.zeros((6, 1)), [0, 1] * 3, ["tiny"] + ["large"] * 5)  # too small for a test sample
    assert (f.train.sizes.tolist(), f.test.sizes.tolist(), f.test.client_of().tolist()) == ([1, 4], [0, 1], [1])
    assert f.select(["large", "tiny"]).test.sizes.tolist() == [1, 0]


def test_samples_are_checked_where_a_federation_is_built_and_copies_are_trusted(monkeypatch):
    checked = []
    monkeypatch.setattr(checks, "check_finite", lambda ids, split, samples: checked.append(split))
    f = Federation.from_arrays(*rows(), validation_fraction=0.2)
    assert checked == ["train", "test", "validation"]
    copies = [f.to("cpu", torch.float64), f.select(["2", "0"]), f.rename(["a", "b", "c"]), f.in_memory()]
    copies += [f.replace(test=None).holdout(0.2), f.replace(name="other")]
    assert len(checked) == 3
    for copy in copies:
        torch.testing.assert_close(copy.weights, copy.train.sizes / len(copy.train))
        assert copy.importance.equal(copy.train.sizes.double()) and copy.classes == f.classes
    assert copies[2].ids == ("a", "b", "c") and copies[2].fingerprint != f.fingerprint
    for wrong, words in ((["a", "a", "b"], "more than once"), (["a"], "there are 1 ids")):
        assert_refused(lambda: f.rename(wrong), DataError, words)
    for wrong, words in ((["0", "0"], "more than once"), ([], "no client")):
        assert_refused(lambda: f.select(wrong), DataError, words)


def test_counts_and_means_are_those_of_each_client():
    x, y, client = rows()
    f = Federation.from_arrays(x.repeat(6, 1).reshape(30, 2, 3), y, client, test_fraction=0.2)
    total = f.label_counts() + f.label_counts("test")
    for i, id in enumerate(f.ids):
        assert total[i].tolist() == np.bincount(y[client == int(id)], minlength=2).tolist()
        torch.testing.assert_close(f.feature_means()[i], f.client(id)["train"].x.mean(0).flatten())


def test_strings_become_classes_floats_targets_and_one_class_may_be_all():
    def made(y, **settings):
        return Federation.from_arrays(np.zeros((4, 1)), y, list("aabb"), test_fraction=0, **settings)

    named, numbers, apart = made(["b", "a", "b", "a"]), made([0.5, 1.0, 2.0, 3.0]), made([0, 0, 3, 3])
    assert (named.classes, named.train.y.tolist()) == (("a", "b"), [1, 0, 1, 0])
    assert (numbers.n_classes, numbers.train.y.dtype) == (None, torch.float32)
    assert apart.label_counts().tolist() == [[2, 0, 0, 0], [0, 0, 0, 2]] and apart.select(["a"]).n_classes == 4
    assert made([1] * 4, classes=("n", "y")).n_classes == made(["y"] * 4, classes=("n", "y")).n_classes == 2
