"""Clients that come after training, new data of known ones, and training that goes on with both.

No model changes when clients come: each finds its place among the models that are there. With PPFL that is its
membership and nothing else, fitted until it no longer improves; with another method a client does what clients do in
its last rounds, and what it would upload is thrown away.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..algorithms.contract import Method, Problem, Rows, common_network
from ..core.affinity import Affinity
from ..core.ids import ClientIds
from ..core.population import Population
from ..core.trees import Params
from ..data import Federation
from ..data.sample_kind import SampleKind
from ..errors import DataError, ModelError, SettingError
from ..server import InProcess, ServerState, Transport, Watch, adapt_clients
from ..server.loop import MAIN, setup_sites
from ..sites import Engine, Restore, SavedStates, Site
from ..sites.messages import join_rows


class TrainedClients(NamedTuple):
    """What training left behind, as far as clients to come need it."""

    problem: Problem
    method: Method
    state: ServerState
    ids: ClientIds  # of all known clients
    clients: SavedStates
    kind: SampleKind
    engine: Engine


def onboard(trained: TrainedClients, federation: Federation) -> SavedStates:
    """The states of all clients: those that were known, as they were, and the new ones."""
    known = set(trained.ids)
    if old := [client for client in federation.ids if client in known]:
        raise DataError(
            f"client {old[0]!r} is already known ({len(old)} of {federation.n_clients} are); onboard new clients "
            f"only, and use update(federation) for new data of known ones"
        )
    return _with_adapted(trained, federation, None)


def update(trained: TrainedClients, federation: Federation) -> SavedStates:
    """The states of all clients, those of the federation fitted to the data it has of them."""
    known = set(trained.ids)
    if new := [client for client in federation.ids if client not in known]:
        raise DataError(
            f"there is no client {new[0]!r} among the {len(known)} that are known; update known clients only, and use "
            f"onboard(federation) for new ones"
        )
    return _with_adapted(trained, federation, trained.clients)


def continue_training(
    trained: TrainedClients, federation: Federation, method: Method, problem: Problem, transport: Transport
) -> tuple[Problem, ServerState]:
    """Where training goes on with the clients of a federation, at sites that have their states.

    Known clients keep theirs, and new ones are onboarded first. Rounds are counted on, so that no draw is repeated.
    """
    known = set(trained.ids)
    if new := [client for client in federation.ids if client not in known]:
        trained = trained._replace(clients=onboard(trained, federation.select(new)))
    before = trained.state
    server = method.move_server(before.server, trained.problem.roster, problem.roster)
    problem = problem._replace(rounds=before.round + problem.rounds)
    method.check(problem)
    setup_sites(method, problem, transport)
    transport.ask([Restore(MAIN, before.exchange, trained.clients)])
    return problem, before._replace(server=server)


def replace_rows(before: Rows, clients: Sequence[str], after: Rows) -> Rows:
    """Rows with those of these clients replaced by others; all rows name their clients."""
    replaced = set(clients)
    stay = [at for at, client in enumerate(before.ids or ()) if client not in replaced]
    if not stay:
        return after
    ids = tuple((before.ids or ())[at] for at in stay)
    rows = Rows(ids, {name: leaf[torch.tensor(stay, device=leaf.device)] for name, leaf in before.values.items()})
    return join_rows([rows, after])


def method_to_continue(trained: Method, asked: Method | None) -> Method:
    """The method that goes on: the one that trained so far, or the same with other settings."""
    if asked is None:
        return trained
    return asked.with_local(lr=trained.local.step_size(0, 1)) if asked.local.lr == "auto" else asked


def network_to_start_from(trained: TrainedClients, asked: Method) -> Params:
    """The one network that a method trained for all clients, for another method to begin with."""
    network = common_network(trained.method, trained.problem, trained.state.server)
    if network is None:
        raise SettingError(
            f"start was trained by {trained.method.title}, whose clients have models of their own, and method is "
            f"{asked.title}; go on with the same method, or start from one with one network for all, such as FedAvg"
        )
    return network


def refuse_other_start(
    trained: TrainedClients,
    population: Population,
    federation: Federation,
    method: Method,
    affinity: Affinity | None,
    watch: Watch,
) -> None:
    """Refuse to go on with another population, other data, or without what the method needs."""
    refuse_other_population(trained.problem.population, population)
    refuse_other_data(trained.kind, federation)
    if method.uses_affinity and affinity is None:
        raise SettingError(
            "clients with a penalty pull at each other, but there is no affinity between them now; pass affinity=..., "
            "or a method with penalty=0"
        )
    if watch.output == "random":
        raise SettingError("output is 'random', which draws among all rounds of a run; go on with 'last' or 'best'")


def refuse_other_population(trained: Population, other: Population) -> None:
    """Training goes on with the population that it began with, or one with the same parts."""

    def parts(population: Population) -> tuple[object, ...]:
        shapes = {name: tuple(leaf.shape) for name, leaf in population.initial_network().items()}
        return population.k, population.mix.name, population.canonical_modules, shapes

    if parts(trained) != parts(other):
        raise ModelError("population is another one than start was trained with; pass start.population")


def refuse_other_data(kind: SampleKind, federation: Federation) -> None:
    """Samples and classes must be those that the models were trained on."""
    found = SampleKind.of(federation)
    if found.shape != kind.shape or found.dtype != kind.dtype:
        raise DataError(
            f"{federation.name} has samples of shape {found.shape}, {found.dtype}; the models were trained on "
            f"{kind.shape}, {kind.dtype}: prepare the data as before"
        )
    if (found.classes is None) != (kind.classes is None) or (
        found.classes and kind.classes and found.classes != kind.classes[: len(found.classes)]
    ):
        raise DataError(
            f"{federation.name} has {_described(found.classes)}; the models were trained on "
            f"{_described(kind.classes)}: pass the same classes=... to Federation.from_arrays"
        )


def _described(classes: Sequence[str] | None) -> str:
    if classes is None:
        return "real targets"
    shown = ", ".join(map(repr, classes[:5]))
    return f"the classes {shown}" + (f" and {len(classes) - 5} more" if len(classes) > 5 else "")


def _with_adapted(trained: TrainedClients, federation: Federation, states: SavedStates | None) -> SavedStates:
    refuse_other_data(trained.kind, federation)
    placed = federation.to(trained.problem.device)
    transport = InProcess(Site(placed, trained.problem.population, trained.engine))
    found = adapt_clients(trained.method, trained.problem, trained.state.server, transport, states)
    return trained.clients._replace(rows=replace_rows(trained.clients.rows, federation.ids, found))
