"""Settings of the estimators, checked when they are fitted."""

from __future__ import annotations

from numbers import Real
from typing import Any

import numpy as np

from ..errors import SettingError
from .client_affinity import check_affinity
from .missing_clients import warn_of_fit_without_clients
from .solvers import CRITERIA

MIXES = ("weights", "predictions")
SOLVERS = ("auto", "marginal", "profile", "federated")


def check_settings(model: Any) -> str:
    """Check all settings, and return the name of the solver."""
    for name, known in (("mix", MIXES), ("solver", SOLVERS), ("choose", tuple(CRITERIA))):
        if getattr(model, name) not in known:
            raise SettingError(f"{name} is {getattr(model, name)!r}; use one of {', '.join(known)}")
    check_affinity(model.affinity)
    if model.fit_intercept not in (True, False):
        raise SettingError(f"fit_intercept is {model.fit_intercept!r}; use True or False")
    for name in ("k_max", "n_init", "max_iter"):
        _check_count(name, getattr(model, name))
    for name in ("ridge", "tol", "penalty"):
        value = getattr(model, name)
        if not isinstance(value, Real) or not 0 <= float(value) < np.inf:
            raise SettingError(f"{name} is {value!r}; set a number, at least 0")
    if model.solver == "marginal" and model.penalty > 0:
        raise SettingError(
            f"penalty is {model.penalty} with solver = 'marginal', which integrates memberships out, so there are "
            f"none to penalise; use solver = 'profile' or penalty = 0"
        )
    if model.solver != "auto":
        return str(model.solver)
    return "profile" if model.penalty > 0 else "marginal"


def numbers_to_try(model: Any, n_clients: int) -> list[int]:
    """All numbers of canonical models to try."""
    if isinstance(model.k, str):
        if model.k != "auto":
            raise SettingError(f"k is {model.k!r}; set a number, several such as [1, 2, 3], or 'auto'")
        ks = list(range(1, min(int(model.k_max), n_clients) + 1))
    else:
        ks = sorted(set(model.k)) if isinstance(model.k, list | tuple | range) else [model.k]
    if not ks:
        raise SettingError("k is empty; set a number, several such as [1, 2, 3], or 'auto'")
    for k in ks:
        _check_count("k", k)
    if not model._has_clients:
        if len(ks) == 1 and ks[0] > 1:  # with several, or "auto", one model is one of the choices
            warn_of_fit_without_clients(ks[0])
        return [1]
    if ks[-1] > n_clients:
        raise SettingError(f"k is {ks[-1]} but the number of clients is {n_clients}; set k to at most that")
    return [int(k) for k in ks]


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
        raise SettingError(f"{name} is {value!r}; set a whole number, at least 1")
