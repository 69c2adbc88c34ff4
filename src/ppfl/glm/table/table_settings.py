"""The settings of a table fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import SettingError
from ..formula_text import EXAMPLE, split_formula
from ..regression import PopulationClassifier, PopulationRegressor
from ..solvers import CRITERIA
from .target import Target

AUTO = "auto"
LARGEST_K = 5  # of those that are tried by default


@dataclass(frozen=True)
class TableSettings:
    """What to fit. The fields from `mix` on are settings of the estimators."""

    client: str = ""  # from the formula, if there is one
    target: str = ""
    family: str | None = None  # guessed from the target if None
    columns: Sequence[str] | None = None  # all other columns if None; intercepts only if empty
    ks: Sequence[int] | str = AUTO  # numbers of canonical models to choose from
    test_fraction: float = 0.2  # of each client's rows
    seed: int = 0
    shared: Sequence[str] = ()
    mix: str = "weights"
    penalty: float = 0.0
    affinity: str = "uniform"
    ridge: float = 1.0
    n_init: int = 1
    formula: str | None = None  # says client, target, columns and shared
    choose: str = "held_out"

    def __post_init__(self) -> None:
        if self.formula is not None:
            self._take_from_formula(self.formula)
        for name in ("client", "target"):
            if not getattr(self, name):
                raise SettingError(f"no {name} column is named; name it, or give a formula such as {EXAMPLE}")
        if self.client == self.target:
            raise SettingError(f"column {self.client!r} is both client and target; name two columns")
        if not self.ks or (isinstance(self.ks, str) and self.ks != AUTO):
            raise SettingError("there is no number of canonical models to try; set k, such as 3 or 1,2,3 or auto")
        if self.choose not in CRITERIA:
            raise SettingError(f"choose is {self.choose!r}; use one of {', '.join(CRITERIA)}")
        if self.affinity != "uniform" and not self.penalty:
            raise SettingError(
                f"affinity is {self.affinity!r} but penalty is 0, so it has no effect; set a penalty such as 0.01"
            )

    def _take_from_formula(self, formula: str) -> None:
        parts = split_formula(formula)
        for name, found in (("client", parts.client), ("target", parts.response)):
            given = getattr(self, name)
            if given and given != found:
                raise SettingError(f"{name} is {given!r}, but the formula has {found!r}; leave {name} out")
            object.__setattr__(self, name, found)
        if self.columns is not None or self.shared:
            raise SettingError("columns and shared are what the formula says; leave them out, or the formula")

    def candidates(self, n_clients: int) -> list[int]:
        """The numbers of canonical models to try."""
        if isinstance(self.ks, str):
            return list(range(1, min(LARGEST_K, n_clients) + 1))
        return list(self.ks)

    def estimator(self, target: Target, k: int | list[int], shared: Any, *, intercept: bool = True) -> Any:
        """The estimator for K canonical models, not fitted."""
        more = {"mix": self.mix, "penalty": self.penalty, "affinity": self.affinity, "n_init": self.n_init}
        more |= {"shared": shared, "random_state": self.seed, "choose": self.choose}
        return _make_estimator(target, k, ridge=self.ridge, fit_intercept=intercept, **more)

    def pooled(self, target: Target, *, intercept: bool = True) -> Any:
        """The estimator for one model for all, not fitted."""
        return _make_estimator(target, 1, ridge=self.ridge, fit_intercept=intercept)


def _make_estimator(target: Target, k: int | list[int], **settings: Any) -> Any:
    if target.classes:
        return PopulationClassifier(k, **settings)
    return PopulationRegressor(k, family=target.family, **settings)
