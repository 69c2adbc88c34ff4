"""Partial personalization: a part of the network is everybody's, the rest is each client's own.

u <- u + sum_{i in S} p_i (u_i - u) / sum_{i in S} p_i for the shared part u; the personal part v_i stays where it is.
The methods differ in which part is personal, and in how a client trains the two. With nothing personal this is
FedAvg, with everything Local; a network of one layer has no other split.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from ..core.errors import SettingError
from ..core.population import Population
from ..core.shared import Shared
from .batches import LocalData
from .contract import Personal, Plan, Problem, Sum, Total, Upload, Work
from .descent import LocalTraining, Met, descend_networks
from .fedavg import mean, one_model, one_model_only, with_k

Part = str | tuple[str, ...]  # names of submodules, or "input" and "output" for the first and the last layer
Names = frozenset[str]  # of parameters


class PartialServer(NamedTuple):
    shared: Shared  # the shared part alone


class Partial(LocalTraining):
    """What these methods have in common. The state of a client is its personal part, and never leaves it."""

    name: ClassVar[str]

    @abstractmethod
    def personal_parameters(self, net: nn.Module) -> Names:
        """Those that stay with a client."""

    def train(self, population: Population, networks: Shared, personal: Names, data: LocalData, lr: float) -> Met:
        """A client's local run, in place on its whole network: both parts at once."""
        return descend_networks(population, networks, data, self, lr)

    def check(self, problem: Problem) -> None:
        one_model_only(self.name, problem)
        self.personal_parameters(problem.population.net)

    def init(self, problem: Problem) -> tuple[PartialServer, Shared]:
        personal = self.personal_parameters(problem.population.net)
        start = problem.population.initial(problem.seed)
        shared = Names(start.by_name()) - personal
        return PartialServer(part_of(start, shared)), part_of(start, personal).spread(problem.n_clients)

    def work(
        self, population: Population, task: float, shared: Shared, own: Any, client: Shared, data: LocalData
    ) -> Work:
        start, mine = one_model(shared), one_model(client, k_at=1)
        ends = start.copies(len(data.weight), data.space)
        kept = mine.room(data.space, "personal").map(Tensor.copy_, mine)
        met = self.train(population, together(ends, kept), Names(kept.by_name()), data, task)
        change = ends.map(Tensor.sub_, start)
        kept = kept._replace(canonical=with_k(kept.canonical, k_at=1))
        return Work(kept, Upload({"change": Sum(None, change)}, {}), *met)

    def merge(
        self, problem: Problem, server: PartialServer, plan: Plan, totals: dict[str, Total], rows: Any
    ) -> PartialServer:
        change: Shared = mean(totals["change"])
        change = change._replace(canonical=with_k(change.canonical))
        return PartialServer(server.shared.map(torch.add, change))

    def personal(self, server: PartialServer, clients: Shared) -> Personal:
        if not clients.leaves():
            return Personal(server.shared, None, own=False)
        return Personal(together(server.shared.spread(len(clients.leaves()[0])), clients), None, own=True)


class PersonalPart(Partial):
    """The same, where the settings say which part is personal."""

    personal_part: Part = "output"

    def personal_parameters(self, net: nn.Module) -> Names:
        return parameters_of(net, self.personal_part, "personal_part")


def part_of(whole: Shared, names: Names) -> Shared:
    """The leaves with these names."""
    return Shared(*({name: leaf for name, leaf in part.items() if name in names} for part in whole))


def together(one: Shared, other: Shared) -> Shared:
    """The leaves of both."""
    return Shared({**one.common, **other.common}, {**one.canonical, **other.canonical})


def parameters_of(net: nn.Module, part: Part, setting: str) -> Names:
    """Names of the parameters of a part of the network; one that stands in several modules is one parameter.

    >>> net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> sorted(parameters_of(net, "output", "personal_part"))
    ['2.bias', '2.weight']
    """
    names = (part,) if isinstance(part, str) else part
    chosen = {id(p) for name in names for p in _module(net, name, setting).parameters()}
    return Names(name for name, p in net.named_parameters() if id(p) in chosen)


def _module(net: nn.Module, name: str, setting: str) -> nn.Module:
    known: dict[str, nn.Module] = {n: m for n, m in net.named_modules(remove_duplicate=False) if n and _learns(m)}
    if name in known:
        return known[name]
    layers = [m for m in net.modules() if _learns(m) and not any(_learns(inner) for inner in m.children())]
    ends = {"input": layers[0], "output": layers[-1]}
    if name in ends:
        return ends[name]
    raise SettingError(
        f"{setting} names {name!r}, which is no submodule with parameters; "
        f"use {', '.join(map(repr, [*ends, *known]))}, or several of them"
    )


def _learns(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())
