"""Fit a table: choose K, fit the canonical models, and compare their predictions with simpler models.

Coefficients, memberships and information criteria come from a fit to all rows. Held-out scores come from the same
models, fitted to the training rows only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from ...core.errors import DataError
from ...data.raw_arrays import quoted
from .coefficients import CoefficientTable, make_coefficient_table
from .encoding import Encoding
from .held_out_scores import LOCAL, POOLED, HeldOutComparison, HeldOutScore
from .prepare import PreparedTable, TableSettings, prepare_table

CLEAR = 0.8  # a client with at least this share of one canonical model is clear, any other client is mixed


class CandidateFit(NamedTuple):
    """The fit with one number of canonical models."""

    k: int
    bic: float
    aic: float
    converged: bool
    score: HeldOutScore | None  # on held-out rows


class TableFit(NamedTuple):
    settings: TableSettings
    table: PreparedTable
    encoding: Encoding
    candidates: list[CandidateFit]
    best: CandidateFit
    model: Any  # the estimator of the best candidate, fitted to all rows
    ids: list[str]  # M
    sizes: list[int]  # (M,), rows
    memberships: list[list[float]]  # (M, K), the most used canonical model first
    terms: CoefficientTable
    scores: list[HeldOutScore]  # the population first; empty if no rows were held out

    @property
    def shares(self) -> list[float]:
        """(K,), the mean membership of each canonical model."""
        return [float(share) for share in np.mean(self.memberships, 0)]

    @property
    def clear(self) -> list[int]:
        """(K,), the number of clients with at least CLEAR of each canonical model."""
        return [int(count) for count in (np.array(self.memberships) >= CLEAR).sum(0)]

    @property
    def mixed(self) -> int:
        """The number of clients with less than CLEAR of any canonical model."""
        return len(self.ids) - sum(self.clear)


OnStep = Callable[[str, int, int], None]  # called with the name, the number and the total number of steps


def fit_table(frame: Any, settings: TableSettings, on_step: OnStep | None = None) -> TableFit:
    """Fit every K, take the one with the lowest BIC, and compare with one model for all and one model per client.

    >>> import pandas as pd
    >>> random = np.random.default_rng(0)
    >>> shops = pd.DataFrame({"shop": np.repeat(np.arange(20), 12), "price": random.normal(size=240)})
    >>> shops["sold"] = np.where(shops["shop"] % 2, 3.0, -3.0) * shops["price"] + random.normal(size=240)
    >>> fitted = fit_table(shops, TableSettings("shop", "sold", ks=(1, 2)))
    >>> fitted.best.k, fitted.clear, fitted.mixed
    (2, [10, 10], 0)
    """
    table = prepare_table(frame, settings)
    encoding = table.encoding
    if not encoding.terms:
        raise DataError(f"column {quoted(table.features)} has one value; name other columns")
    x, y, shared = encoding.encode(table.frame), table.target.values, encoding.shared(settings.shared)
    comparison = HeldOutComparison.of(table, settings) if table.is_test.any() else None
    steps = _announce([*(f"k = {k}" for k in settings.ks), POOLED, *([LOCAL] if comparison else [])], on_step)
    candidates, models = [], []
    for k in settings.ks:
        next(steps)
        model = settings.estimator(table.target, k, shared).fit(x, y, clients=table.clients)
        score = comparison.population(k) if comparison else None
        candidates.append(CandidateFit(k, model.bic_, model.aic_, model.converged_, score))
        models.append(model)
    best = min(candidates, key=lambda candidate: candidate.bic)
    model = models[candidates.index(best)]
    next(steps)
    terms = make_coefficient_table(
        model, settings.pooled(table.target).fit(x, y), table.target, encoding.terms, shared, x
    )
    scores = [best.score, comparison.pooled()] if comparison and best.score else []
    if comparison:
        next(steps)
        scores.append(comparison.local())
    _, sizes = np.unique(table.clients, return_counts=True)
    return TableFit(
        settings, table, encoding, candidates, best, model, model.clients_.tolist(), sizes.tolist(),
        np.asarray(model.memberships_).tolist(), terms, scores,
    )  # fmt: skip


def _announce(steps: list[str], on_step: OnStep | None) -> Iterator[None]:
    """Report each step when the caller asks for the next one."""
    for number, step in enumerate(steps, 1):
        if on_step is not None:
            on_step(step, number, len(steps))
        yield
