"""What canonical models say, column by column, beside one model for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from .columns import INTERCEPT, Array
from .table_target import Target

AVERAGE = "an average row"


class Term(NamedTuple):
    """A line of the table of coefficients, in the units of the table."""

    outcome: str  # what the predictor is of: a class, or the target
    name: str
    values: list[float]  # of the canonical models, the most used first
    pooled: float  # of one model for all
    is_shared: bool = False
    reach: list[float] | None = None  # what a standard deviation of the column adds to each predictor
    pooled_reach: float = 0.0


class Terms(NamedTuple):
    average: list[Term]  # predictions for a row with the mean of every column; their reach is from the pooled one
    coefficients: list[Term]


def terms_of(model: Any, pooled: Any, target: Target, names: Sequence[str], shared: Any, x: Array) -> Terms:
    """Of fitted estimators, outcome by outcome."""
    both = [_aligned(fitted) for fitted in (model, pooled)]
    slopes = np.concatenate([part[0] for part in both])  # (K + 1, m, d), the pooled one last
    intercepts = np.concatenate([part[1] for part in both])  # (K + 1, m)
    middle = intercepts + slopes @ x.mean(0)
    family = target.likelihood()
    means = family.mean(family.parts(torch.tensor(middle))).numpy().reshape(len(middle), -1)
    shown = means[:, 1:] if target.family == "bernoulli" else means
    average, coefficients = [], []
    fixed = _shared_names(names, shared)
    spread = x.std(0)
    for at, outcome in enumerate(target.outcomes):
        apart = (middle[:, at] - middle[-1, at]).tolist()
        average.append(Term(outcome, AVERAGE, *_split(shown[:, at]), reach=apart[:-1]))
        coefficients.append(Term(outcome, INTERCEPT, *_split(intercepts[:, at]), is_shared=INTERCEPT in fixed))
        for column, name in enumerate(names):
            slope = slopes[:, at, column]
            *reach, pooled_reach = (slope * spread[column]).tolist()
            coefficients.append(Term(outcome, name, *_split(slope), name in fixed, reach, pooled_reach))
    return Terms(average, coefficients)


def _aligned(model: Any) -> tuple[Array, Array]:
    """Slopes (K, m, d) and intercepts (K, m); of several classes their mean is 0, as only differences matter."""
    slopes, intercepts = model.canonical_coef_, model.canonical_intercept_
    if slopes.ndim == 2:
        return slopes[:, None], intercepts[:, None]
    return slopes - slopes.mean(1, keepdims=True), intercepts - intercepts.mean(1, keepdims=True)


def _split(values: Array) -> tuple[list[float], float]:
    *canonical, pooled = values.tolist()
    return canonical, pooled


def _shared_names(names: Sequence[str], shared: Any) -> set[str]:
    if shared == "all":
        return set(names)
    return {item if isinstance(item, str) else names[item] for item in shared or ()}
