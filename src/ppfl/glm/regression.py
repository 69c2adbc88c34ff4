"""Population GLMs of a table with a target and a client for every row: numbers and classes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.metrics import accuracy_score
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted, validate_data

from ..core.errors import DataError
from .columns import Array, Clients, Columns, count_missing
from .families import Bernoulli, Classes, Gaussian, regression_family
from .likelihoods import Rows
from .population import PopulationEstimator, ordered_rows

_NOTHING = torch.zeros(0, dtype=torch.float64)


class TableEstimator(PopulationEstimator, ABC):
    """One row a sample."""

    def _fit_table(self, x: Any, y: Array, clients: Any, sample_weight: Any) -> Self:
        weight = _check_sample_weight(sample_weight, x, dtype=np.float64, ensure_non_negative=True)
        if not weight.sum() > 0:
            raise DataError("sample_weight is 0 for all rows; some must count")
        who = Clients.of(clients, x.shape[0])
        self._has_clients = clients is not None
        self._columns = Columns.of(x, weight, self._names(x), self.shared, intercept=self.fit_intercept)
        self._shift, self._stretch = self._scaling(y, weight)
        target = (y - self._shift) / self._stretch
        self._fit_rows(ordered_rows(self._columns, x, target, weight, who, self._family, self.mix), who)
        self.log_likelihood_ -= float(weight.sum() * np.log(self._stretch))  # a density of y, in the units of y
        slopes, intercepts = self._columns.in_units(self._fit.coefficients, self._shift, self._stretch)
        single = slopes.shape[2] == 1
        self.canonical_coef_ = slopes[..., 0] if single else slopes.swapaxes(1, 2)  # (K, d) or (K, m, d)
        self.canonical_intercept_ = intercepts[:, 0] if single else intercepts
        return self

    def _scaling(self, y: Array, weight: Array) -> tuple[float, float]:
        """What targets are shifted and stretched by, so that one tolerance and one ridge fit all units."""
        return 0.0, 1.0

    @abstractmethod
    def _checked(self, X: Any, y: Any) -> tuple[Any, Array]:
        """A table that looks like the fitted one, and its targets as numbers."""

    def onboard(self, X: Any, y: Any, clients: Any, sample_weight: Any = None) -> Any:
        """Place clients that `fit` did not have: only their memberships are found, the canonical models stay.

        They are known from then on, and their memberships are returned.
        """
        check_is_fitted(self, "_fit")
        x, target = self._checked(X, y)
        weight = _check_sample_weight(sample_weight, x, dtype=np.float64, ensure_non_negative=True)
        who = self._strangers(clients, x.shape[0])
        scaled = (target - self._shift) / self._stretch
        return self._onboard_rows(ordered_rows(self._columns, x, scaled, weight, who, self._family, self.mix), who)

    def _table_mean(self, X: Any, clients: Any) -> Array:
        check_is_fitted(self, "_fit")
        return self._mean_of(validate_data(self, X, dtype=np.float64, reset=False, accept_sparse="csr"), clients)

    def _mean_of(self, x: Any, clients: Any) -> Array:
        varying, shared = self._columns.split(x)
        return self._mean(Rows(varying, shared, _NOTHING, _NOTHING, _NOTHING, 0, self._family, self.mix), clients)

    def deviance(self, X: Any, y: Any, clients: Any = None, sample_weight: Any = None) -> float:
        """Mean deviance, of each row's client: smaller is better, 0 is a perfect prediction."""
        check_is_fitted(self, "_fit")
        x, target = self._checked(X, y)
        weight = _check_sample_weight(sample_weight, x, dtype=np.float64, ensure_non_negative=True)
        mean = torch.from_numpy(np.ascontiguousarray(self._mean_of(x, clients)))
        each = self._family.deviance(mean, torch.from_numpy((target - self._shift) / self._stretch)).numpy()
        return float(np.average(each * self._stretch**2, weights=weight))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


class PopulationRegressor(RegressorMixin, TableEstimator):  # type: ignore[misc]
    """K canonical regressions, and for every client a membership that says how much of each it is.

    >>> random = np.random.default_rng(0)
    >>> clients = np.repeat(np.arange(30), 20)
    >>> slope = np.where(clients % 2, 2.0, -2.0)
    >>> x = random.normal(size=(600, 1))
    >>> y = slope * x[:, 0] + random.normal(size=600)
    >>> model = PopulationRegressor(k=2, random_state=0).fit(x, y, clients=clients)
    >>> bool(abs(abs(model.canonical_coef_) - 2).max() < 0.2), model.converged_
    (True, True)
    """

    def __init__(
        self,
        k: int = 3,
        *,
        family: str = "gaussian",
        link: str | None = None,
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
        super().__init__(
            k, mix=mix, penalty=penalty, affinity=affinity, shared=shared, ridge=ridge, fit_intercept=fit_intercept,
            solver=solver, n_init=n_init, tol=tol, max_iter=max_iter, random_state=random_state,
        )  # fmt: skip
        self.family = family
        self.link = link

    def fit(self, X: Any, y: Any, clients: Any = None, sample_weight: Any = None) -> Self:
        """`clients` has the client of every row; without it all rows are one client's, and the fit is a plain GLM."""
        self._family = regression_family(self.family, self.link)
        x, target = validate_data(self, X, y, dtype=np.float64, y_numeric=True, accept_sparse="csr")
        return self._fit_table(x, self._numbers(target), clients, sample_weight)

    def predict(self, X: Any, clients: Any = None) -> Array:
        """The mean of y, of each row's client; without clients, and for clients not seen, the population's."""
        mean = self._table_mean(X, clients)
        return self._shift + self._stretch * mean

    def score(self, X: Any, y: Any, clients: Any = None, sample_weight: Any = None) -> float:
        """The share of deviance explained: R squared for the gaussian family."""
        check_is_fitted(self, "_fit")
        x, target = self._checked(X, y)
        weight = _check_sample_weight(sample_weight, x, dtype=np.float64, ensure_non_negative=True)
        constant = torch.full((len(target),), float(np.average(target, weights=weight)), dtype=torch.float64)
        nothing = self._family.deviance(constant, torch.from_numpy(target)).numpy()
        left = self.deviance(X, y, clients, sample_weight)
        whole = float(np.average(nothing, weights=weight))
        return 1 - left / whole if whole > 0 else float(left == 0)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = self.family in ("poisson", "gamma")
        return tags

    def _numbers(self, y: Any) -> Array:
        target = np.array(y, dtype=np.float64)  # a copy, as torch wants to be able to write
        self._family.check(torch.from_numpy(target))
        return target

    def _checked(self, X: Any, y: Any) -> tuple[Any, Array]:
        x, target = validate_data(self, X, y, dtype=np.float64, y_numeric=True, reset=False, accept_sparse="csr")
        return x, self._numbers(target)

    def _scaling(self, y: Array, weight: Array) -> tuple[float, float]:
        if not isinstance(self._family, Gaussian) or self._family.link != "identity":
            return 0.0, 1.0
        mean = float(np.average(y, weights=weight)) if self.fit_intercept else 0.0
        spread = float(np.sqrt(np.average((y - mean) ** 2, weights=weight)))
        return mean, spread if spread > 1e-12 * abs(mean) else 1.0


class PopulationClassifier(ClassifierMixin, TableEstimator):  # type: ignore[misc]
    """K canonical logistic regressions, of two classes or more, and a membership for every client."""

    def fit(self, X: Any, y: Any, clients: Any = None, sample_weight: Any = None) -> Self:
        """`clients` has the client of every row; without it all rows are one client's, and the fit is a plain GLM."""
        x, labels = self._labelled(X, y, reset=True)
        check_classification_targets(labels)
        self.classes_, target = np.unique(labels, return_inverse=True)
        if len(self.classes_) < 2:
            raise DataError(f"y has one class only, {self.classes_.tolist()[0]!r}; a classifier needs two")
        self._family = Bernoulli() if len(self.classes_) == 2 else Classes(len(self.classes_))
        return self._fit_table(x, target.astype(np.float64), clients, sample_weight)

    def predict_proba(self, X: Any, clients: Any = None) -> Array:
        """(n, classes), of each row's client; without clients, and for clients not seen, the population's."""
        return self._table_mean(X, clients)

    def predict(self, X: Any, clients: Any = None) -> Array:
        """The most likely class."""
        best = self.predict_proba(X, clients).argmax(1)
        return np.asarray(self.classes_[best])

    def score(self, X: Any, y: Any, clients: Any = None, sample_weight: Any = None) -> float:
        """The share of rows whose class is predicted; a class the fit did not have never is."""
        return float(accuracy_score(y, self.predict(X, clients), sample_weight=sample_weight))

    def _labelled(self, X: Any, y: Any, *, reset: bool) -> tuple[Any, Array]:
        if y is not None and (missing := count_missing(np.asarray(y))):
            raise DataError(f"y is missing in {missing} of {len(y)} rows; drop these rows or give them a class")
        x, labels = validate_data(self, X, y, dtype=np.float64, reset=reset, accept_sparse="csr")
        return x, labels

    def _checked(self, X: Any, y: Any) -> tuple[Any, Array]:
        x, labels = self._labelled(X, y, reset=False)
        target = np.searchsorted(self.classes_, labels).clip(max=len(self.classes_) - 1)
        if (self.classes_[target] != labels).any():
            odd = labels[self.classes_[target] != labels].tolist()[0]
            raise DataError(f"y has the class {odd!r}, which the fit did not have; it had {self.classes_.tolist()}")
        return x, target.astype(np.float64)
