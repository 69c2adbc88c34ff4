"""A fitted table, for the command line: choose K, fit the canonical models, and compare their predictions with simpler
models.

Coefficients, memberships and information criteria come from a fit to all rows. Held-out scores come from the same
models, fitted to the training rows only. Fits that do not converge are marked in the result, without a warning.
"""

from __future__ import annotations

import csv
import io
import json
import math
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np
import torch
from sklearn.exceptions import ConvergenceWarning

from ..core.simplex import CLEAR
from ..data.arrays import quoted
from ..errors import DataError
from .choose_k import CRITERIA
from .columns import Array
from .formula import INTERCEPT
from .local_models import MODELS, LocalModels
from .table_data import FAMILIES, Encoding, PreparedTable, TableSettings, Target, prepare_table

__all__ = [
    "CLEAR", "CRITERIA", "FAMILIES", "Candidate", "CoefficientRow", "CoefficientTable", "HeldOutScore", "OnStep",
    "TableFit", "TableSettings", "file_contents", "fit_table", "prepare_table",
]  # fmt: skip
POOLED, LOCAL, AVERAGE = "one model for all", "a model for each client", "an average row"
MEMBERSHIPS, COEFFICIENTS, RESULT = "memberships.csv", "coefficients.csv", "result.json"

OnStep = Callable[[str, int, int], None]  # called with the name, the number and the total number of steps


class Candidate(NamedTuple):
    """A model that was tried."""

    k: int
    residual: str
    log_likelihood: float
    aic: float
    bic: float
    held_out: float | None  # mean log-likelihood of a held-out row, given its client's other rows
    held_out_error: float | None  # standard error of the difference to the best
    converged: bool

    @property
    def name(self) -> str:
        """Such as "2", or "1 + intercept" with a residual effect."""
        return str(self.k) if self.residual == "none" else f"{self.k} + {self.residual}"


class CoefficientRow(NamedTuple):
    """The coefficients of one column, in the units of the table."""

    outcome: str  # the class or target of this predictor
    name: str
    values: list[float]  # of the canonical models, the largest share first
    pooled: float  # of one model for all
    is_shared: bool = False
    reach: list[float] | None = None  # change of each predictor per standard deviation of the column
    pooled_reach: float = 0.0


class CoefficientTable(NamedTuple):
    """The coefficients of all columns, and what they say of an average row."""

    # predictions for a row with the mean of every column; their reach is the difference to the pooled model
    average: list[CoefficientRow]
    coefficients: list[CoefficientRow]


class HeldOutScore(NamedTuple):
    """The held-out scores of one method."""

    label: str
    figures: dict[str, float]  # metric -> value, the main metric first
    seconds: float  # to fit and to predict


class TableFit(NamedTuple):
    """A fitted table."""

    settings: TableSettings
    table: PreparedTable
    encoding: Encoding
    candidates: list[Candidate]
    best: Candidate
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
    rows, shared = _Rows.of(table, encoding), encoding.shared(settings.shared)
    comparison = _HeldOut.of(table, settings) if table.is_test.any() else None
    tried = settings.ks if isinstance(settings.ks, str) else ", ".join(map(str, sorted(settings.ks)))
    parts = [f"k = {tried}", POOLED]
    parts += ["held-out rows"] if comparison else []
    parts += [LOCAL] if comparison and comparison.has_local else []
    steps = _announce(parts, on_step)
    next(steps)
    model = rows.fit(settings.estimator(target, settings.k, shared, intercept=encoding.intercept,
                                        residual=settings.residual))  # fmt: skip
    candidates = _candidates(model)
    best = next(one for one in candidates if (one.k, one.residual) == (model.k_, model.residual_))
    next(steps)
    pooled = rows.pooled().fit(settings.pooled(target, intercept=encoding.intercept))
    terms = _coefficient_table(model, pooled, target, encoding, shared, rows)
    scores = []
    if comparison:
        next(steps)
        scores += [comparison.population(best), comparison.pooled()]
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


def _candidates(model: Any) -> list[Candidate]:
    own: dict[str, Any]
    if model.selection_.empty:  # with a penalty
        own = {"k": model.k_, "residual": model.residual_, "log_likelihood": model.log_likelihood_}
        return [Candidate(**own, aic=model.aic_, bic=model.bic_, held_out=None, held_out_error=None,
                          converged=bool(model.converged_))]  # fmt: skip
    found = []
    for row in model.selection_.to_dict("records"):
        scores: dict[str, Any] = {
            name: None if math.isnan(row[name]) else float(row[name]) for name in ("held_out", "held_out_error")
        }
        numbers: dict[str, Any] = {name: float(row[name]) for name in ("log_likelihood", "aic", "bic")}
        own = {"k": int(row["k"]), "residual": str(row["residual"]), "converged": bool(row["converged"])}
        found.append(Candidate(**own, **numbers, **scores))
    return found


class _Rows(NamedTuple):
    """Rows as the estimators take them."""

    x: Array
    y: Array
    clients: Any
    offset: Array | None

    @classmethod
    def of(cls, table: PreparedTable, encoding: Encoding) -> _Rows:
        """All rows of the table, encoded."""
        return cls(encoding.encode(table.frame), table.target.values, table.clients, table.offset())

    def subset(self, rows: Array) -> _Rows:
        offset = None if self.offset is None else self.offset[rows]
        return _Rows(self.x[rows], self.y[rows], self.clients[rows], offset)

    def pooled(self) -> _Rows:
        """Without clients; or those of one client, as estimators take a table without columns only with clients."""
        return self._replace(clients=None if self.x.shape[1] else np.zeros(len(self.y)))

    def fit(self, model: Any) -> Any:
        return model.fit(self.x, self.y, clients=self.clients, offset=self.offset)

    def predict(self, model: Any) -> Array:
        """Means (n,) or class probabilities (n, classes)."""
        predict = model.predict_proba if hasattr(model, "predict_proba") else model.predict
        means: Array = predict(self.x, self.clients, offset=self.offset)
        return means


# ---------------------------------------------------------------------- held-out rows


class _HeldOut(NamedTuple):
    """Training and held-out rows, encoded with the levels of the training rows."""

    table: PreparedTable
    settings: TableSettings
    encoding: Encoding
    train: _Rows
    test: _Rows

    @classmethod
    def of(cls, table: PreparedTable, settings: TableSettings) -> _HeldOut:
        encoding = table.encoding_of(~table.is_test)
        rows = _Rows.of(table, encoding)
        return cls(table, settings, encoding, rows.subset(~table.is_test), rows.subset(table.is_test))

    @property
    def has_local(self) -> bool:
        """Whether there is a model for each client to compare with: they have no offset, and not all families."""
        return self.table.target.family in MODELS and self.train.offset is None and self.encoding.intercept

    def population(self, best: Candidate) -> HeldOutScore:
        def predict() -> Array:
            shared = self.encoding.shared(self.settings.shared)
            residual = None if best.residual == "none" else best.residual
            model = self.settings.estimator(
                self.table.target, best.k, shared, intercept=self.encoding.intercept, residual=residual
            )
            return self.test.predict(self.train.fit(model))

        effect = "" if best.residual == "none" else " and a residual effect"
        return self._score(f"{best.k} canonical model{'s' * (best.k > 1)}{effect}", predict)

    def pooled(self) -> HeldOutScore:
        return self._score(POOLED, lambda: self._pooled_means(self.test))

    def local(self) -> HeldOutScore:
        def predict() -> Array:
            family, train = self.table.target.family, self.train
            models = LocalModels(family, train.x, train.y, train.clients, self._noise())
            return models.predict(self.test.x, self.test.clients)

        return self._score(LOCAL, predict)

    def _pooled_means(self, rows: _Rows) -> Array:
        model = self.settings.pooled(self.table.target, intercept=self.encoding.intercept)
        return rows.pooled().predict(self.train.pooled().fit(model))

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


# ---------------------------------------------------------------------- coefficients


def _coefficient_table(
    model: Any, pooled: Any, target: Target, encoding: Encoding, shared: Any, rows: _Rows
) -> CoefficientTable:
    """The coefficients of the canonical models, column by column, next to those of one model for all."""
    aligned = [_align(fitted) for fitted in (model, pooled)]
    slopes = np.concatenate([part[0] for part in aligned])  # (K + 1, m, d), the pooled one last
    intercepts = np.concatenate([part[1] for part in aligned])  # (K + 1, m)
    predictor = intercepts + slopes @ rows.x.mean(0) + (0.0 if rows.offset is None else rows.offset.mean())
    means = np.concatenate([_means(target, predictor[:-1], model), _means(target, predictor[-1:], pooled)])
    shown = means[:, 1:] if target.family == "bernoulli" else means
    names, spread = encoding.terms, rows.x.std(0)
    fixed = set(names) if shared == "all" else {each if isinstance(each, str) else names[each] for each in shared or ()}
    average, coefficients = [], []
    for i, outcome in enumerate(target.outcomes):
        difference = (predictor[:, i] - predictor[-1, i]).tolist()
        average.append(CoefficientRow(outcome, AVERAGE, *_split(shown[:, i]), reach=difference[:-1]))
        if encoding.intercept:
            row = CoefficientRow(outcome, INTERCEPT, *_split(intercepts[:, i]), is_shared=INTERCEPT in fixed)
            coefficients.append(row)
        for column, name in enumerate(names):
            slope = slopes[:, i, column]
            *reach, pooled_reach = (slope * spread[column]).tolist()
            coefficients.append(CoefficientRow(outcome, name, *_split(slope), name in fixed, reach, pooled_reach))
    return CoefficientTable(average, coefficients)


def _align(model: Any) -> tuple[Array, Array]:
    """Slopes (K, m, d) and intercepts (K, m), centred over three or more classes, as only differences matter."""
    slopes, intercepts = model.canonical_coef_, model.canonical_intercept_
    if slopes.ndim == 2:
        return slopes[:, None], intercepts[:, None]
    return slopes - slopes.mean(1, keepdims=True), intercepts - intercepts.mean(1, keepdims=True)


def _means(target: Target, predictor: Array, model: Any) -> Array:
    """Means or class probabilities of these predictors, with the nuisance parameters of a fitted model."""
    family, nuisance = target.make_family(), model.fit_.parameters.nuisance
    means: Array = family.mean(family.mean_parameters(torch.tensor(predictor)), nuisance).numpy()
    return means.reshape(len(predictor), -1)


def _split(values: Array) -> tuple[list[float], float]:
    """Those of the canonical models, and the pooled one."""
    *canonical, pooled = values.tolist()
    return canonical, pooled


# ---------------------------------------------------------------------- files


def file_contents(fitted: TableFit, names: Sequence[str], about: dict[str, Any]) -> dict[str, str]:
    """Contents by file name. `names` are those of the canonical models, and `about` comes first in the result."""
    members = zip(fitted.ids, fitted.sizes, fitted.memberships, strict=True)
    rows = [[client, size, *membership] for client, size, membership in members]
    coefficients = [
        [row.outcome, row.name, "yes" if row.is_shared else "no", *row.values, row.pooled]
        for row in fitted.terms.coefficients
    ]
    return {
        MEMBERSHIPS: _csv(["client", "rows", *names], rows),
        COEFFICIENTS: _csv(["outcome", "term", "shared", *names, "pooled"], coefficients),
        RESULT: json.dumps(about | _result(fitted, names), indent=1, ensure_ascii=False) + "\n",
    }


def _result(fitted: TableFit, names: Sequence[str]) -> dict[str, Any]:
    table = fitted.table
    return {
        "settings": asdict(fitted.settings),
        "rows": len(table.frame),
        "rows_left_out": table.incomplete,
        "clients_left_out": list(table.lost),
        "bad_cells": [cells._asdict() for cells in table.bad_cells],
        "clients": len(fitted.ids),
        "family": table.target.family,
        "family_guessed": bool(table.target.reason),
        "classes": list(table.target.classes),
        "terms": fitted.encoding.terms,
        "columns_left_out": table.left_out,
        "k": fitted.best.k,
        "residual": fitted.best.residual,
        "tried": [one._asdict() for one in fitted.candidates],
        "shares": dict(zip(names, fitted.shares, strict=True)),
        "clear_from": CLEAR,
        "clear": dict(zip(names, fitted.clear, strict=True)),
        "mixed": fitted.mixed,
        "held_out_rows": int(table.is_test.sum()),
        "held_out": {score.label: score.figures for score in fitted.scores},
        "seconds": {score.label: score.seconds for score in fitted.scores},
    }


def _csv(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(rows)
    return text.getvalue()
