"""Clients that come after training, new data of known ones, and training that goes on with both.

No model changes when clients come: each finds its place among the models that are there. With PPFL that is its
membership and nothing else, fitted until it no longer improves; with another method a client does what clients do in
its last rounds, and what it would upload is thrown away.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..algorithms.contract import Method, common_network
from ..core.affinity import Affinity
from ..core.population import Population
from ..core.trees import Params
from ..data import Federation
from ..data.sample_spec import SampleSpec
from ..errors import DataError, ModelError, SettingError
from ..server import Trained, Watch, adapt_clients, connect
from ..server.newcomers import replace_rows
from ..sites import SavedStates


def onboard(trained: Trained, federation: Federation) -> SavedStates:
    """The states of all clients: those that were known, as they were, and the new ones."""
    known = set(trained.ids)
    if old := [client for client in federation.ids if client in known]:
        raise DataError(
            f"client {old[0]!r} is already known ({len(old)} of {federation.n_clients} are); onboard new clients "
            f"only, and use update(federation) for new data of known ones"
        )
    return _with_adapted(trained, federation, None)


def update(trained: Trained, federation: Federation) -> SavedStates:
    """The states of all clients, those of the federation fitted to the data it has of them."""
    known = set(trained.ids)
    if new := [client for client in federation.ids if client not in known]:
        raise DataError(
            f"there is no client {new[0]!r} among the {len(known)} that are known; update known clients only, and use "
            f"onboard(federation) for new ones"
        )
    return _with_adapted(trained, federation, trained.clients)


def method_to_continue(trained: Method, asked: Method | None) -> Method:
    """The method that goes on: the one that trained so far, or the same with other settings."""
    if asked is None:
        return trained
    return asked.with_local(lr=trained.local.step_size(0, 1)) if asked.local.lr == "auto" else asked


def network_to_start_from(trained: Trained, asked: Method) -> Params:
    """The one network that a method trained for all clients, for another method to begin with."""
    network = common_network(trained.method, trained.problem, trained.state.server)
    if network is None:
        raise SettingError(
            f"start was trained by {trained.method.title}, whose clients have models of their own, and method is "
            f"{asked.title}; go on with the same method, or start from one with one network for all, such as FedAvg"
        )
    return network


def refuse_other_start(
    trained: Trained,
    population: Population,
    federation: Federation,
    method: Method,
    affinity: Affinity | None,
    watch: Watch,
) -> None:
    """Refuse to go on with another population, other data, or without what the method needs."""
    refuse_other_population(trained.problem.population, population)
    refuse_other_data(trained.spec, federation)
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


def refuse_other_data(spec: SampleSpec, federation: Federation) -> None:
    """Samples and classes must be those that the models were trained on."""
    found = SampleSpec.of(federation)
    if found.shape != spec.shape or found.dtype != spec.dtype:
        raise DataError(
            f"{federation.name} has samples of shape {found.shape}, {found.dtype}; the models were trained on "
            f"{spec.shape}, {spec.dtype}: prepare the data as before"
        )
    if (found.classes is None) != (spec.classes is None) or (
        found.classes and spec.classes and found.classes != spec.classes[: len(found.classes)]
    ):
        raise DataError(
            f"{federation.name} has {_described(found.classes)}; the models were trained on "
            f"{_described(spec.classes)}: pass the same classes=... to Federation.from_arrays"
        )


def _described(classes: Sequence[str] | None) -> str:
    if classes is None:
        return "real targets"
    shown = ", ".join(map(repr, classes[:5]))
    return f"the classes {shown}" + (f" and {len(classes) - 5} more" if len(classes) > 5 else "")


def _with_adapted(trained: Trained, federation: Federation, states: SavedStates | None) -> SavedStates:
    refuse_other_data(trained.spec, federation)
    placed = federation.to(trained.problem.device)
    transport = connect(placed, trained.problem.population, trained.engine)
    found = adapt_clients(trained.method, trained.problem, trained.state.server, transport, states)
    return trained.clients._replace(rows=replace_rows(trained.clients.rows, federation.ids, found))
