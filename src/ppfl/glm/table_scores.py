"""How well held-out rows are predicted, by canonical models and by what needs no clients or no others."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .columns import Array
from .own_models import OwnModels
from .table_columns import Encoding
from .table_data import Table, TableSettings

POOLED, OWN = "one model for all", "a model for each client"


class Score(NamedTuple):
    """A way to predict, and how it fared."""

    label: str
    figures: dict[str, float]  # the first one counts
    seconds: float  # to fit and to predict


class Trial(NamedTuple):
    """Rows to learn from, and rows to be judged on, with the levels that are in the former."""

    table: Table
    settings: TableSettings
    encoding: Encoding
    x: Array
    y: Array
    clients: Array
    test_x: Array

    @classmethod
    def of(cls, table: Table, settings: TableSettings) -> Trial:
        train = ~table.is_test
        encoding = Encoding.of(table.frame[train], table.features)
        x, test_x = encoding.encode(table.frame[train]), encoding.encode(table.frame[table.is_test])
        return cls(table, settings, encoding, x, table.target.values[train], table.clients[train], test_x)

    @property
    def _test_clients(self) -> Array:
        clients: Array = self.table.clients[self.table.is_test]
        return clients

    def population(self, k: int) -> Score:
        def predict() -> Array:
            model = self.settings.estimator(self.table.target, k, self.encoding.shared(self.settings.shared))
            return _means(model.fit(self.x, self.y, clients=self.clients), self.test_x, self._test_clients)

        return self._score(f"{k} canonical model{'s' * (k > 1)}", predict)

    def pooled(self) -> Score:
        def predict() -> Array:
            return _means(self.settings.pooled(self.table.target).fit(self.x, self.y), self.test_x)

        return self._score(POOLED, predict)

    def own(self) -> Score:
        def predict() -> Array:
            models = OwnModels(self.table.target.family, self.x, self.y, self.clients, self._noise())
            return models.predict(self.test_x, self._test_clients)

        return self._score(OWN, predict)

    def _noise(self) -> float:
        """Mean deviance that one model for all leaves; classes have none to tell."""
        target = self.table.target
        if target.classes:
            return 1.0
        mean = torch.tensor(_means(self.settings.pooled(target).fit(self.x, self.y), self.x))
        return float(target.likelihood().deviance(mean, torch.tensor(self.y)).mean())

    def _score(self, label: str, predict: Callable[[], Array]) -> Score:
        began = time.perf_counter()
        mean = predict()
        seconds = time.perf_counter() - began
        return Score(label, self.table.target.figures(mean, self.table.is_test), seconds)


def _means(model: Any, x: Array, clients: Array | None = None) -> Array:
    predict = model.predict_proba if hasattr(model, "predict_proba") else model.predict
    means: Array = predict(x, clients)
    return means
