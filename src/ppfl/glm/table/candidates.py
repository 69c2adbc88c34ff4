"""Rows as the estimators take them, and fits with several numbers of canonical models."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ..client_ids import Array
from ..solvers import SelectionRecord
from .prepare import PreparedTable
from .table_settings import TableSettings


class FitRows(NamedTuple):
    """Rows as the estimators take them."""

    x: Array
    y: Array
    clients: Array
    offset: Array | None

    def fit(self, model: Any) -> Any:
        return model.fit(self.x, self.y, clients=self.clients, **self._offset())

    def fit_pooled(self, model: Any) -> Any:
        """Without clients."""
        return model.fit(self.x, self.y, **self._offset()) if self.x.shape[1] else self._fit_as_one(model)

    def predict(self, model: Any, *, pooled: bool = False) -> Array:
        """Means (n,) or class probabilities (n, classes)."""
        predict = model.predict_proba if hasattr(model, "predict_proba") else model.predict
        clients = self.clients if not pooled else None if self.x.shape[1] else np.zeros(len(self.y))
        means: Array = predict(self.x, clients, **self._offset())
        return means

    def _fit_as_one(self, model: Any) -> Any:
        """All rows as those of one client, as estimators take a table without columns only with clients."""
        return model.fit(self.x, self.y, clients=np.zeros(len(self.y)), **self._offset())

    def _offset(self) -> dict[str, Array]:
        return {} if self.offset is None else {"offset": self.offset}

    def subset(self, rows: Array) -> FitRows:
        offset = None if self.offset is None else self.offset[rows]
        return FitRows(self.x[rows], self.y[rows], self.clients[rows], offset)


def fit_candidates(
    table: PreparedTable, settings: TableSettings, rows: FitRows, shared: Any
) -> tuple[Any, list[SelectionRecord]]:
    """The model with the chosen K, fitted to all rows, and a record of all K that were tried."""
    ks = settings.candidates(len(np.unique(table.clients)))

    def fit(k: int | list[int]) -> Any:
        return rows.fit(settings.estimator(table.target, k, shared, intercept=table.encoding.intercept))

    if settings.penalty and len(ks) > 1:  # such a fit has no held-out likelihood
        models = [fit(k) for k in ks]
        records = [_record(model) for model in models]
        return min(models, key=lambda model: model.bic_), records
    model = fit(ks if len(ks) > 1 else ks[0])
    return model, model.selection_ or [_record(model)]


def _record(model: Any) -> SelectionRecord:
    return SelectionRecord(
        k=model.k_,
        log_likelihood=model.log_likelihood_,
        aic=model.aic_,
        bic=model.bic_,
        held_out=None,
        held_out_error=None,
        converged=bool(model.converged_),
    )
