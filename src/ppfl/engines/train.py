"""The training loop: plan, work, merge, again."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor
from torch.utils import _pytree as pytree

from ..algorithms.batches import id_keys
from ..algorithms.contract import Algorithm, Plan, Problem, Tree, field_of, with_fields
from ..core.affinity import Affinity, nothing
from ..core.draws import uniform
from ..core.errors import SettingError
from ..core.population import Population
from ..data import Federation
from .chunks import Engine, Outcome, bytes_of
from .ranks import Ranks


class State(NamedTuple):
    """All there is to a run between two rounds."""

    round: int  # rounds done
    server: Tree
    clients: Tree  # leaves (M, ...)


class Report(NamedTuple):
    """What a round did and cost."""

    round: int  # from 1
    loss: float  # mean training loss met by the clients on the way; nan where they met none
    participants: int  # who came back
    bytes_up: int
    bytes_down: int  # to all who were asked
    seconds: float
    lost: int  # who were asked and did not come back


def pose(
    population: Population,
    federation: Federation,
    affinity: Affinity | None,
    rounds: int,
    seed: int,
    dropout: float = 0.0,
) -> Problem:
    """The problem as the server knows it; refuses a network or an affinity that does not fit the federation."""
    if not 0 <= dropout < 1:
        raise SettingError(f"dropout is {dropout}; it is the share of clients a round loses: set 0 <= dropout < 1")
    train = federation.train
    population.to(train.x.device).fit_to(train.x[:2], train.y, federation.n_classes)
    pull = nothing(federation.ids) if affinity is None else affinity.check(federation.ids)
    number = train.x.dtype if train.x.is_floating_point() else federation.weights.dtype
    weights = federation.weights.to(train.x.device, number)
    return Problem(population, federation.ids, weights, pull.to(train.x.device), rounds, seed, dropout)


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
        asked = algorithm.plan(problem, state.server, state.round)
        plan = returning(problem, asked, state.round)
        if len(plan.who):
            outcome = engine.run(algorithm, problem, federation, plan, state.clients, state.round)
            back = plan._replace(who=outcome.who)
            server = algorithm.merge(problem, state.server, back, outcome.totals, outcome.rows)
        else:
            outcome, server = Outcome(state.clients, {}, plan.who, {}, float("nan"), 0.0, 0), state.server
        state = State(state.round + 1, server, outcome.clients)
        yield (
            state,
            Report(
                state.round,
                outcome.loss,
                len(plan.who),
                outcome.bytes_up,
                bytes_of(asked.own) + len(asked.who) * bytes_of(asked.shared),
                time.perf_counter() - clock,
                len(asked.who) - len(plan.who),
            ),
        )


def returning(problem: Problem, plan: Plan, round: int) -> Plan:
    """The round of those who come back. The others got what they were sent, and then it is as if never asked: nothing
    of theirs arrives, and their own state stays as it was."""
    if problem.dropout == 0:
        return plan
    luck = uniform(problem.seed, "dropout", round, id_keys(problem.ids)[plan.who])
    return plan.only((luck >= problem.dropout).nonzero()[:, 0])
