"""Population GLMs for a table with a target and a client in every row: regression and classification."""

from __future__ import annotations

from typing import Any, Self

import numpy as np
import torch
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.metrics import accuracy_score
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import _check_sample_weight, check_is_fitted

from ..errors import DataError
from .client_ids import Array, count_missing
from .column_spread import check_positive_target, measure_target
from .families import (
    GaussianFamily,
    HeteroscedasticGaussianFamily,
    classification_family,
    family_name,
    is_positive_only,
    regression_family,
)
from .inference import predict_with_intervals, probabilities_with_intervals
from .quasi import fit_quasi
from .table_estimator import TableEstimator, validate_data


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
