"""Clients that were never seen in training: what a run's models are worth to them, before and after they adapt.

A newcomer does what any client does in a round, with the trained server's state and its own training samples, and
what it would upload is thrown away: nobody's models change. By the contract that is all it takes, for every method.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ..algorithms.batches import id_keys
from ..algorithms.contract import Algorithm, Problem, Tree, field_of, with_fields
from ..algorithms.descent import LocalTraining
from ..core.draws import uniform
from ..core.errors import SettingError
from ..data import Federation
from .chunks import Engine
from .evaluate import Evaluation, evaluate
from .train import State, pose

ROUNDS = 5  # memberships that start evenly need a few


class Welcome(NamedTuple):
    """Scores of newcomers on their own test data."""

    before: Evaluation  # as they come
    after: Evaluation  # after a few rounds of their own


def part_newcomers(federation: Federation, fraction: float, seed: int) -> tuple[Federation, Federation | None]:
    """Clients to train with, and newcomers, drawn by their ids."""
    if fraction == 0:
        return federation, None
    new = (uniform(seed, "newcomers", id_keys(federation.ids)) < fraction).tolist()
    known, unknown = (
        [c for c, is_new in zip(federation.ids, new, strict=True) if is_new == one] for one in (False, True)
    )
    if not known or not unknown:
        raise SettingError(
            f"newcomers = {fraction} leaves {len(known)} clients to train with and {len(unknown)} newcomers "
            f"of {federation.n_clients}; choose a fraction that leaves some of both"
        )
    return federation.select(known), federation.select(unknown)


def welcome(
    algorithm: Algorithm, problem: Problem, state: State, newcomers: Federation, engine: Engine, rounds: int = ROUNDS
) -> Welcome:
    """Score newcomers with a trained state."""
    theirs = pose(problem.population, newcomers, None, problem.rounds, problem.seed)
    algorithm = _with_everyone(algorithm)
    fresh, clients = algorithm.init(theirs)
    server = _with_rows(algorithm, state.server, fresh)

    def score() -> Evaluation:
        return evaluate(theirs, algorithm.personal(server, clients), newcomers)

    before = score()
    for round in range(problem.rounds - rounds, problem.rounds):
        plan = algorithm.plan(theirs, server, max(round, 1))
        outcome = engine.run(algorithm, theirs, newcomers, plan, clients, max(round, 1))
        merged = algorithm.merge(theirs, server, plan, outcome.totals, outcome.rows)
        server, clients = _with_rows(algorithm, server, merged), outcome.clients
    return Welcome(before, score())


def _with_everyone(algorithm: Algorithm) -> Algorithm:
    return algorithm.model_copy(update={"participation": 1.0}) if isinstance(algorithm, LocalTraining) else algorithm


def _with_rows(algorithm: Algorithm, server: Any, rows_of: Any) -> Tree:
    """A server state with what another one knows client by client."""
    return with_fields(server, {name: field_of(rows_of, name) for name in algorithm.by_client})
