"""Estimators for tables: rows are checked, standardised and sorted by client before a fit and for predictions."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Self

import numpy as np
import torch
from sklearn.utils import validation
from sklearn.utils.validation import _check_sample_weight, check_is_fitted

from ..errors import DataError
from .client_ids import Array, ClientCodes
from .estimator import PopulationEstimator
from .formula_mixin import FormulaMixin
from .sample_rows import ClientRows
from .standardize import ColumnScaling, sort_by_client

_EMPTY = torch.zeros(0, dtype=torch.float64)


def validate_data(*args: Any, **settings: Any) -> Any:
    """scikit-learn's check, except that X may have no columns: clients may differ in their intercepts alone."""
    return validation.validate_data(*args, ensure_min_features=0, **settings)


class TableEstimator(FormulaMixin, PopulationEstimator, ABC):
    """What regressors and classifiers share: tables with one row per sample, their scaling, weights and offsets."""

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
        return self._set_units(float(weight.sum()))

    def _set_units(self, samples: float) -> Self:
        """Log-likelihoods and coefficients for the table and for y in their own units."""
        self._log_units = -samples * float(np.log(self._target_scale))
        self.selection_ = [record.in_units(self._log_units, samples) for record in self.selection_]
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
