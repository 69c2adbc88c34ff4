"""Population GLMs for a table with a target and a client in every row: regression and classification."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Self

import numpy as np
import torch
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.metrics import accuracy_score
from sklearn.utils import validation
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted

from ..core.errors import DataError
from .client_ids import Array, ClientCodes, count_missing
from .column_spread import check_positive_target, measure_target
from .estimator import PopulationEstimator
from .families import (
    GaussianFamily,
    HeteroscedasticGaussianFamily,
    classification_family,
    family_name,
    is_positive_only,
    regression_family,
)
from .formula import FormulaMixin
from .inference import predict_with_intervals, probabilities_with_intervals
from .quasi import fit_quasi
from .sample_rows import ClientRows
from .standardize import ColumnScaling, sort_by_client

_EMPTY = torch.zeros(0, dtype=torch.float64)


def validate_data(*args: Any, **settings: Any) -> Any:
    """As scikit-learn does, but a table may have no columns, because clients may differ in their intercepts alone."""
    return validation.validate_data(*args, ensure_min_features=0, **settings)


class TableEstimator(FormulaMixin, PopulationEstimator, ABC):
    """Estimators for tables with one row per sample."""

    def _fit_table(self, x: Any, y: Array, clients: Any, sample_weight: Any, offset: Any) -> Self:
        self._formula = None
        if not x.shape[1] and (clients is None or not self.fit_intercept):
            raise DataError(
                f"X has 0 feature(s) (shape={x.shape}) while a minimum of 1 is required without clients or intercept"
            )
        weight = _check_sample_weight(sample_weight, x, dtype=np.float64, ensure_non_negative=True)
        if not weight.sum() > 0:
            raise DataError("sample_weight is 0 for all rows; some must be positive")
        codes = ClientCodes.of(clients, x.shape[0])
        self._has_clients = clients is not None
        self._scaling = ColumnScaling.of(x, weight, self._names(x), self.shared, intercept=self.fit_intercept)
        self._shift, self._target_scale = self._target_scaling(y, weight)
        target = (y - self._shift) / self._target_scale
        self._has_offset = offset is not None
        self._fit_rows(self._sorted_rows(x, target, weight, codes, offset), codes)
        self._log_units = -float(weight.sum() * np.log(self._target_scale))  # the density of y in its own units
        self.selection_ = [record.in_units(self._log_units, float(weight.sum())) for record in self.selection_]
        slopes, intercepts = self._scaling.to_original_units(self._result.coefficients, *self._predictor_units())
        single = slopes.shape[2] == 1
        self.canonical_coef_ = slopes[..., 0] if single else slopes.swapaxes(1, 2)  # (K, d) or (K, m, d)
        self.canonical_intercept_ = intercepts[:, 0] if single else intercepts
        return self

    def _sorted_rows(self, x: Any, y: Array, weight: Array, codes: ClientCodes, offset: Any) -> ClientRows:
        scaled = self._check_offset(offset, x.shape[0])
        return sort_by_client(self._scaling, x, y, weight, codes, self._family, self.mix, scaled)

    def _check_offset(self, offset: Any, rows: int) -> Array | None:
        """The offset of every row in standardised units, or None without one."""
        if self._has_offset != (offset is not None):
            had = "had an offset for every row" if self._has_offset else "had no offset"
            raise DataError(f"the fit {had}; give the same to every call of the model")
        if offset is None:
            return None
        if self._family.outputs > 1:
            raise DataError("an offset is the same for all of three or more classes, so it has no effect; leave it out")
        values = np.asarray(offset, dtype=np.float64)
        if values.shape != (rows,):
            raise DataError(f"offset has shape {values.shape} for {rows} rows; give one number per row")
        if not np.isfinite(values).all():
            raise DataError(f"offset is {values[~np.isfinite(values)][0]} in some rows; an exposure must be positive")
        return values / self._predictor_units()[1]

    def _predictor_units(self) -> tuple[float, float]:
        """Shift and scale from the standardised predictor to that of y in its own units."""
        if self._family.link == "log":
            return float(np.log(self._target_scale)), 1.0
        return self._shift, self._target_scale

    def _target_scaling(self, y: Array, weight: Array) -> tuple[float, float]:
        """Mean and scale of the targets, so that one tolerance and one ridge suit all units."""
        return 0.0, 1.0

    @abstractmethod
    def _validate(self, X: Any, y: Any) -> tuple[Any, Array]:
        """The checked table, with the columns of the fit, and its targets as numbers."""

    def onboard(self, X: Any, y: Any, clients: Any, sample_weight: Any = None, offset: Any = None) -> Any:
        """Find the memberships of clients that `fit` did not have. The canonical models stay as they are.

        Returns the new memberships; the clients are known to the model from then on.
        """
        check_is_fitted(self, "_result")
        x, target = self._validate(X, y)
        weight = _check_sample_weight(sample_weight, x, dtype=np.float64, ensure_non_negative=True)
        codes = self._check_new_clients(clients, x.shape[0])
        scaled = (target - self._shift) / self._target_scale
        return self._onboard_rows(self._sorted_rows(x, scaled, weight, codes, offset), codes)

    def _table_mean(self, X: Any, clients: Any, offset: Any) -> Array:
        return self._mean(self._rows_to_predict(X, offset), clients)

    def _rows_to_predict(self, X: Any, offset: Any) -> ClientRows:
        check_is_fitted(self, "_result")
        return self._validated_rows(validate_data(self, X, dtype=np.float64, reset=False, accept_sparse="csr"), offset)

    def _mean_of_validated(self, x: Any, clients: Any, offset: Any) -> Array:
        return self._mean(self._validated_rows(x, offset), clients)

    def _validated_rows(self, x: Any, offset: Any) -> ClientRows:
        """Rows without targets, in their own order."""
        varying, shared = self._scaling.split(x)
        scaled = self._check_offset(offset, x.shape[0])
        added = None if scaled is None else torch.from_numpy(scaled)
        return ClientRows(varying, shared, _EMPTY, _EMPTY, _EMPTY, 0, self._family, self.mix, added)

    def deviance(self, X: Any, y: Any, clients: Any = None, sample_weight: Any = None, offset: Any = None) -> float:
        """Mean deviance of the predictions for each row's client: smaller is better, 0 is perfect."""
        check_is_fitted(self, "_result")
        x, target = self._validate(X, y)
        weight = _check_sample_weight(sample_weight, x, dtype=np.float64, ensure_non_negative=True)
        mean = torch.from_numpy(np.ascontiguousarray(self._mean_of_validated(x, clients, offset)))
        each = self._family.deviance(mean, torch.from_numpy((target - self._shift) / self._target_scale)).numpy()
        return float(np.average(each * self._target_scale**2, weights=weight))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.sparse = True
        return tags


class PopulationRegressor(RegressorMixin, TableEstimator):  # type: ignore[misc]
    """K canonical regressions, and one membership per client with its share of each.

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
        k: Any = 3,
        *,
        k_max: int = 5,
        choose: str = "held_out",
        family: str = "gaussian",
        link: str | None = None,
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
        super().__init__(
            k, k_max=k_max, choose=choose, mix=mix, penalty=penalty, affinity=affinity, shared=shared, ridge=ridge,
            fit_intercept=fit_intercept,
            solver=solver, n_init=n_init, tol=tol, max_iter=max_iter, random_state=random_state,
        )  # fmt: skip
        self.family = family
        self.link = link

    def fit(self, X: Any, y: Any, clients: Any = None, sample_weight: Any = None, offset: Any = None) -> Self:
        """`clients` has the client of every row; without it the fit is a plain GLM.

        `offset` (n,) is added to every linear predictor: log(exposure) for counts.
        """
        self._family = regression_family(self.family, self.link)
        x, target = validate_data(self, X, y, dtype=np.float64, y_numeric=True, accept_sparse="csr")
        numbers = self._to_numbers(target)
        if self._family.is_quasi:
            fit_quasi(self, x, numbers, clients, sample_weight, offset)
            return self
        return self._fit_table(x, numbers, clients, sample_weight, offset)

    def predict(self, X: Any, clients: Any = None, offset: Any = None, interval: float | None = None) -> Any:
        """The mean of y for each row's client; for new ones, and with clients='new', the population's.

        With `interval`, such as 0.9, a DataFrame with the index of X: `mean`, its interval `lower` and `upper`, and
        `new_lower` and `new_upper`, between which a new observation of this client lies with this probability.
        """
        if interval is not None:
            return predict_with_intervals(self, X, clients, offset, interval)
        mean = self._table_mean(X, clients, offset)
        return self._shift + self._target_scale * mean

    def score(self, X: Any, y: Any, clients: Any = None, sample_weight: Any = None, offset: Any = None) -> float:
        """The share of the deviance that is explained: R squared for the gaussian family."""
        check_is_fitted(self, "_result")
        x, target = self._validate(X, y)
        weight = _check_sample_weight(sample_weight, x, dtype=np.float64, ensure_non_negative=True)
        constant = torch.full((len(target),), float(np.average(target, weights=weight)), dtype=torch.float64)
        null = self._family.deviance(constant, torch.from_numpy(target)).numpy()
        remaining = self.deviance(X, y, clients, sample_weight, offset)
        total = float(np.average(null, weights=weight))
        return 1 - remaining / total if total > 0 else float(remaining == 0)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = is_positive_only(self.family)
        tags.input_tags.sparse = family_name(self.family) != HeteroscedasticGaussianFamily.name
        return tags

    def _to_numbers(self, y: Any) -> Array:
        target = np.array(y, dtype=np.float64)  # a copy, as torch warns about read-only arrays
        self._family.check(torch.from_numpy(target))
        return target

    def _validate(self, X: Any, y: Any) -> tuple[Any, Array]:
        x, target = validate_data(self, X, y, dtype=np.float64, y_numeric=True, reset=False, accept_sparse="csr")
        return x, self._to_numbers(target)

    def _target_scaling(self, y: Array, weight: Array) -> tuple[float, float]:
        if not isinstance(self._family, GaussianFamily):
            check_positive_target(y)
            return 0.0, 1.0
        if self._family.link == "log":  # only an intercept can take up the scale
            return 0.0, measure_target(y, weight, center=False)[1] if self.fit_intercept else 1.0
        return measure_target(y, weight, center=self.fit_intercept)


class PopulationClassifier(ClassifierMixin, TableEstimator):  # type: ignore[misc]
    """K canonical logistic regressions for two or more classes, and one membership per client.

    >>> random = np.random.default_rng(0)
    >>> clients, x = np.repeat(np.arange(20), 30), random.normal(size=(600, 1))
    >>> y = np.where(clients % 2, 3.0, -3.0) * x[:, 0] + random.logistic(size=600) > 0
    >>> model = PopulationClassifier(k=2, random_state=0).fit(x, y, clients=clients)
    >>> bool(model.score(x, y, clients=clients) > 0.8 > model.score(x, y, clients="new"))  # of new clients
    True
    """

    def fit(self, X: Any, y: Any, clients: Any = None, sample_weight: Any = None, offset: Any = None) -> Self:
        """`clients` has the client of every row; without it the fit is a plain GLM.

        `offset` (n,) is added to every linear predictor: log(exposure) for counts.
        """
        x, labels = self._validate_labels(X, y, reset=True)
        check_classification_targets(labels)
        self.classes_, target = np.unique(labels, return_inverse=True)
        if len(self.classes_) < 2:
            raise DataError(f"y has one class only, {self.classes_.tolist()[0]!r}; a classifier needs two")
        self._family = classification_family(len(self.classes_))
        return self._fit_table(x, target.astype(np.float64), clients, sample_weight, offset)

    def predict_proba(self, X: Any, clients: Any = None, offset: Any = None, interval: float | None = None) -> Any:
        """(n, classes), for each row's client; for new ones, and with clients='new', the population's.

        With `interval`, such as 0.9, a DataFrame with the index of X, and the columns mean, lower and upper by class.
        """
        if interval is not None:
            return probabilities_with_intervals(self, X, clients, offset, interval)
        return self._table_mean(X, clients, offset)

    def predict(self, X: Any, clients: Any = None, offset: Any = None) -> Array:
        """The most likely class."""
        best = self.predict_proba(X, clients, offset).argmax(1)
        return np.asarray(self.classes_[best])

    def score(self, X: Any, y: Any, clients: Any = None, sample_weight: Any = None, offset: Any = None) -> float:
        """The accuracy; a class that the fit did not have counts as an error."""
        return float(accuracy_score(y, self.predict(X, clients, offset), sample_weight=sample_weight))

    def _validate_labels(self, X: Any, y: Any, *, reset: bool) -> tuple[Any, Array]:
        if y is not None and (missing := count_missing(np.asarray(y))):
            raise DataError(f"y is missing in {missing} of {len(y)} rows; drop these rows or give them a class")
        x, labels = validate_data(self, X, y, dtype=np.float64, reset=reset, accept_sparse="csr")
        return x, labels

    def _validate(self, X: Any, y: Any) -> tuple[Any, Array]:
        x, labels = self._validate_labels(X, y, reset=False)
        target = np.searchsorted(self.classes_, labels).clip(max=len(self.classes_) - 1)
        if (self.classes_[target] != labels).any():
            odd = labels[self.classes_[target] != labels].tolist()[0]
            raise DataError(f"y has the class {odd!r}, which the fit did not have; it had {self.classes_.tolist()}")
        return x, target.astype(np.float64)
