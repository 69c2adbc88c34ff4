"""Three ways to fit a table of clients: one model for all, one for each, and a population."""

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
MANY = 3000  # rows, of which one quarter set aside says enough


class Answer(NamedTuple):
    mean: Array  # of the test rows: expectation, or probability
    seconds: float  # of the processor, as all seconds here: other work on the machine does not count


class Candidate(NamedTuple):
    k: int
    differing: str  # what clients differ in: "all" columns, "slopes" as the mixed model's, or the "intercept"
    ridge: float
    aside: float  # score of training rows set aside, predicted by fits without them: what chooses
    seconds: float


class Chosen(NamedTuple):
    best: Candidate
    score: float  # on the test rows, fitted to all training rows
    converged: bool
    alone: float  # seconds of this fit
    seconds: float  # of it and all candidates
    candidates: list[Candidate]


def score(table: Table, mean: Array) -> float:
    """Root mean squared error for the gaussian family, mean deviance for all others."""
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


def _fitted(table: Table, k: int, shared: Any, ridge: float = 1.0) -> Any:
    more = {} if table.situations is None else {"situations": table.situations}
    model = ESTIMATORS[table.family](k, shared=shared, ridge=ridge, random_state=0)
    return model.fit(table.x, table.y, clients=table.clients, **more)


def _predicted(model: Any, table: Table) -> Array:
    if table.situations is not None:
        return model.predict_proba(table.x, table.situations, clients=table.clients)
    if table.family == "bernoulli":
        return model.predict_proba(table.x, clients=table.clients)[:, 1]
    return model.predict(table.x, clients=table.clients)


def pooled(train: Table, test: Table) -> Answer:
    start = time.process_time()
    model = _fitted(train, 1, None)
    return Answer(_predicted(model, test), time.process_time() - start)


def population(train: Table, test: Table) -> Chosen:
    """K and what clients share are chosen by rows set aside, then the ridge as `own` chooses its own."""
    start = time.process_time()
    parts = _set_aside(train)
    ways = _ways_to_differ(train)
    candidates: list[Candidate] = []

    def attempt(k: int, differing: str, ridge: float) -> None:
        begun = time.process_time()
        aside = _score_aside(
            train, parts, lambda first, last: _predicted(_fitted(first, k, ways[differing], ridge), last)
        )
        seconds = (time.process_time() - begun) / len(parts)
        candidates.append(Candidate(k, differing, ridge, aside, seconds))
        print(f"    {candidates[-1]}", flush=True)

    for k in range(1, LARGEST_K + 1):
        for differing in ways if k > 1 else ["all"]:
            attempt(k, differing, 1.0)
    best = min(candidates, key=lambda c: c.aside)
    for ridge in (10.0, 100.0):
        attempt(best.k, best.differing, ridge)
    best = min(candidates, key=lambda c: c.aside)
    begun = time.process_time()
    model = _fitted(train, best.k, ways[best.differing], best.ridge)
    alone = time.process_time() - begun
    found = score(test, _predicted(model, test))
    return Chosen(best, found, model.converged_, alone, time.process_time() - start, candidates)


def _set_aside(table: Table) -> list[Array]:
    """Marks of training rows to set aside: every client's in ten parts, or where there are many a quarter once."""
    if len(table.y) > MANY:
        return [held_out(table, 0.25, seed=0)]
    random = np.random.default_rng(0)
    part = np.full(len(table.y), -1)
    for rows in table.rows_of().values():
        if len(rows) > 1:  # or nothing would be left of the client
            part[random.permutation(rows)] = (np.arange(len(rows)) + random.integers(10)) % 10
    return [part == at for at in range(10)]


def _score_aside(table: Table, parts: list[Array], predicted: Callable[[Table, Table], Array]) -> float:
    """Of all rows that were set aside, together."""
    mean = np.zeros(len(table.y))
    for aside in parts:
        mean[aside] = predicted(table.take(~aside), table.take(aside))
    seen = np.any(parts, 0)
    return score(table.take(seen), mean[seen])


def _ways_to_differ(table: Table) -> dict[str, Any]:
    """With the setting `shared` that makes it so."""
    if table.family == "choice":  # has no intercept, and all columns vary
        return {"all": None}
    constant = [at for at in range(table.x.shape[1]) if at not in table.slopes]
    middle = {"slopes": constant} if 0 < len(constant) < table.x.shape[1] else {}
    return {"all": None, **middle, "intercept": "all"}


# ---------------------------------------------------------------------- one model for each


def own(train: Table, test: Table) -> Answer:
    """A ridge for all clients of a table, chosen by training rows set aside."""
    start = time.process_time()
    parts = _set_aside(train)
    ridge = min(
        RIDGES, key=lambda ridge: _score_aside(train, parts, lambda first, last: _own_means(first, last, ridge))
    )
    return Answer(_own_means(train, test, ridge), time.process_time() - start)


def _own_means(train: Table, test: Table, ridge: float) -> Array:
    mean, known = np.zeros(len(test.y)), train.rows_of()
    for client, rows in test.rows_of().items():
        mean[rows] = _own_mean(train.take(known[client]), test.take(rows), ridge, float(train.y.mean()))
    return mean


def _own_mean(train: Table, test: Table, ridge: float, everybody: float) -> Array:
    """Where all targets of a client are alike there is nothing to fit, and one row of everybody's mean is added."""
    if train.family == "choice":
        alone = PopulationChoice(1, ridge=ridge).fit(train.x, train.y, train.situations)
        return alone.predict_proba(test.x, test.situations)
    if len(np.unique(train.y)) == 1:
        return np.full(len(test.y), (train.y.sum() + everybody) / (len(train.y) + 1))
    x, unseen = train.x.to_numpy(), test.x.to_numpy()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a client whose fit stops early has what it has
        if train.family == "bernoulli":
            return LogisticRegression(C=1 / ridge, max_iter=1000).fit(x, train.y).predict_proba(unseen)[:, 1]
        if train.family == "poisson":
            return PoissonRegressor(alpha=ridge / len(x), max_iter=1000).fit(x, train.y).predict(unseen)
        return Ridge(alpha=ridge).fit(x, train.y).predict(unseen)
