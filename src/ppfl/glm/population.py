"""What all population estimators share: settings, fitting, and clients' memberships afterwards."""

from __future__ import annotations

import warnings
from numbers import Real
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from ..core.errors import DataError, SettingError
from .affinities import affinity_among, check_affinity
from .columns import Array, Clients, Columns
from .families import Family, Gaussian
from .fitting import Fit, fit_by_rounds, fit_marginal, fit_profile, one_thread
from .grids import concentration
from .likelihoods import Rows, fastest
from .placement import Placement
from .problem import Problem
from .solve import Search
from .vectors import Hold, Shape

MIXES = ("weights", "predictions")
SOLVERS = ("auto", "marginal", "profile", "federated")
_NO_RESIDUALS = 1e-7  # a dispersion of standardised targets that no data with noise have


class PopulationEstimator(BaseEstimator):  # type: ignore[misc]
    """K canonical models and a membership for every client, fitted to a table."""

    _family: Family

    def __init__(
        self,
        k: int = 3,
        *,
        mix: str = "weights",
        penalty: float = 0.0,
        affinity: Any = "uniform",
        shared: Any = None,
        ridge: float = 1.0,
        fit_intercept: bool = True,
        solver: str = "auto",
        n_init: int = 8,
        tol: float = 1e-6,
        max_iter: int = 500,
        random_state: Any = None,
    ) -> None:
        self.k = k
        self.mix = mix
        self.penalty = penalty
        self.affinity = affinity
        self.shared = shared
        self.ridge = ridge
        self.fit_intercept = fit_intercept
        self.solver = solver
        self.n_init = n_init
        self.tol = tol
        self.max_iter = max_iter
        self.random_state = random_state

    # ------------------------------------------------------------------ fitting

    def _fit_rows(self, rows: Rows, who: Clients) -> Self:
        """Fit, and keep canonical models in an order that no start decides: the most used one first."""
        with one_thread():
            found = self._solve(rows, who)
        order = torch.argsort(found.placement.mean.mean(0), descending=True, stable=True)
        canonical = found.coefficients.canonical[order]
        self._fit = found._replace(
            coefficients=found.coefficients._replace(canonical=canonical),
            placement=found.placement.take(order),
            anybody=found.anybody.take(order),
            log_alpha=found.log_alpha[order],
        )
        self._order = order
        self.clients_ = np.array(who.ids)
        self._newcomers: Placement | None = None
        self.objective_path_ = np.array(found.path)
        self.n_iter_ = max(1, len(found.path) - 1)
        self.converged_ = found.converged
        self.log_likelihood_ = found.log_likelihood
        self.concentration_ = concentration(self._fit.log_alpha).numpy()
        if not found.converged:
            warnings.warn(self._why_not_converged(), ConvergenceWarning, stacklevel=4)
        return self

    def _why_not_converged(self) -> str:
        dispersion = float(self._fit.coefficients.log_dispersion.exp())
        if self._family.has_dispersion and dispersion < _NO_RESIDUALS:
            return (
                f"the model fits every row exactly, to a dispersion of {dispersion:.0e}, so its likelihood grows "
                f"without end and no fit is best; use fewer columns, a smaller k or more rows, or add the noise y lacks"
            )
        reached = len(self.objective_path_) >= self.max_iter
        remedy = "raise max_iter" if reached else "no step lowers the objective any more, so raise tol"
        done = f"{self.n_iter_} of {self.max_iter} iterations"
        return f"the fit stopped after {done}, short of tol = {self.tol:g}; {remedy}"

    def _solve(self, rows: Rows, who: Clients) -> Fit:
        solver = self._solver()
        k = self._count_models(who)
        affinity = affinity_among(who.ids, self.affinity, rows) if self.penalty > 0 else None
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        shape = Shape(k, rows.varying.columns, rows.shared.columns, rows.varying.outputs(rows.family.outputs))
        varying, fixed = self._columns.slopes()
        hold = Hold(self.ridge, 0.0, varying, fixed, rows.n_samples * rows.family.has_dispersion)
        problem = Problem(rows, fastest(rows), shape, hold)
        if solver == "federated":
            return fit_by_rounds(problem, affinity, self.penalty, self.tol, self.max_iter, seed)
        search = Search(self.n_init, self.tol, self.max_iter, np.random.default_rng(seed))
        if solver == "profile":
            return fit_profile(problem, affinity, self.penalty, search)
        return fit_marginal(problem, search)

    def _solver(self) -> str:
        """Checked with all other settings."""
        for name, known in (("mix", MIXES), ("solver", SOLVERS)):
            if getattr(self, name) not in known:
                raise SettingError(f"{name} is {getattr(self, name)!r}; use one of {', '.join(known)}")
        check_affinity(self.affinity)
        if self.fit_intercept not in (True, False):
            raise SettingError(f"fit_intercept is {self.fit_intercept!r}; use True or False")
        for name in ("k", "n_init", "max_iter"):
            value = getattr(self, name)
            if not isinstance(value, int | np.integer) or value < 1:
                raise SettingError(f"{name} is {value!r}; set a whole number, at least 1")
        for name in ("ridge", "tol", "penalty"):
            value = getattr(self, name)
            if not isinstance(value, Real) or not 0 <= float(value) < np.inf:
                raise SettingError(f"{name} is {value!r}; set a number, at least 0")
        if self.solver == "marginal" and self.penalty > 0:
            raise SettingError(
                f"penalty is {self.penalty} with solver = 'marginal', which integrates memberships out and has none "
                f"to pull together; use solver = 'profile' or penalty = 0"
            )
        if self.solver != "auto":
            return str(self.solver)
        return "profile" if self.penalty > 0 else "marginal"

    def _count_models(self, who: Clients) -> int:
        if not self._has_clients:
            return 1  # nobody to tell apart: a plain GLM
        if self.k > len(who.ids):
            raise SettingError(f"k is {self.k} but the clients are {len(who.ids)}; set k to their number at most")
        return int(self.k)

    def _names(self, x: Any) -> list[str]:
        return list(getattr(self, "feature_names_in_", [f"x{at}" for at in range(x.shape[1])]))

    # ------------------------------------------------------------------ using it

    @property
    def _placement(self) -> Placement:
        """Of all clients that are known, in the order of `clients_`."""
        check_is_fitted(self, "_fit")
        return self._fit.placement if self._newcomers is None else self._fit.placement.join(self._newcomers)

    @property
    def memberships_(self) -> Any:
        """How much of each canonical model a client is, a row a client: a DataFrame where pandas is there."""
        return labelled(self._placement.mean.numpy(), self.clients_)

    def _mean(self, rows: Rows, clients: Any) -> Array:
        """Of rows without targets, each of its own client."""
        placement = self._placement
        whole = placement.join(self._fit.anybody)
        n = len(rows.varying)
        who = Clients.of(clients, n)
        if clients is not None and self._has_clients:
            line = who.lines(self.clients_.tolist())
        else:
            line = torch.full((n,), 0 if len(self.clients_) == 1 else len(self.clients_))
        return whole.predict(rows, self._fit.coefficients, line).numpy()

    def client_coef(self, client: Any) -> tuple[Array, Any]:
        """A client's own coefficients and intercept: the canonical ones, mixed by its membership."""
        check_is_fitted(self, "_fit")
        if self.mix == "predictions" and not isinstance(self._family, Gaussian):
            raise SettingError(
                "with mix = 'predictions' a client mixes predictions, and no coefficients are its own; look at "
                "memberships_ and canonical_coef_, or fit with mix = 'weights'"
            )
        known = self.clients_.tolist()
        if client not in known:
            raise DataError(f"client {client!r} was not there when the model was fitted; place it with onboard")
        c = self._placement.mean[known.index(client)].numpy()
        return np.tensordot(c, self.canonical_coef_, 1), np.tensordot(c, self.canonical_intercept_, 1)

    def _strangers(self, clients: Any, rows: int) -> Clients:
        """Whose rows they are, where clients can be placed and none is known."""
        if clients is None:
            raise DataError("clients is None; give the client of every row, so that each can be placed")
        if not self._has_clients:
            raise DataError("the model was fitted without clients, so it has no memberships; fit it with clients first")
        who = Clients.of(clients, rows)
        who.check_kind(self.clients_.tolist())
        if known := sorted(set(who.ids) & set(self.clients_.tolist())):
            raise DataError(f"client {known[0]!r} is known already; leave it out, or fit again with all its rows")
        return who

    def _onboard_rows(self, rows: Rows, who: Clients) -> Any:
        """Place clients by their data, all else as fitted; they are known from then on."""
        found = self._fit.objective.place(self._unordered(), rows).take(self._order)
        self._newcomers = found if self._newcomers is None else self._newcomers.join(found)
        self.clients_ = np.array([*self.clients_.tolist(), *who.ids])
        return labelled(found.mean.numpy(), np.array(who.ids))

    def _unordered(self) -> Any:
        """All parameters as the objective has them."""
        coefficients = self._fit.coefficients
        back = torch.argsort(self._order)
        k, q, m = coefficients.canonical.shape
        shape = Shape(k, q, len(coefficients.shared), m)
        return shape.pack(coefficients._replace(canonical=coefficients.canonical[back]), self._fit.log_alpha[back])

    # ------------------------------------------------------------------ choosing k

    @property
    def n_parameters_(self) -> int:
        """All that was fitted: coefficients, dispersion, and either memberships or, integrated, their distribution."""
        check_is_fitted(self, "_fit")
        coefficients = self._fit.coefficients
        free = coefficients.shared.shape[1]
        free -= free > 1  # class probabilities sum to 1
        count = (coefficients.canonical.shape[:2].numel() + len(coefficients.shared)) * free
        return count + int(self._family.has_dispersion) + self._fit.membership_parameters

    @property
    def aic_(self) -> float:
        check_is_fitted(self, "_fit")
        return 2 * self.n_parameters_ - 2 * self.log_likelihood_

    @property
    def bic_(self) -> float:
        """With the number of clients, which are what memberships are drawn for."""
        check_is_fitted(self, "_fit")
        return float(np.log(max(2, self._fit.placement.mean.shape[0]))) * self.n_parameters_ - 2 * self.log_likelihood_


def ordered_rows(columns: Columns, x: Any, y: Array, weight: Array, who: Clients, family: Family, mix: str) -> Rows:
    """Client by client."""
    order = np.argsort(who.row, kind="stable")
    varying, shared = columns.split(x, order)
    target, weights, row = (torch.from_numpy(np.ascontiguousarray(a[order])) for a in (y, weight, who.row))
    return Rows(varying, shared, target.double(), weights, row, len(who.ids), family, mix)


def labelled(memberships: Array, clients: Array) -> Any:
    """A DataFrame by client where pandas is there, else the rows in the order of `clients_`."""
    try:
        import pandas as pd
    except ImportError:
        return memberships
    return pd.DataFrame(memberships, index=pd.Index(clients, name="client"), columns=range(memberships.shape[1]))
