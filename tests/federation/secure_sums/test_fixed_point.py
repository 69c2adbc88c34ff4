"""Rounding adds less than a step, has no drift, and totals never wrap."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ppfl.core.draws import uniform
from ppfl.core.errors import SettingError
from ppfl.federation.secure_sums import SecureSettings
from ppfl.federation.secure_sums.fixed_point import fixed_point, whole_range

SETTINGS = [(2.0**-16, 1000.0, 10), (2.0**-32, 2.0**20, 10), (0.3, 1e6, 3), (1.0, 2.0**29 - 1, 4)]


@pytest.mark.parametrize(("step", "largest", "sites"), SETTINGS)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_total_of_the_largest_numbers_does_not_wrap(step: float, largest: float, sites: int, sign: int) -> None:
    for numbers in (fixed_point(step, largest, sites), whole_range(step, sites)):
        values = torch.full((8,), sign * numbers.largest, dtype=torch.float64)
        draws = torch.linspace(0, 1 - 2.0**-53, 8, dtype=torch.float64)
        integers, clipped = numbers.to_integers(values, draws)
        total = np.add.reduce([integers] * sites, dtype=integers.dtype)
        assert clipped == 0
        error = (numbers.to_numbers(total) - sites * values).abs()
        assert float(error.max()) <= sites * step + 1e-15 * sites * numbers.largest


def test_the_smaller_modulus_is_chosen_where_it_is_enough() -> None:
    """Sums of `sites` integers of up to ceil(largest / step) + 1 fit into 31 bits, and into 32 not."""
    assert fixed_point(1.0, (2**31 - 1) // 4 - 1.0, 4).bits == 32
    assert fixed_point(1.0, (2**31 - 1) // 4 + 0.0, 4).bits == 64
    with pytest.raises(SettingError, match="more than 64 bits"):
        fixed_point(2.0**-40, 2.0**30, 4)


@given(st.lists(st.floats(-900, 900), min_size=1, max_size=20), st.integers(0, 99))
@settings(max_examples=50, deadline=None)
def test_a_number_is_rounded_to_a_neighbour(values: list[float], seed: int) -> None:
    numbers = fixed_point(2.0**-16, 1000.0, 3)
    exact = torch.tensor(values, dtype=torch.float64)
    integers, _ = numbers.to_integers(exact, uniform(seed, torch.arange(len(values))))
    assert float((numbers.to_numbers(integers) - exact).abs().max()) < numbers.step


def test_integers_are_exact_whatever_the_draw() -> None:
    numbers = whole_range(2.0**-24, 3)
    exact = torch.tensor([0.0, 1.0, -1.0, 12345.0, -(2.0**30), 2.0**-24])
    for draw in (0.0, 0.5, 1 - 2.0**-53):
        integers, _ = numbers.to_integers(exact, torch.full((6,), draw, dtype=torch.float64))
        assert torch.equal(numbers.to_numbers(integers), exact.double())


def test_rounding_has_no_drift() -> None:
    """Of 40,000 equal numbers the mean error has a standard deviation of sqrt(f (1 - f) / 40000) steps."""
    numbers, n = fixed_point(1.0, 1000.0, 3), 40_000
    for fraction in (0.1, 0.5, 0.9):
        values = torch.full((n,), 7 + fraction, dtype=torch.float64)
        integers, _ = numbers.to_integers(values, uniform(1, "rounding", torch.arange(n)))
        drift = float(numbers.to_numbers(integers).mean()) - 7 - fraction
        assert abs(drift) < 5 * math.sqrt(fraction * (1 - fraction) / n)


def test_what_is_too_large_or_no_number_is_clipped_and_counted() -> None:
    numbers = fixed_point(2.0**-16, 1000.0, 3)
    values = torch.tensor([1000.0, 1000.1, -2000.0, math.inf, math.nan, 3.0])
    integers, clipped = numbers.to_integers(values, torch.zeros(6, dtype=torch.float64))
    assert clipped == 4
    assert numbers.to_numbers(integers).tolist() == [1000.0, 1000.0, -1000.0, 1000.0, 0.0, 3.0]


def test_what_is_needed_to_open_a_total() -> None:
    assert [SecureSettings().needed(sites) for sites in (2, 3, 4, 5)] == [2, 2, 3, 3]
    assert SecureSettings(threshold=4).needed(5) == 4
    for settings_, sites in [(SecureSettings(), 1), (SecureSettings(min_sites=4), 3), (SecureSettings(threshold=4), 3)]:
        with pytest.raises(SettingError, match=f"{sites} sites take part, and a total needs"):
            settings_.needed(sites)
