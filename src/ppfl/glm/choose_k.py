"""Choosing K and the residual effect, by held-out likelihood within clients or by BIC."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from .likelihood import HeldOutAsk, Matrix, Objective, Residual, Vector
from .newton import Asking, Effort, run, together
from .points import points_each
from .population_fit import PopulationFit
from .problem import Evaluator, Problem, population_fit, precise_log_likelihood
from .rows import RowLikelihood
from .search import Chain, Facts, Fit, Node, Starts, final_name

CRITERIA = {
    "held_out": "the held-out likelihood, and the simplest model within one standard error of the best",
    "prediction": "the highest held-out likelihood",
    "bic": "the BIC",
}
_FOLDS, _FEW_FOLDS, _MANY_ROWS = 5, 2, 50_000
_WIDEST, _WIDEST_OF_POINTS = 8, 3  # columns with correlated residual effects, without and with points for them
_LEAST_K = 3  # larger K are tried only while they predict better
_SMALL_STEP = 0.5  # of the log-likelihood; folds need no better fit
_WIDER = (0.0, 0.1, 0.2, 0.4, 0.7, 1.1, 1.6, 2.2, 3.0)  # added to the log dispersion


class Candidate(NamedTuple):
    k: int
    residual: Residual = "none"


@dataclass(frozen=True)
class Search:
    """How many starts, when to stop, and how to choose."""

    n_init: int = 1
    tol: float = 1e-6  # of the largest component of the gradient per sample
    max_iter: int = 500
    seed: int = 0
    criterion: str = "held_out"


class Choice(NamedTuple):
    """All candidates with their fits, and which is the best."""

    best: int
    candidates: list[Candidate]  # that were tried
    fits: list[Fit]
    held_out: list[float]  # totals; NaN without folds
    errors: list[float]  # standard errors of the differences from the best
    log_likelihoods: list[float]  # empty if the objective's own are good enough


DEFAULT = Search()


def choose_model(
    problem: Problem, candidates: Sequence[Candidate], search: Search = DEFAULT
) -> tuple[PopulationFit, pd.DataFrame]:
    """Fits every candidate and returns the best, with a table that has one row for each of them.

    The columns of the table are k, residual, log_likelihood, n_parameters, aic, bic, held_out, held_out_error,
    converged. With one candidate nothing is held out, and `held_out` is NaN.
    """
    with one_thread():
        return _choose_model(problem, candidates, search)


@contextmanager
def one_thread() -> Iterator[None]:
    """Chunks that fit in the cache gain nothing from a second thread, and wait for it on a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _choose_model(
    problem: Problem, candidates: Sequence[Candidate], search: Search
) -> tuple[PopulationFit, pd.DataFrame]:  # fmt: skip
    random = np.random.default_rng(search.seed)
    folds = number_of_folds(len(problem.rows.y)) if len(candidates) > 1 else 0
    if folds and search.criterion != "bic":
        problem = replace(problem, folds=draw_folds(problem.rows, folds, random))
    evaluator = Evaluator(problem)

    def exact(fit: Fit) -> float:
        return precise_log_likelihood(population_fit(problem, fit), problem.data).value

    choice = choose(evaluator, problem.facts, candidates, search, folds, exact)
    points = evaluator.state(f"fold -1 {final_name(Node(*choice.candidates[choice.best]))}")
    return population_fit(problem, choice.fits[choice.best], points), table_of(problem.facts, choice)


def choose(
    objective: Objective, facts: Facts, candidates: Sequence[Candidate], search: Search, folds: int, exact: Any = None
) -> Choice:
    """The same for one or several sites. `exact` gives precise log-likelihoods of fits for the BIC.

    Smaller K come first. The search ends when larger K predict no better, and residual effects of other kinds than the
    best with one canonical model are tried with no other K.
    """
    by_fold = folds > 0 and search.criterion != "bic" and len(candidates) > 1
    whole = Chain(facts, -1, 1.0, Effort(search.tol, search.max_iter), Starts(search.n_init - 1, search.seed))
    chains = [Chain(facts, i, 1 - 1 / folds, Effort(1e-5, 150, _SMALL_STEP)) for i in range(folds if by_fold else 0)]
    found = Choice(0, [], [], [], [], [])
    parts: list[list[Fit]] = []
    for k in sorted({candidate.k for candidate in candidates}):
        own = [each for each in candidates if each.k == k and _is_promising(each, found)]
        nodes = [Node(*candidate) for candidate in own]
        fits, *others = run(objective, together([_fit_all(chain, nodes) for chain in (whole, *chains)]))
        parts += [list(each) for each in zip(*others, strict=True)] if others else []
        found = found._replace(candidates=found.candidates + own, fits=found.fits + fits)
        if by_fold:
            found = _by_held_out(found, *held_out(objective, facts, parts), search.criterion)
            if k >= _LEAST_K and found.candidates[int(np.argmax(found.held_out))].k < k:
                break
    return found if by_fold else _by_bic(facts, found, exact)


def _is_promising(candidate: Candidate, found: Choice) -> bool:
    """Whether its residual effect is the best of those that were tried with one canonical model."""
    known = {each.residual: total for each, total in zip(found.candidates, found.held_out, strict=False) if each.k == 1}
    known.pop("none", None)
    return candidate.residual not in known or known[candidate.residual] == max(known.values())


def _by_held_out(found: Choice, totals: Vector, errors: Matrix, criterion: str) -> Choice:
    best = int(np.argmax(totals))
    held_out_error = errors[best].tolist()
    if criterion == "held_out":
        near = [i for i in range(len(totals)) if totals[best] - totals[i] <= errors[i, best]]
        best = min(near, key=lambda i: found.fits[i].layout.free_parameters)
    return found._replace(best=best, held_out=totals.tolist(), errors=held_out_error)


def _by_bic(facts: Facts, found: Choice, exact: Any) -> Choice:
    nothing = [math.nan] * len(found.fits)
    logs = []
    if len(found.fits) > 1 and exact is not None:
        logs = [exact(fit) for fit in found.fits]
        bic = [_bic(facts, fit.layout.free_parameters, log) for fit, log in zip(found.fits, logs, strict=True)]
        found = found._replace(best=int(np.argmin(bic)))
    return found._replace(held_out=nothing, errors=nothing, log_likelihoods=logs)


def _fit_all(chain: Chain, nodes: Sequence[Node]) -> Asking:
    found = []
    for node in nodes:
        found.append((yield from chain.fit(node)))
    return found


def _penalty(facts: Facts, fit: Fit) -> float:
    return facts.regularization.derivatives(fit.layout, fit.solution.vector)[0]


def _bic(facts: Facts, size: int, log: float) -> float:
    """With the number of clients as the sample size, because each client has one membership."""
    return math.log(max(2.0, facts.clients)) * size - 2 * log


def held_out(objective: Objective, facts: Facts, fits: Sequence[Sequence[Fit]]) -> tuple[Vector, Vector]:
    """Held-out log-likelihoods (C,) of candidates, and standard errors (C, C) of their differences.

    `fits` are those of every candidate to all folds. With few rows, a fit of many parameters has a dispersion that is
    too small for rows it has not seen, which would hide that its means are better. So the dispersion is made wider, by
    the one factor for all folds that suits the held-out rows best.
    """
    asks = []
    for each in fits:
        count = points_each(facts.dimensions(each[0].layout), round(facts.clients))
        asks.append(HeldOutAsk(each[0].layout, [fit.solution.vector for fit in each], count))
    if facts.regularization.samples:
        wide = [ask._replace(wider=_WIDER) for ask in asks]
        totals = objective.held_out(wide).total.reshape(len(asks), -1)
        asks = [ask._replace(wider=(_best_widening(each),)) for ask, each in zip(asks, totals, strict=True)]
    found = objective.held_out(asks)
    squares = found.products.diagonal()
    spread = squares[:, None] + squares - 2 * found.products
    spread = spread - (found.total[:, None] - found.total) ** 2 / found.clients
    return found.total, np.sqrt(np.clip(spread, 0.0, None))


def _best_widening(totals: Vector) -> float:
    """The top of the parabola through the best of the widenings that were tried and its neighbours."""
    best = int(np.argmax(totals))
    if best in (0, len(totals) - 1):
        return _WIDER[best]
    places = np.array(_WIDER[best - 1 : best + 2])
    bend, slope, _ = np.polyfit(places, totals[best - 1 : best + 2], 2)
    return float(np.clip(-slope / (2 * bend), places[0], places[2])) if bend < 0 else _WIDER[best]


def automatic(problem: Problem, ks: Sequence[int], residual: str) -> list[Candidate]:
    """The candidates of k = "auto" or several k, with residual = "auto" or one of the kinds."""
    kinds: list[Residual] = ["none"]
    if residual == "auto" and problem.has_residual:
        effects, intercept = problem.facts.layout.effects, problem.facts.layout.intercept
        kinds += ["intercept"] if intercept in effects else []
        if effects != (intercept,) and len(effects) <= (_WIDEST if problem.facts.closed_form else _WIDEST_OF_POINTS):
            kinds += ["full"]
        elif effects != (intercept,) and problem.facts.closed_form:
            kinds += ["diagonal"]
    elif residual != "auto":
        kinds = [residual]  # type: ignore[list-item]
    return [Candidate(k, kind) for k in ks for kind in kinds]


def draw_folds(rows: RowLikelihood, folds: int, random: np.random.Generator) -> Tensor:
    """The fold (n,) of every row; the rows of each client are spread evenly over the folds."""
    fold = np.empty(len(rows.y), dtype=np.int64)
    sizes = np.bincount(rows.client.numpy(), minlength=rows.n_clients)
    order = np.lexsort((random.random(len(fold)), rows.client.numpy()))
    first = np.repeat(np.cumsum(sizes) - sizes, sizes)
    shift = np.repeat(random.integers(folds, size=len(sizes)), sizes)  # so that small clients use all folds
    fold[order] = (np.arange(len(fold)) - first + shift) % folds
    return torch.from_numpy(fold)


def number_of_folds(rows: int) -> int:
    """Fewer for many rows."""
    return _FEW_FOLDS if rows > _MANY_ROWS else _FOLDS


def table_of(facts: Facts, choice: Choice) -> pd.DataFrame:
    """One row for each candidate that was tried."""
    sizes = [fit.layout.free_parameters for fit in choice.fits]
    own = [_penalty(facts, fit) - fit.solution.found.value for fit in choice.fits]
    logs = choice.log_likelihoods or own
    return pd.DataFrame(
        {
            "k": [candidate.k for candidate in choice.candidates],
            "residual": [candidate.residual for candidate in choice.candidates],
            "log_likelihood": logs,
            "n_parameters": sizes,
            "aic": [2 * size - 2 * log for size, log in zip(sizes, logs, strict=True)],
            "bic": [_bic(facts, size, log) for size, log in zip(sizes, logs, strict=True)],
            "held_out": [total / facts.samples for total in choice.held_out],
            "held_out_error": [error / facts.samples for error in choice.errors],
            "converged": [fit.solution.converged for fit in choice.fits],
        }
    )
