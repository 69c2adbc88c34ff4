"""Columns of very large, very small or no numbers end in an error that names them."""

import numpy as np
import pandas as pd
import pytest
import torch

from ppfl.core.errors import DataError
from ppfl.glm.families import regression_family
from ppfl.glm.table import TableSettings, fit_table


@pytest.mark.parametrize("size", [1e-300, 1e150, 1e300])
@pytest.mark.parametrize("column", ["x", "y"])
def test_columns_whose_squares_overflow_or_vanish_are_refused_by_name(size: float, column: str) -> None:
    random = np.random.default_rng(0)
    frame = pd.DataFrame({"who": ["a", "b"] * 20, "x": random.normal(size=40), "y": random.gamma(2.0, size=40)})
    frame[column] *= size
    with pytest.raises(DataError, match=rf"column '{column}' has values up to .* change its unit"):
        fit_table(frame, TableSettings("who", "y", "gamma", ks=(1,)))


def test_counts_that_are_all_zero_are_refused() -> None:
    frame = pd.DataFrame({"who": ["a", "b"] * 20, "x": np.random.default_rng(0).normal(size=40), "y": 0.0})
    with pytest.raises(DataError, match="target 'y' is 0 in every row"):
        fit_table(frame, TableSettings("who", "y", "poisson", ks=(1,)))


def test_the_deviance_of_no_counts_where_none_are_expected_is_zero() -> None:
    zero = torch.zeros(3, dtype=torch.float64)
    assert regression_family("poisson", None).deviance(zero, zero).tolist() == zero.tolist()
