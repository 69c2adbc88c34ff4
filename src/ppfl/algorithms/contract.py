"""What every method is: a handful of pure functions, split into a server's half and a client's half.

The client's half (`work`) sees a task, what it was sent and its own data. What comes back is an `Upload`, and
its type says what leaves a client: sums, of which the server only ever sees the total over clients, and rows,
which it sees client by client. Tensors of clients have a leading dimension C: engines call `work` on a chunk
of clients, a chunk of one being the plain loop.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any, ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from ..core.affinity import Affinity
from ..core.draws import hashed
from ..core.population import Population
from ..core.shared import Shared
from .batches import LocalData, id_keys

Tree = Any  # nested NamedTuples and dicts of tensors


class Problem(NamedTuple):
    """What the server knows before the first round."""

    population: Population
    ids: tuple[str, ...]
    weights: Tensor  # (M,), p_i
    affinity: Affinity
    rounds: int
    seed: int
    dropout: float = 0.0  # of the clients asked in a round, how many are lost; no method needs to know

    @property
    def n_clients(self) -> int:
        return len(self.ids)


class Sum(NamedTuple):
    """sum_i p_i weight_i ⊗ value_i: with r weights a client, one value gives r sums. The server knows p_i."""

    weight: Tensor | None  # (C, r); None: 1, so that r = 1
    value: Tree  # leaves (C, ...)


class Total(NamedTuple):
    """A `Sum` over all clients that took part."""

    weight: Tensor  # (r,): sum_i p_i weight_i
    value: Tree  # leaves (r, ...)


class Upload(NamedTuple):
    """Everything that leaves a client in a round. A tensor that stands in several places leaves once."""

    sums: dict[str, Sum]
    rows: dict[str, Tensor]  # leaves (C, ...)


class Work(NamedTuple):
    client: Tree  # new state, stays with the client
    upload: Upload
    loss: Tensor  # (C,) mean training loss met on the way
    samples: Tensor  # (C,) how many samples that mean is over


class Plan(NamedTuple):
    """A round as the server wants it."""

    who: Tensor  # (S,) positions of the clients that take part
    task: Any  # small and immutable: which block, which steps
    shared: Tree  # sent to everyone
    own: dict[str, Tensor]  # leaves (S, ...): sent to each
    private: bool = False  # whether the server can do without the rows this round, so that they may stay where they are

    def only(self, at: Tensor) -> Plan:
        """The round of the clients at these places of `who` alone."""
        return self._replace(who=self.who[at], own={name: leaf[at] for name, leaf in self.own.items()})


class Personal(NamedTuple):
    """Every client's model, for prediction."""

    shared: Shared
    memberships: Tensor | None  # (M, K); None where there is one canonical model
    own: bool  # whether `shared` has a model for each client, leaves (M, ...)


class Algorithm(Protocol):
    """The contract. All functions are pure; `self` holds settings only."""

    name: ClassVar[str]
    search: ClassVar[dict[str, tuple[Any, ...]]]  # settings worth tuning, and values worth trying

    @property
    def by_client(self) -> tuple[str, ...]:
        """Fields of the server state that have a row a client, (M, ...); dotted where they are deeper in it."""

    def check(self, problem: Problem) -> None:
        """Raise SettingError where the method cannot run on this problem."""

    def init(self, problem: Problem) -> tuple[Tree, Tree]:
        """Server state, and client states with (M, ...) leaves."""

    def plan(self, problem: Problem, server: Tree, round: int) -> Plan: ...

    def work(
        self, population: Population, task: Any, shared: Tree, own: dict[str, Tensor], client: Tree, data: LocalData
    ) -> Work: ...

    def merge(
        self, problem: Problem, server: Tree, plan: Plan, totals: dict[str, Total], rows: dict[str, Tensor]
    ) -> Tree:
        """The next server state, from those who came back: `plan.who` has lost the others, and is never empty."""

    def personal(self, server: Tree, clients: Tree) -> Personal: ...


def field_of(state: Tree, path: str) -> Tensor:
    """A field of a tree of NamedTuples, by its dotted name."""
    leaf: Tensor = reduce(getattr, path.split("."), state)
    return leaf


def with_fields(state: Tree, fields: Mapping[str, Tensor]) -> Tree:
    """The tree with other values in the fields of these dotted names."""
    for path, leaf in fields.items():
        name, _, deeper = path.partition(".")
        state = state._replace(**{name: with_fields(getattr(state, name), {deeper: leaf}) if deeper else leaf})
    return state


def participants(problem: Problem, fraction: float, round: int) -> Tensor:
    """The clients of a round, drawn without replacement from (seed, round, client id); at least one."""
    count = max(1, int(fraction * problem.n_clients + 0.5))
    if count >= problem.n_clients:
        return torch.arange(problem.n_clients)
    draws = hashed(problem.seed, "participants", round, id_keys(problem.ids))
    return draws.argsort()[:count].sort().values
