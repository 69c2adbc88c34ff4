"""What is predicted: numbers or classes, and the family that suits them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from ..core.errors import DataError, SettingError
from ..data.arrays import quoted
from .columns import Array
from .families import REGRESSIONS, Bernoulli, Classes, Family, regression_family
from .table_columns import is_text

CLASSES = ("bernoulli", "multinomial")
FAMILIES = (*REGRESSIONS, *CLASSES)
_FEW = 5  # whole numbers of so many values are taken for classes
_MANY = 50  # classes; more are a mistake


class Target(NamedTuple):
    """A column of a table as a family takes it."""

    name: str
    family: str
    reason: str  # for the family, where it was guessed
    values: Array  # (n,), numbers, or places in `classes`
    classes: tuple[str, ...]  # in order, none for numbers

    @classmethod
    def of(cls, name: str, values: Any, family: str | None) -> Target:
        """With the family wanted, or else one that is guessed."""
        if family is not None and family not in FAMILIES:
            raise SettingError(f"there is no family {family!r}; use one of {', '.join(FAMILIES)}")
        values = values.astype(str) if values.dtype.kind == "b" else values
        found, reason = (family, "") if family else _guess(name, values)
        if found in REGRESSIONS:
            return cls(name, found, reason, _numbers(name, values, found), ())
        levels, codes = np.unique(np.array(_labels(values)), return_inverse=True)
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
        """What has a predictor of its own: each of several classes, the second of two, the number."""
        return self.classes[1:] if self.family == "bernoulli" else self.classes or (self.name,)

    def likelihood(self) -> Family:
        if not self.classes:
            return regression_family(self.family, None)
        return Bernoulli() if len(self.classes) == 2 else Classes(len(self.classes))

    def figures(self, mean: Array, rows: Array) -> dict[str, float]:
        """How well means (n,), or class probabilities (n, classes), predict these rows; the first figure counts."""
        y = self.values[rows]
        deviance = self.likelihood().deviance(torch.tensor(mean), torch.tensor(y, dtype=torch.float64))
        found = float(deviance.mean())
        if self.family == "gaussian":
            return {"rmse": found**0.5}
        return {"deviance": found} | ({"accuracy": float((mean.argmax(1) == y).mean())} if self.classes else {})


def _guess(name: str, values: Any) -> tuple[str, str]:
    if is_text(values):
        return "multinomial", f"{name} has {values.nunique()} classes"
    distinct = values.nunique()
    whole = bool((values == values.round()).all())
    if whole and distinct <= _FEW:
        return "multinomial", f"{name} has {distinct} values, all whole"
    if whole and float(values.min()) >= 0:
        return "gaussian", f"{name} has numbers; for counts use family poisson"
    return "gaussian", f"{name} has numbers"


def _labels(values: Any) -> Sequence[Any]:
    if values.dtype.kind in "iuf" and bool((values == values.round()).all()):
        return [int(value) for value in values]  # 10 comes after 2
    return [str(value) for value in values]


def _numbers(name: str, values: Any, family: str) -> Array:
    if is_text(values):
        raise DataError(
            f"target {name!r} holds text ({str(values.iloc[0])!r}), and family {family!r} needs numbers; "
            f"use family bernoulli or multinomial"
        )
    numbers = np.array(values, dtype=np.float64)
    regression_family(family, None).check(torch.from_numpy(numbers))
    return numbers
