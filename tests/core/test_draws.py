"""Draws are functions of their keys: stable, well spread, and free of order."""

import torch

from ppfl.core.draws import hashed, name_key, uniform


def splitmix_reference(state: int) -> int:
    """The published splitmix64 step, in Python's exact integers."""
    mask = (1 << 64) - 1
    z = (state + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return z ^ (z >> 31)


def test_hash_is_splitmix64() -> None:
    keys = torch.tensor([0, 1, 2**40 + 17, -5])
    mask = (1 << 64) - 1
    for key, found in zip(keys.tolist(), hashed(3, keys).tolist(), strict=True):
        state = splitmix_reference(3)
        assert found & mask == splitmix_reference(state ^ (key & mask))


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


def test_orders_by_draws_put_every_item_first_equally_often() -> None:
    orders = hashed(0, torch.arange(6000)[:, None], torch.arange(5)).argsort(dim=-1)
    assert orders.sort(dim=1).values.equal(torch.arange(5).expand(6000, 5))
    first = torch.bincount(orders[:, 0], minlength=5).double()
    assert float(((first - 1200) ** 2 / 1200).sum()) < 18.5  # 99.9 %, 4 degrees of freedom


def test_names_have_keys_that_differ() -> None:
    assert len({name_key(f"client-{i}") for i in range(10_000)}) == 10_000
