"""Predictions of held-out rows, by canonical models, one model for all, and one model per client."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ..client_ids import Array
from .encoding import Encoding
from .local_models import LocalModels
from .prepare import PreparedTable, TableSettings

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
    encoding: Encoding
    x: Array
    y: Array
    clients: Array
    test_x: Array

    @classmethod
    def of(cls, table: PreparedTable, settings: TableSettings) -> HeldOutComparison:
        train = ~table.is_test
        encoding = Encoding.of(table.frame[train], table.features)
        x, test_x = encoding.encode(table.frame[train]), encoding.encode(table.frame[table.is_test])
        return cls(table, settings, encoding, x, table.target.values[train], table.clients[train], test_x)

    @property
    def _test_clients(self) -> Array:
        clients: Array = self.table.clients[self.table.is_test]
        return clients

    def population(self, k: int) -> HeldOutScore:
        def predict() -> Array:
            model = self.settings.estimator(self.table.target, k, self.encoding.shared(self.settings.shared))
            return _predict_means(model.fit(self.x, self.y, clients=self.clients), self.test_x, self._test_clients)

        return self._score(f"{k} canonical model{'s' * (k > 1)}", predict)

    def pooled(self) -> HeldOutScore:
        def predict() -> Array:
            return _predict_means(self.settings.pooled(self.table.target).fit(self.x, self.y), self.test_x)

        return self._score(POOLED, predict)

    def local(self) -> HeldOutScore:
        def predict() -> Array:
            models = LocalModels(self.table.target.family, self.x, self.y, self.clients, self._noise())
            return models.predict(self.test_x, self._test_clients)

        return self._score(LOCAL, predict)

    def _noise(self) -> float:
        """The mean deviance of one model for all, or 1 for classes, which have no dispersion."""
        target = self.table.target
        if target.classes:
            return 1.0
        mean = torch.tensor(_predict_means(self.settings.pooled(target).fit(self.x, self.y), self.x))
        return float(target.make_family().deviance(mean, torch.tensor(self.y)).mean())

    def _score(self, label: str, predict: Callable[[], Array]) -> HeldOutScore:
        start = time.perf_counter()
        mean = predict()
        seconds = time.perf_counter() - start
        return HeldOutScore(label, self.table.target.figures(mean, self.table.is_test), seconds)


def _predict_means(model: Any, x: Array, clients: Array | None = None) -> Array:
    predict = model.predict_proba if hasattr(model, "predict_proba") else model.predict
    means: Array = predict(x, clients)
    return means
