"""What all population estimators have in common: settings, fitting, memberships and predictions."""

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
from .client_affinity import check_affinity, make_affinity
from .client_ids import Array, ClientCodes
from .client_memberships import ClientMemberships
from .families import Family, GaussianFamily
from .likelihoods import ClientRows, fastest_form
from .membership_grid import concentration
from .solvers import (
    GLMProblem,
    ParameterShape,
    Regularization,
    SearchSettings,
    SolverResult,
    fit_federated,
    fit_marginal,
    fit_profile,
    one_thread,
)
from .standardize import ColumnScaling

MIXES = ("weights", "predictions")
SOLVERS = ("auto", "marginal", "profile", "federated")
_EXACT_FIT = 1e-7  # data with any noise have a larger dispersion than this, for standardised targets


class PopulationEstimator(BaseEstimator):  # type: ignore[misc]
    """K canonical models and one membership per client, fitted to a table."""

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

    def _fit_rows(self, rows: ClientRows, clients: ClientCodes) -> Self:
        """Fit, and sort the canonical models by their share of the population, so that the order is reproducible."""
        with one_thread():
            result = self._solve(rows, clients)
        order = torch.argsort(result.memberships.mean.mean(0), descending=True, stable=True)
        canonical = result.coefficients.canonical[order]
        self._result = result._replace(
            coefficients=result.coefficients._replace(canonical=canonical),
            memberships=result.memberships.reorder(order),
            prior=result.prior.reorder(order),
            log_alpha=result.log_alpha[order],
        )
        self._order = order
        self.clients_ = np.array(clients.ids)
        self._onboarded: ClientMemberships | None = None
        self.objective_path_ = np.array(result.path)
        self.n_iter_ = max(1, len(result.path) - 1)
        self.converged_ = result.converged
        self.log_likelihood_ = result.log_likelihood
        self.concentration_ = concentration(self._result.log_alpha).numpy()
        if not result.converged:
            warnings.warn(self._convergence_message(), ConvergenceWarning, stacklevel=4)
        return self

    def _convergence_message(self) -> str:
        dispersion = float(self._result.coefficients.log_dispersion.exp())
        if self._family.has_dispersion and dispersion < _EXACT_FIT:
            return (
                f"the model fits every row exactly, to a dispersion of {dispersion:.0e}, so its likelihood grows "
                f"without end and no fit is best; use fewer columns, a smaller k or more rows, or add the noise y lacks"
            )
        reached = len(self.objective_path_) >= self.max_iter
        remedy = "raise max_iter" if reached else "no step lowers the objective any more, so raise tol"
        done = f"{self.n_iter_} of {self.max_iter} iterations"
        return f"the fit stopped after {done}, short of tol = {self.tol:g}; {remedy}"

    def _solve(self, rows: ClientRows, clients: ClientCodes) -> SolverResult:
        solver = self._check_settings()
        k = self._check_k(clients)
        affinity = make_affinity(clients.ids, self.affinity, rows) if self.penalty > 0 else None
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        shape = ParameterShape(k, rows.varying.columns, rows.shared.columns, rows.varying.outputs(rows.family.outputs))
        varying, shared = self._scaling.is_slope()
        samples = rows.n_samples * rows.family.has_dispersion
        problem = GLMProblem(rows, fastest_form(rows), shape, Regularization(self.ridge, 0.0, varying, shared, samples))
        if solver == "federated":
            return fit_federated(problem, affinity, self.penalty, self.tol, self.max_iter, seed)
        search = SearchSettings(self.n_init, self.tol, self.max_iter, np.random.default_rng(seed))
        if solver == "profile":
            return fit_profile(problem, affinity, self.penalty, search)
        return fit_marginal(problem, search)

    def _check_settings(self) -> str:
        """Check all settings, and return the name of the solver."""
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
                f"penalty is {self.penalty} with solver = 'marginal', which integrates memberships out, so there are "
                f"none to penalise; use solver = 'profile' or penalty = 0"
            )
        if self.solver != "auto":
            return str(self.solver)
        return "profile" if self.penalty > 0 else "marginal"

    def _check_k(self, clients: ClientCodes) -> int:
        if not self._has_clients:
            return 1  # without clients it is a plain GLM
        if self.k > len(clients.ids):
            raise SettingError(f"k is {self.k} but the number of clients is {len(clients.ids)}; set k to at most that")
        return int(self.k)

    def _names(self, x: Any) -> list[str]:
        return list(getattr(self, "feature_names_in_", [f"x{i}" for i in range(x.shape[1])]))

    # ------------------------------------------------------------------ after the fit

    @property
    def _memberships(self) -> ClientMemberships:
        """Of all clients of the fit and of `onboard`, in the order of `clients_`."""
        check_is_fitted(self, "_result")
        fitted = self._result.memberships
        return fitted if self._onboarded is None else fitted.concat(self._onboarded)

    @property
    def memberships_(self) -> Any:
        """The share of each canonical model in each client, one row per client: a DataFrame if pandas is installed."""
        return label_rows(self._memberships.mean.numpy(), self.clients_)

    def _mean(self, rows: ClientRows, clients: Any) -> Array:
        """Predictions for rows without targets, each with its client's membership."""
        with_prior = self._memberships.concat(self._result.prior)
        n = len(rows.varying)
        codes = ClientCodes.of(clients, n)
        if clients is not None and self._has_clients:
            position = codes.positions(self.clients_.tolist())
        else:
            position = torch.full((n,), 0 if len(self.clients_) == 1 else len(self.clients_))
        return with_prior.predict(rows, self._result.coefficients, position).numpy()

    def client_coef(self, client: Any) -> tuple[Array, Any]:
        """A client's own coefficients and intercept: the canonical ones, weighted by its membership."""
        check_is_fitted(self, "_result")
        if self.mix == "predictions" and not isinstance(self._family, GaussianFamily):
            raise SettingError(
                "with mix = 'predictions' a client mixes predictions and has no coefficients of its own; look at "
                "memberships_ and canonical_coef_, or fit with mix = 'weights'"
            )
        known = self.clients_.tolist()
        if client not in known:
            raise DataError(f"client {client!r} is not known to the model; add it with onboard")
        c = self._memberships.mean[known.index(client)].numpy()
        return np.tensordot(c, self.canonical_coef_, 1), np.tensordot(c, self.canonical_intercept_, 1)

    def _check_new_clients(self, clients: Any, rows: int) -> ClientCodes:
        """The clients of these rows, if the model has memberships and knows none of them yet."""
        if clients is None:
            raise DataError("clients is None; give the client of every row")
        if not self._has_clients:
            raise DataError("the model was fitted without clients, so it has no memberships; fit it with clients first")
        codes = ClientCodes.of(clients, rows)
        codes.check_kind(self.clients_.tolist())
        if known := sorted(set(codes.ids) & set(self.clients_.tolist())):
            raise DataError(f"client {known[0]!r} is known already; leave it out, or fit again with all its rows")
        return codes

    def _onboard_rows(self, rows: ClientRows, clients: ClientCodes) -> Any:
        """Find the memberships of new clients, keep everything else as fitted, and remember the clients."""
        found = self._result.objective.find_memberships(self._parameters(), rows).reorder(self._order)
        self._onboarded = found if self._onboarded is None else self._onboarded.concat(found)
        self.clients_ = np.array([*self.clients_.tolist(), *clients.ids])
        return label_rows(found.mean.numpy(), np.array(clients.ids))

    def _parameters(self) -> Any:
        """The parameter vector of the objective, with canonical models in the order that the solver had."""
        coefficients = self._result.coefficients
        back = torch.argsort(self._order)
        k, q, m = coefficients.canonical.shape
        shape = ParameterShape(k, q, len(coefficients.shared), m)
        return shape.pack(coefficients._replace(canonical=coefficients.canonical[back]), self._result.log_alpha[back])

    # ------------------------------------------------------------------ choosing k

    @property
    def n_parameters_(self) -> int:
        """The number of coefficients, dispersion, and memberships or the parameters of their distribution."""
        check_is_fitted(self, "_result")
        coefficients = self._result.coefficients
        free = coefficients.shared.shape[1]
        free -= free > 1  # class probabilities sum to 1
        count = (coefficients.canonical.shape[:2].numel() + len(coefficients.shared)) * free
        return count + int(self._family.has_dispersion) + self._result.membership_parameters

    @property
    def aic_(self) -> float:
        check_is_fitted(self, "_result")
        return 2 * self.n_parameters_ - 2 * self.log_likelihood_

    @property
    def bic_(self) -> float:
        """With the number of clients as the sample size, because each client has one membership."""
        check_is_fitted(self, "_result")
        n_clients = self._result.memberships.mean.shape[0]
        return float(np.log(max(2, n_clients))) * self.n_parameters_ - 2 * self.log_likelihood_


def sort_by_client(
    scaling: ColumnScaling, x: Any, y: Array, weight: Array, clients: ClientCodes, family: Family, mix: str
) -> ClientRows:
    """Standardised rows in the order of their clients."""
    order = np.argsort(clients.codes, kind="stable")
    varying, shared = scaling.split(x, order)
    target, weights, client = (torch.from_numpy(np.ascontiguousarray(a[order])) for a in (y, weight, clients.codes))
    return ClientRows(varying, shared, target.double(), weights, client, len(clients.ids), family, mix)


def label_rows(memberships: Array, clients: Array) -> Any:
    """A DataFrame indexed by client if pandas is installed, else the array."""
    try:
        import pandas as pd
    except ImportError:
        return memberships
    return pd.DataFrame(memberships, index=pd.Index(clients, name="client"), columns=range(memberships.shape[1]))
