"""Predictions of held-out rows, by canonical models, one model for all, and one model per client."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import torch

from ..client_ids import Array
from .candidates import FitRows
from .encoding import Encoding, FormulaEncoding
from .local_models import MODELS, LocalModels
from .prepare import PreparedTable
from .table_settings import TableSettings

POOLED, LOCAL = "one model for all", "a model for each client"


class HeldOutScore(NamedTuple):
    """The held-out scores of one method."""

    label: str
    figures: dict[str, float]  # metric -> value, the main metric first
    seconds: float  # to fit and to predict


class HeldOutComparison(NamedTuple):
    """Training and held-out rows, encoded with the levels of the training rows."""

    table: PreparedTable
    settings: TableSettings
    encoding: Encoding | FormulaEncoding
    train: FitRows
    test: FitRows

    @classmethod
    def of(cls, table: PreparedTable, settings: TableSettings) -> HeldOutComparison:
        encoding = table.encoding_of(~table.is_test)
        rows = make_rows(table, encoding)
        return cls(table, settings, encoding, rows.subset(~table.is_test), rows.subset(table.is_test))

    @property
    def has_local(self) -> bool:
        """Whether there is a model for each client to compare with: they have no offset, and not all families."""
        return self.table.target.family in MODELS and self.train.offset is None and self.encoding.intercept

    def population(self, k: int) -> HeldOutScore:
        def predict() -> Array:
            shared = self.encoding.shared(self.settings.shared)
            model = self.settings.estimator(self.table.target, k, shared, intercept=self.encoding.intercept)
            return self.test.predict(self.train.fit(model))

        return self._score(f"{k} canonical model{'s' * (k > 1)}", predict)

    def pooled(self) -> HeldOutScore:
        return self._score(POOLED, lambda: self._pooled_means(self.test))

    def local(self) -> HeldOutScore:
        def predict() -> Array:
            family, train = self.table.target.family, self.train
            models = LocalModels(family, train.x, train.y, train.clients, self._noise())
            return models.predict(self.test.x, self.test.clients)

        return self._score(LOCAL, predict)

    def _pooled_means(self, rows: FitRows) -> Array:
        model = self.settings.pooled(self.table.target, intercept=self.encoding.intercept)
        return rows.predict(self.train.fit_pooled(model), pooled=True)

    def _noise(self) -> float:
        """The mean deviance of one model for all, or 1 for classes, which have no dispersion."""
        target = self.table.target
        if target.classes:
            return 1.0
        mean = torch.tensor(self._pooled_means(self.train))
        return float(target.make_family().deviance(mean, torch.tensor(self.train.y)).mean())

    def _score(self, label: str, predict: Callable[[], Array]) -> HeldOutScore:
        start = time.perf_counter()
        mean = predict()
        seconds = time.perf_counter() - start
        return HeldOutScore(label, self.table.target.figures(mean, self.table.is_test), seconds)


def make_rows(table: PreparedTable, encoding: Encoding | FormulaEncoding) -> FitRows:
    """All rows of the table, encoded."""
    return FitRows(encoding.encode(table.frame), table.target.values, table.clients, table.offset())
