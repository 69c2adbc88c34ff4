"""The training loop: plan, work, merge, again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree

from ..algorithms.contract import Algorithm, Problem, Tree, field_of, with_fields
from ..core.affinity import Affinity, nothing
from ..core.population import Population
from ..data import Federation
from .chunks import Engine
from .ranks import Ranks


class State(NamedTuple):
    """All there is to a run between two rounds."""

    round: int  # rounds done
    server: Tree
    clients: Tree  # leaves (M, ...)


class Report(NamedTuple):
    """What a round did and cost."""

    round: int  # from 1
    loss: float  # mean training loss met by the clients on the way
    participants: int
    bytes_up: int
    bytes_down: int
    seconds: float


def pose(population: Population, federation: Federation, affinity: Affinity | None, rounds: int, seed: int) -> Problem:
    """The problem as the server knows it; refuses a network or an affinity that does not fit the federation."""
    train = federation.train
    population.to(train.x.device).fit_to(train.x[:2], train.y, federation.n_classes)
    pull = nothing(federation.ids) if affinity is None else affinity.check(federation.ids)
    number = train.x.dtype if train.x.is_floating_point() else federation.weights.dtype
    weights = federation.weights.to(train.x.device, number)
    return Problem(population, federation.ids, weights, pull.to(train.x.device), rounds, seed)


def whole(algorithm: Algorithm, state: State, federation: Federation, ranks: Ranks) -> State:
    """A state with every client's rows, wherever they are; all processes ask together."""
    if ranks.size == 1:
        return state

    def gather(leaf: Tensor) -> Tensor:
        return ranks.gather(leaf, federation.train.sizes)

    server = with_fields(state.server, {name: gather(field_of(state.server, name)) for name in algorithm.by_client})
    return State(state.round, server, pytree.tree_map(gather, state.clients))


def begin(algorithm: Algorithm, problem: Problem) -> State:
    """The state before the first round."""
    algorithm.check(problem)
    server, clients = algorithm.init(problem)
    return State(0, server, clients)


def train(
    algorithm: Algorithm, problem: Problem, federation: Federation, engine: Engine, state: State
) -> Iterator[tuple[State, Report]]:
    """From `state` to the last round, one state a round; the same bits wherever it is stopped and taken up."""
    while state.round < problem.rounds:
        clock = time.perf_counter()
        plan = algorithm.plan(problem, state.server, state.round)
        outcome = engine.run(algorithm, problem, federation, plan, state.clients, state.round)
        server = algorithm.merge(problem, state.server, plan._replace(who=outcome.who), outcome.totals, outcome.rows)
        state = State(state.round + 1, server, outcome.clients)
        yield (
            state,
            Report(
                state.round,
                outcome.loss,
                len(plan.who),
                outcome.bytes_up,
                outcome.bytes_down,
                time.perf_counter() - clock,
            ),
        )
