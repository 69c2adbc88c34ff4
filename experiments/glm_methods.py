"""Three ways to fit a table with a client column: one model for all, one model per client, and a population."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from glm_data import Array, Table, held_out
from sklearn.linear_model import LogisticRegression, PoissonRegressor, Ridge

from ppfl.glm import PopulationChoice, PopulationClassifier, PopulationRegressor

RIDGES = (0.1, 1.0, 10.0, 100.0)
LARGEST_K = 4
MANY_ROWS = 3000  # for more rows, one validation split replaces cross-validation


class MethodPredictions(NamedTuple):
    mean: Array  # expectations or probabilities for the test rows
    seconds: float  # processor time, like all times here, so that other work on the machine does not count


class Candidate(NamedTuple):
    k: int
    differing: str  # clients differ in "all" columns, in the mixed model's "slopes", or in the "intercept"
    ridge: float
    validation: float  # score on training rows that the fit did not see; the smallest is chosen
    seconds: float


class Chosen(NamedTuple):
    best: Candidate
    score: float  # on the test rows, after a fit to all training rows
    converged: bool
    alone: float  # seconds of the chosen fit
    seconds: float  # of the chosen fit and all candidates
    candidates: list[Candidate]


def score(table: Table, mean: Array) -> float:
    """Root mean squared error for the gaussian family, mean deviance for the others."""
    y = table.y
    if table.family == "gaussian":
        return float(np.sqrt(np.mean((mean - y) ** 2)))
    mean = np.clip(mean, 1e-12, None)
    if table.family == "choice":
        return float(-2 * np.log(mean[y == 1]).mean())
    if table.family == "bernoulli":
        return float(-2 * np.log(np.clip(np.where(y == 1, mean, 1 - mean), 1e-12, 1)).mean())
    return float(2 * np.mean(np.where(y > 0, y * np.log(np.maximum(y, 1) / mean), 0.0) - (y - mean)))


# ---------------------------------------------------------------------- one model for all, and a population

ESTIMATORS: dict[str, Callable[..., Any]] = {
    "gaussian": PopulationRegressor,
    "bernoulli": PopulationClassifier,
    "poisson": lambda k, **more: PopulationRegressor(k, family="poisson", **more),
    "choice": PopulationChoice,
}


def _fit(table: Table, k: int, shared: Any, ridge: float = 1.0) -> Any:
    more = {} if table.situations is None else {"situations": table.situations}
    model = ESTIMATORS[table.family](k, shared=shared, ridge=ridge, random_state=0)
    return model.fit(table.x, table.y, clients=table.clients, **more)


def _predict(model: Any, table: Table) -> Array:
    if table.situations is not None:
        return model.predict_proba(table.x, table.situations, clients=table.clients)
    if table.family == "bernoulli":
        return model.predict_proba(table.x, clients=table.clients)[:, 1]
    return model.predict(table.x, clients=table.clients)


def pooled(train: Table, test: Table) -> MethodPredictions:
    start = time.process_time()
    model = _fit(train, 1, None)
    return MethodPredictions(_predict(model, test), time.process_time() - start)


def population(train: Table, test: Table) -> Chosen:
    """Choose K and the shared columns by validation, then the ridge."""
    start = time.process_time()
    splits = _validation_splits(train)
    settings = _shared_settings(train)
    candidates: list[Candidate] = []

    def attempt(k: int, differing: str, ridge: float) -> None:
        begun = time.process_time()
        validation = _validation_score(
            train, splits, lambda first, last: _predict(_fit(first, k, settings[differing], ridge), last)
        )
        seconds = (time.process_time() - begun) / len(splits)
        candidates.append(Candidate(k, differing, ridge, validation, seconds))
        print(f"    {candidates[-1]}", flush=True)

    for k in range(1, LARGEST_K + 1):
        for differing in settings if k > 1 else ["all"]:
            attempt(k, differing, 1.0)
    best = min(candidates, key=lambda c: c.validation)
    for ridge in (10.0, 100.0):
        attempt(best.k, best.differing, ridge)
    best = min(candidates, key=lambda c: c.validation)
    begun = time.process_time()
    model = _fit(train, best.k, settings[best.differing], best.ridge)
    alone = time.process_time() - begun
    found = score(test, _predict(model, test))
    return Chosen(best, found, model.converged_, alone, time.process_time() - start, candidates)


def _validation_splits(table: Table) -> list[Array]:
    """Masks of validation rows: ten parts of every client's rows, or for many rows one quarter."""
    if len(table.y) > MANY_ROWS:
        return [held_out(table, 0.25, seed=0)]
    random = np.random.default_rng(0)
    part = np.full(len(table.y), -1)
    for rows in table.rows_by_client().values():
        if len(rows) > 1:  # a client with one row keeps it for training
            part[random.permutation(rows)] = (np.arange(len(rows)) + random.integers(10)) % 10
    return [part == i for i in range(10)]


def _validation_score(table: Table, splits: list[Array], predict: Callable[[Table, Table], Array]) -> float:
    """The score over the validation rows of all splits."""
    mean = np.zeros(len(table.y))
    for validation in splits:
        mean[validation] = predict(table.take(~validation), table.take(validation))
    predicted = np.any(splits, 0)
    return score(table.take(predicted), mean[predicted])


def _shared_settings(table: Table) -> dict[str, Any]:
    """From what clients differ in to the setting `shared` of the estimator."""
    if table.family == "choice":  # has no intercept, and all columns vary
        return {"all": None}
    constant = [i for i in range(table.x.shape[1]) if i not in table.slopes]
    middle = {"slopes": constant} if 0 < len(constant) < table.x.shape[1] else {}
    return {"all": None, **middle, "intercept": "all"}


# ---------------------------------------------------------------------- one model per client


def own(train: Table, test: Table) -> MethodPredictions:
    """One GLM per client, with the same ridge for all of them, chosen by validation."""
    start = time.process_time()
    splits = _validation_splits(train)
    ridge = min(
        RIDGES, key=lambda ridge: _validation_score(train, splits, lambda first, last: _own_means(first, last, ridge))
    )
    return MethodPredictions(_own_means(train, test, ridge), time.process_time() - start)


def _own_means(train: Table, test: Table, ridge: float) -> Array:
    mean, known = np.zeros(len(test.y)), train.rows_by_client()
    for client, rows in test.rows_by_client().items():
        mean[rows] = _own_mean(train.take(known[client]), test.take(rows), ridge, float(train.y.mean()))
    return mean


def _own_mean(train: Table, test: Table, ridge: float, overall: float) -> Array:
    """If all targets of a client are equal, the prediction is their mean with one more row at the overall mean."""
    if train.family == "choice":
        alone = PopulationChoice(1, ridge=ridge).fit(train.x, train.y, train.situations)
        return alone.predict_proba(test.x, test.situations)
    if len(np.unique(train.y)) == 1:
        return np.full(len(test.y), (train.y.sum() + overall) / (len(train.y) + 1))
    x, unseen = train.x.to_numpy(), test.x.to_numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a fit that does not converge is used as it is
        if train.family == "bernoulli":
            return LogisticRegression(C=1 / ridge, max_iter=1000).fit(x, train.y).predict_proba(unseen)[:, 1]
        if train.family == "poisson":
            return PoissonRegressor(alpha=ridge / len(x), max_iter=1000).fit(x, train.y).predict(unseen)
        return Ridge(alpha=ridge).fit(x, train.y).predict(unseen)
