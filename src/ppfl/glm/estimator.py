"""What all population estimators have in common: settings, fitting, memberships and predictions."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from ..errors import DataError, SettingError
from .check_settings import check_settings, numbers_to_try
from .client_affinity import make_affinity
from .client_ids import Array, ClientCodes, known_positions, label_rows
from .client_memberships import ClientMemberships
from .families import Family, GaussianFamily
from .gaussian_moments import HeteroscedasticMoments, fastest_form
from .inference import InferenceMixin, client_coefficient_intervals
from .information import InformationMixin
from .likelihoods import Likelihood
from .missing_clients import NEW, warn_of_prediction_without_clients
from .residual_sums import ResidualSums
from .sample_rows import ClientRows
from .solvers import (
    GLMProblem,
    ParameterShape,
    Regularization,
    SearchSettings,
    SelectionRecord,
    SolverResult,
    choose_by,
    concentration,
    fit_federated,
    fit_marginal,
    fit_profile,
    one_thread,
)

_EXACT_FIT = 1e-7  # data with any noise have a larger dispersion than this, for standardised targets


class PopulationEstimator(InformationMixin, InferenceMixin, BaseEstimator):  # type: ignore[misc]
    """K canonical models and one membership per client, fitted to a table."""

    _family: Family
    _residual_sums: ResidualSums | None = None  # of all clients, if they have their own noise

    def __init__(
        self,
        k: Any = 3,
        *,
        k_max: int = 5,
        choose: str = "held_out",
        mix: str = "weights",
        penalty: float = 0.0,
        affinity: Any = "uniform",
        shared: Any = None,
        ridge: float = 1.0,
        fit_intercept: bool = True,
        solver: str = "auto",
        n_init: int = 1,
        tol: float = 1e-6,
        max_iter: int = 500,
        random_state: Any = None,
    ) -> None:
        self.k = k
        self.k_max = k_max
        self.choose = choose
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
        return self._keep(result, clients.ids, len(rows.y))

    def _keep(self, result: SolverResult, ids: Sequence[Any], n_rows: int) -> Self:
        order = torch.argsort(result.memberships.mean.mean(0), descending=True, stable=True)
        canonical = result.coefficients.canonical[order]
        self._objective = result.objective  # with its data; it is neither pickled nor saved
        self._result = result._replace(
            coefficients=result.coefficients._replace(canonical=canonical),
            memberships=result.memberships.reorder(order),
            prior=result.prior.reorder(order),
            log_alpha=result.log_alpha[order],
            objective=result.objective.without_data(),
        )
        self._residual_sums = self._sums_of(result.objective.data)
        self._covariance, self._deviations = None, None
        self._order = order
        self.k_ = len(order)
        self.clients_ = np.array(ids)
        self._n_rows = n_rows
        self._onboarded: ClientMemberships | None = None
        self.objective_path_ = np.array(result.path)
        self.n_iter_ = max(1, len(result.path) - 1)
        self.converged_ = result.converged and not self._fits_exactly()
        self._log_likelihood = result.log_likelihood
        self._log_units = 0.0
        self.concentration_ = concentration(self._result.log_alpha).numpy()
        if not self.converged_:
            warnings.warn(self._convergence_message(), ConvergenceWarning, stacklevel=5)
        return self

    def _sums_of(self, data: Likelihood) -> ResidualSums | None:
        """The residual sums of squares that each client's noise depends on, for the coefficients of the fit."""
        if not isinstance(data, HeteroscedasticMoments):
            return None
        return data.residual_sums(self._result.coefficients)

    def _fits_exactly(self) -> bool:
        return self._family.has_dispersion and float(self._result.coefficients.nuisance[0].exp()) < _EXACT_FIT

    def _convergence_message(self) -> str:
        if self._fits_exactly():
            dispersion = float(self._result.coefficients.nuisance[0].exp())
            return (
                f"the model fits every row exactly, to a dispersion of {dispersion:.0e}, so its likelihood grows "
                f"without end and no fit is best; use fewer columns, a smaller k or more rows, or add the noise y lacks"
            )
        reached = len(self.objective_path_) >= self.max_iter
        remedy = "raise max_iter" if reached else "no step lowers the objective any more, so raise tol"
        done = f"{self.n_iter_} of {self.max_iter} iterations"
        return f"the fit stopped after {done}, short of tol = {self.tol:g}; {remedy}"

    def _solve(self, rows: ClientRows, clients: ClientCodes) -> SolverResult:
        solver = check_settings(self)
        ks = numbers_to_try(self, len(clients.ids))
        affinity = make_affinity(clients.ids, self.affinity, rows) if self.penalty > 0 else None
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        if solver == "federated" and isinstance(self.random_state, int | np.integer):
            seed = int(self.random_state)  # the seed of an experiment that does the same
        data = fastest_form(rows)

        def make_problem(k: int) -> GLMProblem:
            outputs = rows.varying.outputs(rows.family.outputs)
            shape = ParameterShape(k, rows.varying.columns, rows.shared.columns, outputs, len(rows.family.nuisance))
            varying, shared = self._scaling.is_slope()
            samples = rows.n_samples * rows.family.has_dispersion
            penalty = rows.family.nuisance_penalty if rows.family.nuisance else None
            return GLMProblem(rows, data, shape, Regularization(self.ridge, 0.0, varying, shared, samples, penalty))

        search = SearchSettings(self.n_init, self.tol, self.max_iter, np.random.default_rng(seed))
        self.selection_: list[SelectionRecord] = []
        if solver == "marginal":
            if len(ks) == 1:
                return fit_marginal(make_problem(ks[0]), search)
            result, self.selection_ = choose_by(make_problem, ks, search, self.choose)
            return result
        if len(ks) > 1:
            raise SettingError(f"k is {self.k!r}, but solver = {solver!r} fits one k only; set a number")
        if solver == "federated":
            ids = tuple(map(str, clients.ids))
            return fit_federated(make_problem(ks[0]), ids, affinity, self.penalty, self.tol, self.max_iter, seed)
        return fit_profile(make_problem(ks[0]), affinity, self.penalty, search)

    def _names(self, x: Any) -> list[str]:
        return list(getattr(self, "feature_names_in_", [f"x{i}" for i in range(x.shape[1])]))

    # ------------------------------------------------------------------ after the fit

    def __getstate__(self) -> dict[str, Any]:
        """Without the data of the fit, but with everything that only they can tell."""
        state = dict(super().__getstate__())
        if state.get("_objective") is not None:
            state["_log_likelihood"] = self._exact_log_likelihood()
            state["_objective"] = None
        return state

    @property
    def _memberships(self) -> ClientMemberships:
        """Of all clients of the fit and of `onboard`, in the order of `clients_`."""
        check_is_fitted(self, "_result")
        fitted = self._result.memberships
        return fitted if self._onboarded is None else fitted.concat(self._onboarded)

    @property
    def memberships_(self) -> Any:
        """The share of each canonical model in each client, a DataFrame with one row per client."""
        return label_rows(self._memberships.mean.numpy(), self.clients_)

    def _predictor_units(self) -> tuple[float, float]:
        """Shift and scale from the standardised predictor to that of y in its own units."""
        return 0.0, 1.0

    def _mean(self, rows: ClientRows, clients: Any) -> Array:
        """Predictions for rows without targets, each with its client's membership."""
        return self._mean_at(rows, self._positions(clients, len(rows.varying)))

    def _mean_at(self, rows: ClientRows, position: torch.Tensor) -> Array:
        with_prior = self._memberships.concat(self._result.prior)
        return with_prior.predict(rows, self._result.coefficients, position).numpy()

    def _positions(self, clients: Any, rows: int) -> torch.Tensor:
        """The position of every row's client in `clients_`, or their number for a new client."""
        k = len(self._result.coefficients.canonical)
        is_new = clients is None or (isinstance(clients, str) and clients == NEW)
        if clients is None and self._has_clients and k > 1:
            warn_of_prediction_without_clients(k)
        codes = ClientCodes.of(None if is_new else clients, rows)
        if not is_new and self._has_clients:
            return codes.positions(self.clients_.tolist())
        return torch.full((rows,), 0 if len(self.clients_) == 1 else len(self.clients_))

    def client_coef(self, client: Any, interval: float | None = None) -> Any:
        """A client's own coefficients and intercept: the canonical ones, weighted by its membership.

        With `interval`, such as 0.9, a DataFrame with one row per term and the columns mean, lower and upper.
        """
        check_is_fitted(self, "_result")
        self._check_has_coefficients()
        if interval is not None:
            return client_coefficient_intervals(self, self._position(client), interval)
        c = self._memberships.mean[self._position(client)].numpy()
        return np.tensordot(c, self.canonical_coef_, 1), np.tensordot(c, self.canonical_intercept_, 1)

    def _check_has_coefficients(self) -> None:
        """Raise a SettingError if clients mix predictions, unless that is the same as mixing coefficients."""
        if self.mix == "predictions" and not (isinstance(self._family, GaussianFamily) and self._family.link != "log"):
            raise SettingError(
                "with mix = 'predictions' a client mixes predictions and has no coefficients of its own; look at "
                "memberships_ and canonical_coef_, or fit with mix = 'weights'"
            )

    def _position(self, client: Any) -> int:
        """The position of a known client."""
        (at,) = known_positions([client], self.clients_.tolist())
        if at == len(self.clients_):
            raise DataError(f"client {client!r} is not known to the model; add it with onboard")
        return at

    def _check_new_clients(self, clients: Any, rows: int) -> ClientCodes:
        """The clients of these rows, if the model has memberships and knows none of them yet."""
        if clients is None:
            raise DataError("clients is None; give the client of every row")
        if not self._has_clients:
            raise DataError("the model was fitted without clients, so it has no memberships; fit it with clients first")
        codes = ClientCodes.of(clients, rows)
        places = known_positions(codes.ids, self.clients_.tolist())
        if known := [client for client, at in zip(codes.ids, places, strict=True) if at < len(self.clients_)]:
            raise DataError(f"client {known[0]!r} is known already; leave it out, or fit again with all its rows")
        return codes

    def _onboard_rows(self, rows: ClientRows, clients: ClientCodes) -> Any:
        """Find the memberships of new clients, keep everything else as fitted, and remember the clients."""
        data = fastest_form(rows)
        found = self._result.objective.find_memberships(self._parameters(), data).reorder(self._order)
        if self._residual_sums is not None and (sums := self._sums_of(data)) is not None:
            self._residual_sums = self._residual_sums.concat(sums)
        self._onboarded = found if self._onboarded is None else self._onboarded.concat(found)
        self.clients_ = np.array([*self.clients_.tolist(), *clients.ids])
        return label_rows(found.mean.numpy(), np.array(clients.ids))

    def _parameters(self) -> Any:
        """The parameter vector of the objective, with canonical models in the order that the solver had."""
        coefficients = self._result.coefficients
        back = torch.argsort(self._order)
        k, q, m = coefficients.canonical.shape
        shape = ParameterShape(k, q, len(coefficients.shared), m, len(coefficients.nuisance))
        return shape.pack(coefficients._replace(canonical=coefficients.canonical[back]), self._result.log_alpha[back])
