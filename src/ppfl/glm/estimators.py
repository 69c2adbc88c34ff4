"""Population GLMs for a table with a target and a client in every row: regression and classification."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Self, cast

import numpy as np
import pandas as pd
import torch
from sklearn.base import BaseEstimator, ClassifierMixin, RegressorMixin
from sklearn.metrics import accuracy_score, get_scorer
from sklearn.utils.metadata_routing import MetadataRequest
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted

from ..errors import DataError, SettingError
from . import inference, intervals
from .base import PopulationGLM, Reading, validate_data
from .columns import Array, TargetUnits, check_log_mean, measure_target
from .families import GaussianFamily, classification_family, is_positive_only, regression_family
from .formula import FormulaDesign


class TableGLM(PopulationGLM):
    """What regressors and classifiers share: tables with one row per sample."""

    def fit(self, X: Any, y: Any, clients: Any = None, sample_weight: Any = None, offset: Any = None) -> Self:
        """Fits the population.

        Args:
            X: (n, d), numbers: NumPy or a DataFrame, whose names are kept. No column at all: clients differ in their
                intercepts only.
            y: (n,), the target.
            clients: (n,), the client of every row; without it the fit is a plain GLM.
            sample_weight: (n,), frequencies: a row of weight 2 counts as two equal rows.
            offset: (n,), added to every linear predictor: log(exposure) for counts.
        """
        return self._fit_table(self._read(X, y, clients, sample_weight, offset, reset=True))

    @classmethod
    def from_formula(
        cls, formula: str, data: Any, *, offset: str | None = None, exposure: str | None = None,
        weights: str | None = None, **settings: Any,
    ) -> Self:  # fmt: skip
        """Fits by a formula such as `reaction ~ days + (days | subject)` to a DataFrame.

        The bar part says which coefficients vary, and after the bar which column has the clients. All other terms have
        one coefficient for all clients. Rows with missing values are left out and counted in `dropped_`. The model
        predicts for tables with the same columns.

        Args:
            formula: It may also contain `offset(log(hours))`.
            data: A DataFrame.
            offset: A column that is added to the linear predictor.
            exposure: A column whose logarithm is added.
            weights: A column with the frequency of every row.
            **settings: Those of the estimator.

        Example:
            >>> random = np.random.default_rng(0)
            >>> data = pd.DataFrame({"subject": np.repeat(np.arange(20), 10), "days": np.tile(np.arange(10.0), 20)})
            >>> data["reaction"] = np.where(data["subject"] % 2, 20.0, 5.0) * data["days"] + random.normal(size=200)
            >>> formula = "reaction ~ days + (0 + days | subject)"
            >>> model = PopulationRegressor.from_formula(formula, data, k=2, random_state=0)
            >>> [model.client_coef(subject)[0].round().tolist() for subject in (0, 1)]
            [[5.0], [20.0]]
            >>> model.predict(data[["days", "subject"]]).shape
            (200,)
        """
        for name in ("shared", "fit_intercept"):
            if name in settings:
                raise SettingError(f"{name} is set, but the formula says this already; leave it out")
        design, rows = FormulaDesign.fit(formula, data, offset=offset, exposure=exposure, weights=weights)
        make: Any = cls
        model = make(shared=list(design.shared) or None, fit_intercept=design.intercept, **settings)
        y = design.target(rows, classes=hasattr(cls, "predict_proba"))
        found = design.read(rows)
        model.fit(found.x, y, found.clients, design.sample_weight(rows), found.offset)
        model.formula_ = design
        return cast(Self, model)

    def deviance(
        self, X: Any, y: Any = None, clients: Any = None, sample_weight: Any = None, offset: Any = None
    ) -> float:
        """Mean deviance of the predictions for each row's client: smaller is better, 0 is perfect."""
        return self._deviance(self._read(X, y, clients, sample_weight, offset))

    def _deviance(self, table: Reading) -> float:
        each = self._family.deviance(torch.from_numpy(self._table_mean(table)), torch.from_numpy(table.y)).numpy()
        return float(np.average(each, weights=table.weight))

    def residuals(
        self, X: Any, y: Any = None, clients: Any = None, offset: Any = None, kind: str = "deviance", seed: int = 0
    ) -> Array:
        """One residual per row, given its client.

        Args:
            X: As in `predict`.
            y: The observed targets.
            clients: The client of every row.
            offset: As in `fit`.
            kind: "deviance" (signed roots of the deviance), "pearson" (differences divided by the standard deviation
                of y) or "quantile" (randomised; standard normal if the model is right, for every family).
            seed: Of quantile residuals.
        """
        return inference.residuals(self, self._read(X, y, clients, None, offset), kind, seed)


class PopulationRegressor(RegressorMixin, TableGLM):  # type: ignore[misc]
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
        residual: str | None = "auto",
        choose: str = "held_out",
        family: str = "gaussian",
        mix: str = "weights",
        penalty: float = 0.0,
        affinity: Any = "uniform",
        shared: Any = None,
        ridge: float = 1.0,
        fit_intercept: bool = True,
        n_init: int = 1,
        tol: float = 1e-6,
        max_iter: int = 500,
        random_state: Any = None,
    ) -> None:
        super().__init__(
            k, residual=residual, choose=choose, mix=mix, penalty=penalty, affinity=affinity, shared=shared,
            ridge=ridge, fit_intercept=fit_intercept, n_init=n_init, tol=tol, max_iter=max_iter,
            random_state=random_state,
        )  # fmt: skip
        self.family = family

    def predict(self, X: Any, clients: Any = None, offset: Any = None, interval: float | None = None) -> Any:
        """The mean of y for each row's client; for new ones, and with clients="new", the population's.

        With `interval`, such as 0.9, a DataFrame with the index of X: `mean`, its interval `lower` and `upper`, and
        `new_lower` and `new_upper`, between which a new observation of this client lies with this probability.
        """
        table = self._read(X, None, clients, None, offset, targets=False)
        return self._table_mean(table) if interval is None else intervals.predictions(self, table, X, interval)

    def score(self, X: Any, y: Any = None, clients: Any = None, sample_weight: Any = None, offset: Any = None) -> float:
        """The share of the deviance that is explained: R squared for the gaussian family."""
        table = self._read(X, y, clients, sample_weight, offset)
        constant = torch.full((len(table.y),), float(np.average(table.y, weights=table.weight)), dtype=torch.float64)
        null = self._family.deviance(constant, torch.from_numpy(table.y)).numpy()
        remaining, total = self._deviance(table), float(np.average(null, weights=table.weight))
        return 1 - remaining / total if total > 0 else float(remaining == 0)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.positive_only = is_positive_only(self.family)
        return tags

    def _set_family(self, classes: Sequence[Any]) -> None:
        """The family by its name."""
        self._family = regression_family(self.family)

    def _validate(self, X: Any, y: Any, *, targets: bool, reset: bool) -> tuple[Array, Array]:
        if reset:
            self._set_family(())
        if not targets:
            return validate_data(self, X, dtype=np.float64, reset=reset), np.zeros(0)
        x, target = validate_data(self, X, y, dtype=np.float64, y_numeric=True, reset=reset)
        numbers = np.array(target, dtype=np.float64)  # a copy, as torch warns about read-only arrays
        self._family.check(torch.from_numpy(numbers))
        return x, numbers

    def _target_units(self, y: Array, weight: Array) -> TargetUnits:
        if isinstance(self._family, GaussianFamily):
            return measure_target(y, weight, center=self.fit_intercept)
        check_log_mean(y)
        return TargetUnits()


class PopulationClassifier(ClassifierMixin, TableGLM):  # type: ignore[misc]
    """K canonical logistic regressions for two or more classes, and one membership per client.

    >>> random = np.random.default_rng(0)
    >>> clients, x = np.repeat(np.arange(20), 30), random.normal(size=(600, 1))
    >>> y = np.where(clients % 2, 3.0, -3.0) * x[:, 0] + random.logistic(size=600) > 0
    >>> model = PopulationClassifier(k=2, random_state=0).fit(x, y, clients=clients)
    >>> bool(model.score(x, y, clients=clients) > 0.8 > model.score(x, y, clients="new"))  # of new clients
    True
    """

    def predict_proba(self, X: Any, clients: Any = None, offset: Any = None, interval: float | None = None) -> Any:
        """(n, classes), for each row's client; for new ones, and with clients="new", the population's.

        With `interval`, such as 0.9, a DataFrame with the index of X, and the columns mean, lower and upper by class.
        """
        table = self._read(X, None, clients, None, offset, targets=False)
        return self._table_mean(table) if interval is None else intervals.probabilities(self, table, X, interval)

    def predict(self, X: Any, clients: Any = None, offset: Any = None) -> Array:
        """The most likely class."""
        best = self.predict_proba(X, clients, offset).argmax(1)
        return np.asarray(self.classes_[best])

    def score(self, X: Any, y: Any = None, clients: Any = None, sample_weight: Any = None, offset: Any = None) -> float:
        """The accuracy; a class that the fit did not have counts as an error."""
        check_is_fitted(self, "fit_")
        if y is None and self.formula_ is not None:
            y = self.formula_.target(X, classes=True)
        return float(accuracy_score(y, self.predict(X, clients, offset), sample_weight=sample_weight))

    def _set_family(self, classes: Sequence[Any]) -> None:
        """That of so many classes, which are sorted."""
        self.classes_ = np.array(classes)
        if len(self.classes_) < 2:
            raise DataError(f"y has one class only, {self.classes_.tolist()[0]!r}; a classifier needs two")
        self._family = classification_family(len(self.classes_))

    def _validate(self, X: Any, y: Any, *, targets: bool, reset: bool) -> tuple[Array, Array]:
        if not targets:
            return validate_data(self, X, dtype=np.float64, reset=reset), np.zeros(0)
        if y is not None and (missing := int(pd.isna(np.asarray(y)).sum())):
            raise DataError(f"y is missing in {missing} of {len(y)} rows; drop these rows or give them a class")
        x, labels = validate_data(self, X, y, dtype=np.float64, reset=reset)
        if reset:
            _warn_if_ordered(y)
            check_classification_targets(labels)
            self._set_family(np.unique(labels).tolist())
        target = np.searchsorted(self.classes_, labels).clip(max=len(self.classes_) - 1)
        if (self.classes_[target] != labels).any():
            odd = labels[self.classes_[target] != labels].tolist()[0]
            raise DataError(f"y has the class {odd!r}, which the fit did not have; it had {self.classes_.tolist()}")
        return x, target.astype(np.float64)


def _warn_if_ordered(y: Any) -> None:
    kind = getattr(y, "dtype", None)
    if isinstance(kind, pd.CategoricalDtype) and kind.ordered and len(kind.categories) > 2:
        order = " < ".join(map(str, kind.categories[:4]))
        warnings.warn(
            f"y is ordered ({order}{' < ...' if len(kind.categories) > 4 else ''}), and this classifier treats its "
            f"classes as unordered (multinomial), with coefficients for each of them",
            UserWarning,
            stacklevel=5,
        )


# ---------------------------------------------------------------------- scorers of scikit-learn


class ClientScorer:
    """One of scikit-learn's scorers, which asks for `clients`."""

    def __init__(self, name: str) -> None:
        self.name, self._scorer = name, get_scorer(name)

    def __call__(self, estimator: Any, X: Any, y: Any, clients: Any = None, **more: Any) -> float:
        return float(self._scorer(_WithClients(estimator, clients), X, y, **more))

    def get_metadata_routing(self) -> Any:
        request = MetadataRequest(owner=self)
        request.score.add_request(param="clients", alias=True)
        return request

    def __repr__(self) -> str:
        return f"client_scorer({self.name!r})"


def client_scorer(name: str) -> ClientScorer:
    """One of scikit-learn's scorers by its name, for predictions with each row's client.

    scikit-learn passes no metadata to `predict`, so a scorer by name would score every row as of a new client. This one
    asks for `clients` in cross-validation and searches, with metadata routing enabled.

    >>> client_scorer("neg_root_mean_squared_error")
    client_scorer('neg_root_mean_squared_error')
    """
    return ClientScorer(name)


class _WithClients(BaseEstimator):  # type: ignore[misc]
    """A fitted model that predicts for these clients."""

    def __init__(self, model: Any, clients: Any) -> None:
        self.model, self.clients = model, clients

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "model":
            raise AttributeError(name)
        return getattr(self.model, name)

    def __sklearn_tags__(self) -> Any:
        return self.model.__sklearn_tags__()

    def __sklearn_is_fitted__(self) -> bool:
        return True

    def predict(self, X: Any) -> Any:
        return self.model.predict(X, clients=self.clients)

    def predict_proba(self, X: Any) -> Any:
        return self.model.predict_proba(X, clients=self.clients)
