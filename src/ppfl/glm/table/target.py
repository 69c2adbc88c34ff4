"""The target column: numbers or classes, and the family that suits them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ...data.arrays import quoted
from ...data.columns import is_text
from ...errors import DataError, SettingError
from ..client_ids import Array
from ..families import REGRESSIONS, Family, GaussianFamily, classification_family, regression_family

CLASSES = ("bernoulli", "multinomial")
FAMILIES = (*REGRESSIONS, *CLASSES)
_FEW = 5  # whole numbers with at most this many distinct values are classes, if they do not look like counts
_SMALL = 10  # counts with a larger mean are not guessed, as a gaussian suits them too
_MANY = 50  # more classes than this are a mistake


class Target(NamedTuple):
    """The target column, encoded for its family."""

    name: str
    family: str
    reason: str  # why this family was guessed; empty if it was given
    values: Array  # (n,), numbers, or positions in `classes`
    classes: tuple[str, ...]  # sorted, empty for numbers

    @classmethod
    def of(cls, name: str, values: Any, family: str | None) -> Target:
        """With the given family, or a guessed one if it is None."""
        if family is not None and family not in FAMILIES:
            raise SettingError(f"there is no family {family!r}; use one of {', '.join(FAMILIES)}")
        values = values.astype(str) if values.dtype.kind == "b" else values
        if not is_text(values) and values.nunique() == 1:
            value = values.iloc[0]
            raise DataError(f"target {name!r} is {value:g} in every row; there is nothing to predict: choose another")
        found, reason = (family, "") if family else _guess_family(name, values)
        if found in REGRESSIONS:
            return cls(name, found, reason, _to_numbers(name, values, found), ())
        levels, codes = np.unique(np.array(_class_labels(values)), return_inverse=True)
        names = tuple(str(level) for level in levels.tolist())
        if len(names) < 2:
            raise DataError(f"target {name!r} has one class only, {names[0]!r}; a classifier needs two")
        if len(names) > _MANY:
            raise DataError(f"target {name!r} has {len(names)} classes; choose another target, or family gaussian")
        if family == "bernoulli" and len(names) > 2:
            raise DataError(f"target {name!r} has {len(names)} classes ({quoted(names)}); use family multinomial")
        return cls(name, CLASSES[len(names) > 2], reason, codes.astype(np.int64), names)

    @property
    def outcomes(self) -> tuple[str, ...]:
        """The names of the predictors: all classes, only the second of two, or the column name for numbers."""
        return self.classes[1:] if self.family == "bernoulli" else self.classes or (self.name,)

    def make_family(self) -> Family:
        return classification_family(len(self.classes)) if self.classes else regression_family(self.family, None)

    def figures(self, mean: Array, rows: Array) -> dict[str, float]:
        """Scores of means (n,) or class probabilities (n, classes) for these rows, the main metric first."""
        y = self.values[rows]
        family = self.make_family()
        deviance = family.deviance(torch.tensor(mean), torch.tensor(y, dtype=torch.float64))
        mean_deviance = float(deviance.mean())
        if isinstance(family, GaussianFamily):
            return {"rmse": mean_deviance**0.5}
        return {"deviance": mean_deviance} | ({"accuracy": float((mean.argmax(1) == y).mean())} if self.classes else {})


def _guess_family(name: str, values: Any) -> tuple[str, str]:
    if is_text(values):
        return "multinomial", f"{name} has {values.nunique()} classes"
    distinct = values.nunique()
    whole = bool((values == values.round()).all())
    if whole and distinct > 2 and float(values.min()) == 0 and float(values.mean()) < _SMALL:
        return "poisson", f"{name} has counts, 0 to {int(values.max())} (for classes: multinomial)"
    if whole and distinct <= _FEW:
        return "multinomial", f"{name} has {distinct} values, all whole, taken as classes"
    if whole and float(values.min()) >= 0:
        return "gaussian", f"{name} has numbers (for counts: poisson)"
    return "gaussian", f"{name} has numbers"


def _class_labels(values: Any) -> Sequence[Any]:
    if values.dtype.kind in "iuf" and bool((values == values.round()).all()):
        return [int(value) for value in values]  # so that 10 comes after 2
    return [str(value) for value in values]


def _to_numbers(name: str, values: Any, family: str) -> Array:
    if is_text(values):
        raise DataError(
            f"target {name!r} holds text ({str(values.iloc[0])!r}), and family {family!r} needs numbers; "
            f"use family bernoulli or multinomial"
        )
    numbers = np.array(values, dtype=np.float64)
    regression_family(family, None).check(torch.from_numpy(numbers))
    return numbers
