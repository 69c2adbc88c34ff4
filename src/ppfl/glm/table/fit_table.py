"""Fit a table: choose K, fit the canonical models, and compare their predictions with simpler models.

Coefficients, memberships and information criteria come from a fit to all rows. Held-out scores come from the same
models, fitted to the training rows only. Fits that do not converge are marked in the result, without a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from sklearn.exceptions import ConvergenceWarning

from ...data.arrays import quoted
from ...errors import DataError
from ..solvers import SelectionRecord
from .candidates import fit_candidates
from .coefficients import CoefficientTable, make_coefficient_table
from .encoding import Encoding, FormulaEncoding
from .held_out_scores import LOCAL, POOLED, HeldOutComparison, HeldOutScore, make_rows
from .prepare import PreparedTable, prepare_table
from .table_settings import TableSettings

CLEAR = 0.8  # a client with at least this share of one canonical model is clear, any other client is mixed


class TableFit(NamedTuple):
    settings: TableSettings
    table: PreparedTable
    encoding: Encoding | FormulaEncoding
    candidates: list[SelectionRecord]
    best: SelectionRecord
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
    """Fit every K, choose one, and compare with one model for all and one model per client.

    >>> import pandas as pd
    >>> random = np.random.default_rng(0)
    >>> shops = pd.DataFrame({"shop": np.repeat(np.arange(20), 12), "price": random.normal(size=240)})
    >>> shops["sold"] = np.where(shops["shop"] % 2, 3.0, -3.0) * shops["price"] + random.normal(size=240)
    >>> fitted = fit_table(shops, TableSettings("shop", "sold", ks=(1, 2)))
    >>> fitted.best.k, fitted.clear, fitted.mixed
    (2, [10, 10], 0)
    """
    table = prepare_table(frame, settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return _fit_prepared(table, settings, on_step)


def _fit_prepared(table: PreparedTable, settings: TableSettings, on_step: OnStep | None) -> TableFit:
    encoding, target = table.encoding, table.target
    if table.features and not encoding.terms:
        raise DataError(f"column {quoted(table.features)} has one value; name other columns")
    rows, shared = make_rows(table, encoding), encoding.shared(settings.shared)
    comparison = HeldOutComparison.of(table, settings) if table.is_test.any() else None
    tried = ", ".join(map(str, settings.candidates(len(np.unique(table.clients)))))
    parts = [f"k = {tried}", POOLED]
    parts += ["held-out rows"] if comparison else []
    parts += [LOCAL] if comparison and comparison.has_local else []
    steps = _announce(parts, on_step)
    next(steps)
    model, candidates = fit_candidates(table, settings, rows, shared)
    best = next(candidate for candidate in candidates if candidate.k == model.k_)
    next(steps)
    pooled = rows.fit_pooled(settings.pooled(target, intercept=encoding.intercept))
    terms = make_coefficient_table(
        model, pooled, target, encoding.terms, shared, rows.x, intercept=encoding.intercept, offset=rows.offset
    )
    scores = []
    if comparison:
        next(steps)
        scores += [comparison.population(best.k), comparison.pooled()]
    if comparison and comparison.has_local:
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
