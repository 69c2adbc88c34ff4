"""Draws are functions of their keys: reproducible, uniform, and independent of order."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from ppfl.core.draws import hashed, name_key, name_keys, shuffles, uniform

INT64 = st.integers(-(2**63), 2**63 - 1)
LOW_64 = (1 << 64) - 1


def splitmix_reference(state):
    """The published splitmix64 step, in Python integers."""
    z = (state + 0x9E3779B97F4A7C15) & LOW_64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & LOW_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & LOW_64
    return z ^ (z >> 31)


@given(INT64, st.lists(INT64, max_size=20))
def test_a_hash_is_splitmix64(first, keys):
    state = splitmix_reference(first & LOW_64)
    expected = [splitmix_reference(state ^ (key & LOW_64)) for key in keys]
    assert [found & LOW_64 for found in hashed(first, torch.tensor(keys, dtype=torch.int64)).tolist()] == expected
    assert [int(hashed(first, key)) & LOW_64 for key in keys] == expected


def test_a_draw_depends_on_no_neighbour_and_on_no_memory_layout():
    keys = torch.arange(100_000)
    many = hashed(keys)
    assert keys.equal(torch.arange(100_000))
    assert all(int(hashed(at)) == int(many[at]) for at in (0, 1, 2**15 - 1, 2**15, 2**16, 99_999))
    table = hashed(7, "purpose", torch.arange(50)[:, None], torch.arange(20))
    assert hashed(7, "purpose", 31, torch.arange(20)).equal(table[31])
    assert not (table == hashed(7, "another", torch.arange(50)[:, None], torch.arange(20))).any()
    for view in (lambda t: t.T, lambda t: t[:, ::2], lambda t: t[:, :1].expand(50, 20)):
        assert hashed(1, view(table)).equal(view(hashed(1, table)))


def test_draws_are_uniform():
    draws = uniform(0, torch.arange(100_000))
    assert float(draws.min()) >= 0 and float(draws.max()) < 1
    counts = torch.histc(draws, bins=20, min=0, max=1)
    assert float(((counts - 5000) ** 2 / 5000).sum()) < 43.8  # 99.9 % quantile with 19 degrees of freedom


@given(st.sets(st.text(st.characters(exclude_categories=["Cs"]))))
def test_names_have_keys_of_their_own_one_by_one_and_together(names):
    assert name_keys(names).tolist() == [name_key(name) for name in names]
    assert len({name_key(name) for name in names}) == len(names)


@given(st.integers(0, 10_000), st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(1, 3))
def test_shuffles_are_the_order_of_the_draws_whatever_the_size_of_others(seed, sizes, epochs):
    longest = max(sizes)
    draws = hashed(seed, torch.arange(len(sizes))[:, None, None], torch.arange(epochs)[:, None], torch.arange(longest))
    before = draws.clone()
    orders = shuffles(draws, torch.tensor(sizes))
    assert orders.shape == (len(sizes), epochs, longest) and draws.equal(before)
    assert orders.sort(dim=-1).values.equal(torch.arange(longest).expand_as(orders))
    for size, order, own in zip(sizes, orders, draws, strict=True):
        assert order[:, :size].equal(own[:, :size].argsort(dim=-1))  # 43 bits have no ties among so few draws
    highest = torch.full((1, 1, 5), torch.iinfo(torch.int64).max)  # stays before the padding
    assert shuffles(highest, torch.tensor([3])).tolist() == [[[0, 1, 2, 3, 4]]]
