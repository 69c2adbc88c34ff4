"""The coefficients of the canonical models, column by column, next to those of one model for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..client_ids import Array
from ..standardize import INTERCEPT
from .target import Target

AVERAGE = "an average row"


class CoefficientRow(NamedTuple):
    """The coefficients of one column, in the units of the table."""

    outcome: str  # the class or target of this predictor
    name: str
    values: list[float]  # of the canonical models, the largest share first
    pooled: float  # of one model for all
    is_shared: bool = False
    reach: list[float] | None = None  # change of each predictor per standard deviation of the column
    pooled_reach: float = 0.0


class CoefficientTable(NamedTuple):
    # predictions for a row with the mean of every column; their reach is the difference to the pooled model
    average: list[CoefficientRow]
    coefficients: list[CoefficientRow]


def make_coefficient_table(
    model: Any,
    pooled: Any,
    target: Target,
    names: Sequence[str],
    shared: Any,
    x: Array,
    *,
    intercept: bool = True,
    offset: Array | None = None,
) -> CoefficientTable:
    """From the fitted population and the fitted pooled model, outcome by outcome."""
    aligned = [_align(fitted) for fitted in (model, pooled)]
    slopes = np.concatenate([part[0] for part in aligned])  # (K + 1, m, d), the pooled one last
    intercepts = np.concatenate([part[1] for part in aligned])  # (K + 1, m)
    predictor = intercepts + slopes @ x.mean(0) + (0.0 if offset is None else offset.mean())
    means = np.concatenate([_means(target, predictor[:-1], model), _means(target, predictor[-1:], pooled)])
    shown = means[:, 1:] if target.family == "bernoulli" else means
    average, coefficients = [], []
    fixed = _shared_names(names, shared)
    spread = x.std(0)
    for i, outcome in enumerate(target.outcomes):
        difference = (predictor[:, i] - predictor[-1, i]).tolist()
        average.append(CoefficientRow(outcome, AVERAGE, *_split(shown[:, i]), reach=difference[:-1]))
        if intercept:
            row = CoefficientRow(outcome, INTERCEPT, *_split(intercepts[:, i]), is_shared=INTERCEPT in fixed)
            coefficients.append(row)
        for column, name in enumerate(names):
            slope = slopes[:, i, column]
            *reach, pooled_reach = (slope * spread[column]).tolist()
            coefficients.append(CoefficientRow(outcome, name, *_split(slope), name in fixed, reach, pooled_reach))
    return CoefficientTable(average, coefficients)


def _align(model: Any) -> tuple[Array, Array]:
    """Slopes (K, m, d) and intercepts (K, m), centred over three or more classes, as only differences matter."""
    slopes, intercepts = model.canonical_coef_, model.canonical_intercept_
    if slopes.ndim == 2:
        return slopes[:, None], intercepts[:, None]
    return slopes - slopes.mean(1, keepdims=True), intercepts - intercepts.mean(1, keepdims=True)


def _means(target: Target, predictor: Array, model: Any) -> Array:
    """Means or class probabilities of these predictors, with the nuisance parameters of a fitted model."""
    family, nuisance = target.make_family(), model._result.coefficients.nuisance
    means: Array = family.mean(family.mean_parameters(torch.tensor(predictor)), nuisance).numpy()
    return means.reshape(len(predictor), -1)


def _split(values: Array) -> tuple[list[float], float]:
    """Those of the canonical models, and the pooled one."""
    *canonical, pooled = values.tolist()
    return canonical, pooled


def _shared_names(names: Sequence[str], shared: Any) -> set[str]:
    if shared == "all":
        return set(names)
    return {item if isinstance(item, str) else names[item] for item in shared or ()}
