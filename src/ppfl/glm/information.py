"""How well a fitted population describes its data: the likelihood and information criteria."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.utils.validation import check_is_fitted

from .families import Family
from .solvers import LogLikelihood, SolverResult, concentration, marginal_log_likelihood, one_thread


class InformationMixin:
    """Attributes of fitted estimators."""

    _family: Family
    _result: SolverResult
    _objective: Any
    _log_likelihood: LogLikelihood | None
    _log_units: float

    @property
    def log_likelihood_(self) -> float:
        """With memberships integrated out for the marginal solver, in the units of y."""
        return self._exact_log_likelihood().value + self._log_units

    @property
    def log_likelihood_error_(self) -> float:
        """The standard error of `log_likelihood_`, from the integration."""
        return self._exact_log_likelihood().error

    def _exact_log_likelihood(self) -> LogLikelihood:
        """Computed when it is first needed, because it takes about as long as a fit."""
        check_is_fitted(self, "_result")
        if self._log_likelihood is None:
            coefficients = self._result.coefficients
            with one_thread():
                alpha = concentration(self._result.log_alpha)
                self._log_likelihood = marginal_log_likelihood(self._objective.data, coefficients, alpha)
        return self._log_likelihood

    @property
    def n_parameters_(self) -> int:
        """The number of coefficients, dispersion, and memberships or the parameters of their distribution."""
        check_is_fitted(self, "_result")
        coefficients = self._result.coefficients
        free = coefficients.shared.shape[1]
        free -= free > 1  # class probabilities sum to 1
        count = (coefficients.canonical.shape[:2].numel() + len(coefficients.shared)) * free
        return count + len(self._family.nuisance) + self._result.membership_parameters

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
