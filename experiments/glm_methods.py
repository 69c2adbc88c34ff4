"""Ways to fit a table with a client column: one model for all, one model per client, and a population."""

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
MANY_ROWS = 3000  # for more rows, one validation split replaces cross-validation


class MethodPredictions(NamedTuple):
    mean: Array  # expectations or probabilities for the test rows
    seconds: float  # processor time, like all times here, so that other work on the machine does not count


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


# ---------------------------------------------------------------------- validation on training rows


def validation_splits(table: Table) -> list[Array]:
    """Masks of validation rows: five parts of every client's rows, or for many rows one quarter."""
    if len(table.y) > MANY_ROWS:
        return [held_out(table, 0.25, seed=0)]
    random = np.random.default_rng(0)
    part = np.full(len(table.y), -1)
    for rows in table.rows_by_client().values():
        if len(rows) > 1:  # a client with one row keeps it for training
            part[random.permutation(rows)] = (np.arange(len(rows)) + random.integers(5)) % 5
    return [part == i for i in range(5)]


def validation_score(table: Table, splits: list[Array], predict: Callable[[Table, Table], Array]) -> float:
    """The score over the validation rows of all splits."""
    mean = np.zeros(len(table.y))
    for validation in splits:
        mean[validation] = predict(table.take(~validation), table.take(validation))
    predicted = np.any(splits, 0)
    return score(table.take(predicted), mean[predicted])


# ---------------------------------------------------------------------- one model for all, and a population

ESTIMATORS: dict[str, Callable[..., Any]] = {
    "gaussian": PopulationRegressor,
    "bernoulli": PopulationClassifier,
    "poisson": lambda k, family="poisson", **more: PopulationRegressor(k, family=family, **more),
    "choice": PopulationChoice,
}


def fit(table: Table, k: Any, **settings: Any) -> Any:
    more = {} if table.situations is None else {"situations": table.situations}
    model = ESTIMATORS[table.family](k, random_state=0, **settings)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whether a fit converged is in the results
        return model.fit(table.x, table.y, clients=table.clients, **more)


def predict(model: Any, table: Table) -> Array:
    if table.situations is not None:
        return model.predict_proba(table.x, table.situations, clients=table.clients)
    if table.family == "bernoulli":
        return model.predict_proba(table.x, clients=table.clients)[:, 1]
    return model.predict(table.x, clients=table.clients)


def pooled(train: Table, test: Table) -> MethodPredictions:
    start = time.process_time()
    model = fit(train, 1)
    return MethodPredictions(predict(model, test), time.process_time() - start)


def candidate_settings(table: Table) -> dict[str, dict[str, Any]]:
    """What clients may differ in, with the settings of the estimator; for counts with and without overdispersion."""
    constant = [i for i in range(table.x.shape[1]) if i not in table.slopes]
    shared = {"all": None, "intercept": "all"}
    if 0 < len(constant) < table.x.shape[1]:
        shared["slopes"] = constant
    found = {name: {"shared": columns} for name, columns in shared.items()}
    if table.family == "poisson":
        found |= {f"{name}, nb": {**settings, "family": "negative binomial"} for name, settings in found.items()}
    return found


def fit_auto(table: Table, choose: str = "held_out", **settings: Any) -> tuple[Any, float]:
    """A fit that chooses K itself, and the held-out log-likelihood per training row with that K."""
    model = fit(table, "auto", choose=choose, **settings)
    k = model.memberships_.shape[1]
    return model, next(float(record.held_out) for record in model.selection_ if record.k == k)


def ours(train: Table, test: Table) -> dict[str, Any]:
    """One call that chooses K for each setting; the setting with the smallest AIC is used, as for the mixed models."""
    candidates = candidate_settings(train)
    tried: dict[str, Any] = {}
    models: dict[str, Any] = {}
    for name, settings in candidates.items():
        start = time.process_time()
        models[name] = fit(train, "auto", choose="prediction", **settings)
        tried[name] = {
            "k": int(models[name].memberships_.shape[1]), "aic": models[name].aic_,
            "seconds": time.process_time() - start, "score": score(test, predict(models[name], test)),
        }  # fmt: skip
    best = min(tried, key=lambda name: tried[name]["aic"])
    start = time.process_time()
    fit(train, min(3, train.n_clients), **candidates[best])
    return {
        **tried[best], "differing": best, "converged": bool(models[best].converged_),
        "alone": time.process_time() - start, "choice": sum(one["seconds"] for one in tried.values()),
        "clients": describe_clients(models[best]), "tried": tried,
    }  # fmt: skip


def describe_clients(model: Any) -> str:
    """The shares of the canonical models, and how many clients belong to one of them almost alone."""
    memberships = np.asarray(model.memberships_)
    if memberships.shape[1] == 1:
        return "one model for all"
    shares = ", ".join(f"{share:.0%}" for share in np.sort(memberships.mean(0))[::-1])
    return f"shares {shares}; {(memberships.max(1) > 0.8).mean():.0%} of clients are over 80 % one model"


# ---------------------------------------------------------------------- one model per client


def own(train: Table, test: Table) -> MethodPredictions:
    """One GLM per client, with the same ridge for all of them, chosen by validation."""
    start = time.process_time()
    splits = validation_splits(train)
    ridge = min(
        RIDGES, key=lambda ridge: validation_score(train, splits, lambda first, last: _own_means(first, last, ridge))
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
