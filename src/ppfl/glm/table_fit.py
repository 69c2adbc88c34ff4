"""From a table to canonical models: how many, who is how much of each, and how well that predicts.

Coefficients, memberships and information criteria are of all rows; held-out figures are of the same models fitted
without the rows they are judged on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ..core.errors import DataError
from ..data.arrays import quoted
from .table_columns import Encoding
from .table_data import Table, TableSettings, prepare
from .table_scores import OWN, POOLED, Score, Trial
from .table_terms import Terms, terms_of

CLEAR = 0.8  # a client with so much of one canonical model is called clear, others mixed


class Candidate(NamedTuple):
    """A number of canonical models that was tried."""

    k: int
    bic: float
    aic: float
    converged: bool
    score: Score | None  # on held-out rows


class TableFit(NamedTuple):
    settings: TableSettings
    table: Table
    encoding: Encoding
    candidates: list[Candidate]
    best: Candidate
    model: Any  # the estimator with so many canonical models, fitted to all rows
    ids: list[str]  # M
    sizes: list[int]  # (M,), rows
    memberships: list[list[float]]  # (M, K), the most used canonical model first
    terms: Terms
    scores: list[Score]  # ours first; none where nothing was held out

    @property
    def shares(self) -> list[float]:
        """(K,), of the population."""
        return [float(share) for share in np.mean(self.memberships, 0)]

    @property
    def clear(self) -> list[int]:
        """(K,), clients that are at least CLEAR of it."""
        return [int(count) for count in (np.array(self.memberships) >= CLEAR).sum(0)]

    @property
    def mixed(self) -> int:
        """Clients that are clearly none."""
        return len(self.ids) - sum(self.clear)


OnStep = Callable[[str, int, int], None]  # what begins, which step it is, and of how many


def fit_table(frame: Any, settings: TableSettings, on_step: OnStep | None = None) -> TableFit:
    """Fit every number of canonical models, take the best, and compare it with what knows no clients or no others.

    >>> import pandas as pd
    >>> random = np.random.default_rng(0)
    >>> shops = pd.DataFrame({"shop": np.repeat(np.arange(20), 12), "price": random.normal(size=240)})
    >>> shops["sold"] = np.where(shops["shop"] % 2, 3.0, -3.0) * shops["price"] + random.normal(size=240)
    >>> fitted = fit_table(shops, TableSettings("shop", "sold", ks=(1, 2)))
    >>> fitted.best.k, fitted.clear, fitted.mixed
    (2, [10, 10], 0)
    """
    table = prepare(frame, settings)
    encoding = table.encoding
    if not encoding.terms:
        raise DataError(f"column {quoted(table.features)} has one value; name other columns")
    x, y, shared = encoding.encode(table.frame), table.target.values, encoding.shared(settings.shared)
    trial = Trial.of(table, settings) if table.is_test.any() else None
    steps = _announced([*(f"k = {k}" for k in settings.ks), POOLED, *([OWN] if trial else [])], on_step)
    candidates, models = [], []
    for k in settings.ks:
        next(steps)
        model = settings.estimator(table.target, k, shared).fit(x, y, clients=table.clients)
        score = trial.population(k) if trial else None
        candidates.append(Candidate(k, model.bic_, model.aic_, model.converged_, score))
        models.append(model)
    best = min(candidates, key=lambda candidate: candidate.bic)
    model = models[candidates.index(best)]
    next(steps)
    terms = terms_of(model, settings.pooled(table.target).fit(x, y), table.target, encoding.terms, shared, x)
    scores = [best.score, trial.pooled()] if trial and best.score else []
    if trial:
        next(steps)
        scores.append(trial.own())
    _, sizes = np.unique(table.clients, return_counts=True)
    return TableFit(
        settings, table, encoding, candidates, best, model, model.clients_.tolist(), sizes.tolist(),
        np.asarray(model.memberships_).tolist(), terms, scores,
    )  # fmt: skip


def _announced(steps: list[str], on_step: OnStep | None) -> Iterator[None]:
    for at, step in enumerate(steps, 1):
        if on_step is not None:
            on_step(step, at, len(steps))
        yield
