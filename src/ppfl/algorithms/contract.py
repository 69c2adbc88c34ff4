"""What every method is: two sets of pure functions, a server's half and a client's half.

The server's half never sees client state, and the client's half never sees server state: a method is the only thing
that both have in common, and `self` holds its settings alone. What comes back from a client is an `Upload`, and its
type says who can see it: sums, of which only the total over clients is ever seen, and rows, which are seen client by
client. Tensors of clients have a leading dimension C: engines call `work` on a chunk of clients, a chunk of one being
the plain loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from ..core.affinity import Affinity
from ..core.backends import Backend
from ..core.ids import Roster
from ..core.population import Models, Population
from ..core.trees import Params, Tree
from .local.batches import LocalData
from .uploads import Rows, Sum, Total, Upload, Who, Work

__all__ = [
    "NEWCOMER_ROUNDS", "Method", "MethodDefaults", "Plan", "Problem", "Roster", "Rows", "Sum",
    "Total", "Upload", "Who", "Work", "participants",
]  # fmt: skip

NEWCOMER_ROUNDS = 5  # rounds of their own that newcomers take: memberships that start evenly need a few


class Problem(NamedTuple):
    """What the server knows before the first round."""

    population: Population
    roster: Roster
    affinity: Affinity
    rounds: int
    seed: int
    importance: float = 1.0  # of all clients together: a client's p_i is its own importance over this
    splits: tuple[str, ...] = ("train",)  # of the clients' data
    device: torch.device = torch.device("cpu")  # where the server computes

    @property
    def n_clients(self) -> int:
        return len(self.roster)


class Plan(NamedTuple):
    """One exchange with the clients."""

    who: Who
    task: Any  # a number or a message: which block, which steps
    ends_round: bool = True  # False: another exchange of the same round follows


class Method(Protocol):
    """The contract of one method."""

    name: ClassVar[str]  # in experiment files
    title: ClassVar[str]  # for people
    search: ClassVar[dict[str, tuple[Any, ...]]]  # settings worth tuning, and values worth trying

    @property
    def batch_size(self) -> int | None:
        """Samples per local step, by which engines form their chunks; None: all of a client's."""

    @property
    def visible_rows(self) -> tuple[str, ...]:
        """What of a client reaches the server as rows: the names that its rows begin with. A site refuses others."""

    @property
    def membership_penalty(self) -> float:
        """lambda, how strongly neighbours' memberships pull; 0 where they do not."""

    @property
    def needs_lr(self) -> bool:
        """Whether lr is still to be found by trials: with `trial` runs, and then `with_lr`."""

    def setting(self, key: str) -> Any: ...
    def changed(self, changes: Mapping[str, Any]) -> Self: ...
    def with_lr(self, lr: float) -> Self: ...
    def trial(self, lr: float) -> Self: ...

    def with_everyone(self) -> Self:
        """The same method with all clients in every round."""

    def step_size(self, round: int, rounds: int) -> float:
        """lr in a round (from 0)."""

    @property
    def theta_probability(self) -> float:
        """How often a round moves the models, where rounds draw a block; Eq. (10) needs it."""

    # ------------------------------------------------------------------ the server's half

    def check(self, problem: Problem) -> None:
        """Raise SettingError where the method cannot run on this problem."""

    def init_server(self, problem: Problem) -> Tree:
        """The server state before the first round, on the CPU."""

    def plan(self, problem: Problem, server: Tree, round: int) -> Plan: ...

    def send(
        self, problem: Problem, server: Tree, ids: tuple[str, ...] | None, task: Any
    ) -> tuple[Tree, dict[str, Tensor]]:
        """What is sent to all of these clients, and to each of them, leaves (len(ids), ...); ids None: all known.

        Clients that the server has never seen get defaults. `task` is the plan's, or None for prediction.
        """

    def merge(self, problem: Problem, server: Tree, task: Any, totals: dict[str, Total], rows: Rows) -> Tree:
        """The next server state, from those who came back, at least one. Rows carry their ids."""

    def global_network(self, server: Tree) -> Params | None:
        """The one network that all clients use; None where clients have models of their own."""

    def newcomer_plans(self, problem: Problem, server: Tree) -> list[Plan]:
        """The exchanges in which clients that come after training find their place. Nothing of theirs is merged."""

    def move_server(self, server: Tree, before: Roster, after: Roster) -> Tree:
        """The server state for other clients: what it has of each is found by id, and newcomers get defaults."""

    # ------------------------------------------------------------------ the client's half

    def init_client(self, population: Population) -> Tree:
        """The state that every client begins with, leaves (...) of one client, on the CPU."""

    def work(
        self, backend: Backend, task: Any, shared: Tree, own: dict[str, Tensor], client: Tree, data: LocalData
    ) -> Work:
        """One exchange of a chunk of clients. The state that comes in is not written to."""

    def model(self, backend: Backend, shared: Tree, own: dict[str, Tensor], client: Tree) -> Models:
        """The personal models of a chunk of clients, from what they were sent and what they keep."""

    # ------------------------------------------------------------------ figures of the method's own

    def penalty_value(self, problem: Problem, server: Tree) -> float:
        """What the objective F has besides the clients' losses."""

    def measure_task(self, problem: Problem, server: Tree) -> Any:
        """A task whose totals tell how far the method is from its goal; None where it has no such measure."""

    def measured(self, totals: dict[str, Total], metrics: dict[str, float]) -> dict[str, float]:
        """The figures that a `measure_task` brought."""


class MethodDefaults:
    """What most methods answer to the smaller questions of the contract."""

    title: ClassVar[str]

    @property
    def visible_rows(self) -> tuple[str, ...]:
        """The server sees sums alone."""
        return ()

    @property
    def membership_penalty(self) -> float:
        """No memberships are pulled together."""
        return 0.0

    @property
    def theta_probability(self) -> float:
        """As often as not: a method without blocks has no preference."""
        return 0.5

    def plan(self: Any, problem: Problem, server: Any, round: int) -> Plan:
        """All who take part get a task that is its step size."""
        who = participants(problem, self.participation, round)
        return Plan(who, self.step_size(round, problem.rounds))

    def send(
        self, problem: Problem, server: Any, ids: tuple[str, ...] | None, task: Any
    ) -> tuple[Tree, dict[str, Tensor]]:
        """The server's shared models, and nothing else."""
        return server.shared, {}

    def global_network(self, server: Any) -> Params | None:
        """None: clients have models of their own."""
        return None

    def newcomer_plans(self: Any, problem: Problem, server: Any) -> list[Plan]:
        """A few rounds like the last ones of training."""
        rounds = range(problem.rounds - NEWCOMER_ROUNDS, problem.rounds)
        return [self.plan(problem, server, max(round, 1)) for round in rounds]

    def move_server(self, server: Any, before: Roster, after: Roster) -> Tree:
        """As it is: it has nothing of any one client."""
        return server

    def init_client(self, population: Population) -> Tree:
        """Nothing is kept."""
        return {}

    def penalty_value(self, problem: Problem, server: Tree) -> float:
        """Nothing."""
        return 0.0

    def measure_task(self, problem: Problem, server: Tree) -> Any:
        """None."""
        return None

    def measured(self, totals: dict[str, Total], metrics: dict[str, float]) -> dict[str, float]:
        """Nothing."""
        return {}


def participants(problem: Problem, fraction: float, round: int, at_least: int = 1) -> Who:
    """The clients of a round, drawn without replacement by (seed, round, client id), at least so many."""
    count = max(at_least, int(fraction * problem.n_clients + 0.5))
    return problem.roster.draw(problem.seed, round, count)
