"""Draws are functions of their keys: reproducible, uniform, and independent of order."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from ppfl.core.draws import hashed, name_key, name_keys, shuffles, uniform

INT64 = st.integers(-(2**63), 2**63 - 1)


def splitmix_reference(state: int) -> int:
    """The published splitmix64 step, in Python integers."""
    mask = (1 << 64) - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


@given(INT64, st.lists(INT64, max_size=20))
def test_hash_is_splitmix64(first: int, keys: list[int]) -> None:
    mask = (1 << 64) - 1
    state = splitmix_reference(first & mask)
    expected = [splitmix_reference(state ^ (key & mask)) for key in keys]
    assert [found & mask for found in hashed(first, torch.tensor(keys, dtype=torch.int64)).tolist()] == expected
    assert [int(hashed(first, key)) & mask for key in keys] == expected


def test_many_draws_equal_single_draws_and_do_not_change_the_keys() -> None:
    keys = torch.arange(100_000)
    many = hashed(keys)
    assert keys.equal(torch.arange(100_000))
    for at in (0, 1, 2**15 - 1, 2**15, 2**16, 99_999):
        assert int(hashed(at)) == int(many[at])


def test_the_memory_layout_of_keys_does_not_matter() -> None:
    keys = torch.arange(12).reshape(3, 4)
    assert hashed(1, keys.T).equal(hashed(1, keys).T)
    assert hashed(1, keys[:, ::2]).equal(hashed(1, keys)[:, ::2])
    assert hashed(1, keys[:, :1].expand(3, 4)).equal(hashed(1, keys[:, :1]).expand(3, 4))


def test_a_draw_does_not_depend_on_its_neighbours() -> None:
    many = hashed(7, "purpose", torch.arange(50)[:, None], torch.arange(20))
    assert hashed(7, "purpose", 31, torch.arange(20)).equal(many[31])


def test_every_key_matters() -> None:
    base = hashed(1, "a", 2, torch.arange(100))
    for other in (hashed(2, "a", 2, torch.arange(100)), hashed(1, "b", 2, torch.arange(100))):
        assert not (base == other).any()
    assert not (base == hashed(1, "a", 3, torch.arange(100))).any()


def test_uniform_draws_fill_the_unit_interval_evenly() -> None:
    draws = uniform(0, torch.arange(100_000))
    assert float(draws.min()) >= 0 and float(draws.max()) < 1
    counts = torch.histc(draws, bins=20, min=0, max=1)
    chi_square = float(((counts - 5000) ** 2 / 5000).sum())
    assert chi_square < 43.8  # 99.9 % quantile with 19 degrees of freedom


def test_sorting_by_draws_puts_every_item_first_equally_often() -> None:
    orders = hashed(0, torch.arange(6000)[:, None], torch.arange(5)).argsort(dim=-1)
    assert orders.sort(dim=1).values.equal(torch.arange(5).expand(6000, 5))
    first = torch.bincount(orders[:, 0], minlength=5).double()
    assert float(((first - 1200) ** 2 / 1200).sum()) < 18.5  # 99.9 % quantile with 4 degrees of freedom


def test_different_names_have_different_keys() -> None:
    assert len({name_key(f"client-{i}") for i in range(10_000)}) == 10_000


@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]))))
def test_keys_of_many_names_equal_the_keys_of_each_name(names: list[str]) -> None:
    assert name_keys(names).tolist() == [name_key(name) for name in names]


@given(st.integers(0, 10_000), st.lists(st.integers(0, 40), min_size=1, max_size=8), st.integers(1, 3))
def test_shuffles_are_the_order_of_the_draws(seed: int, sizes: list[int], epochs: int) -> None:
    longest = max(sizes)
    draws = hashed(seed, torch.arange(len(sizes))[:, None, None], torch.arange(epochs)[:, None], torch.arange(longest))
    given_draws = draws.clone()
    orders = shuffles(draws, torch.tensor(sizes))
    assert orders.shape == (len(sizes), epochs, longest) and draws.equal(given_draws)
    assert orders.sort(dim=-1).values.equal(torch.arange(longest).expand_as(orders))
    for size, order, own in zip(sizes, orders, draws, strict=True):
        assert order[:, :size].equal(own[:, :size].argsort(dim=-1))  # 43 bits have no ties among so few draws


def test_a_shuffle_does_not_depend_on_the_size_of_other_clients() -> None:
    draws = hashed(0, torch.arange(50)[:, None, None], torch.arange(3000))
    wide, narrow = (shuffles(draws[..., :n], torch.full((50,), 100)) for n in (3000, 100))
    assert wide[..., :100].equal(narrow)


def test_equal_draws_keep_the_order_of_positions_and_stay_before_the_padding() -> None:
    highest = torch.full((1, 1, 5), torch.iinfo(torch.int64).max)
    assert shuffles(highest, torch.tensor([3])).tolist() == [[[0, 1, 2, 3, 4]]]
