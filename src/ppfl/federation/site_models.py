"""The models of a site's clients, from its own store: nobody else has the states and memberships that never left.

What a client was sent comes from the last evaluation, which a run has after its last round too; what it keeps is in the
client states. The data are not read.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..algorithms.contract import Method, Rows
from ..core.backends import Backend
from ..core.ids import positions_of
from ..core.population import Mixture, Models, Population
from ..core.trees import Tree
from ..data.inputs import scaled
from ..data.preparation import Preparation
from ..data.sample_kind import SampleKind
from ..errors import CheckpointError
from ..insight import client_model
from ..server.loop import MAIN
from ..sites import Evaluate, Setup
from ..sites.messages import decode
from ..sites.states import states_of
from .forgetting import full_name
from .opened_run import experiment_of
from .site_requests import OpenRun
from .site_settings import SiteSettings
from .state_store import StateStore


class SiteModels(NamedTuple):
    """One run's models of the clients of one site."""

    site: str
    run: str
    time: float  # when they were evaluated
    ids: tuple[str, ...]
    kind: SampleKind  # of the samples
    features: tuple[str, ...] | None  # names of the columns, where the data are a table
    population: Population
    backend: Backend
    method: Method
    shared: Tree  # what all clients were sent, ...
    own: dict[str, Tensor]  # ... and what each of them was
    states: Rows  # what they keep

    def name_of(self, client: str) -> str:
        """The full name of a client, which may be given as the site's own data have it."""
        return full_name(client, self.site, self.ids)

    def models(self, client: str) -> Models:
        """The personal model of a client."""
        name = self.name_of(client)
        at = positions_of(self.ids)[name]
        own = {name: leaf[at : at + 1] for name, leaf in self.own.items()}
        state = states_of(self.method.init_client(self.population), self.states, [name])
        return self.method.model(self.backend, self.shared, own, state)

    def membership(self, client: str) -> Tensor | None:
        """(K,), where clients are mixtures of models that they share."""
        models = self.models(client)
        return models.memberships[0] if isinstance(models, Mixture) else None

    def predict(self, client: str, x: Any) -> Tensor:
        """Mean predictions (B, ...) of a client's own model on x (B, ...)."""
        with torch.no_grad():
            return self.backend.predict(self.models(client), scaled(self.kind.batch(x))[None])[0]

    def module(self, client: str, *, predictions: bool = False) -> nn.Module:
        """A client's own model as a plain nn.Module."""
        return client_model(self.population, self.models(client), predictions=predictions)


def load_site_models(settings: SiteSettings, base: Path, run: str | None = None) -> SiteModels:
    """The models of a run, by default of the one that was evaluated last."""
    store = open_store(settings, base)
    try:
        return _read_models(store, settings, base, run)
    finally:
        store.close()


def open_store(settings: SiteSettings, base: Path, wait: float = 5.0) -> StateStore:
    """The store of a site; an error where it has none yet."""
    if not (file := base / settings.state).is_file():
        raise CheckpointError(
            f"there is no {file}: site {settings.name!r} has taken part in no run yet; start it first"
        )
    return StateStore(file, wait)


def _read_models(store: StateStore, settings: SiteSettings, base: Path, run: str | None) -> SiteModels:
    known = store.evaluated_runs()
    if not known or (run is not None and run not in known):
        what = "no run" if run is None else f"no run {run!r:.80}"
        raise CheckpointError(
            f"the store of site {settings.name!r} has {what} with models; models come with a run's evaluations, and it "
            f"has those of: {', '.join(known) or 'none'}"
        )
    run = known[0] if run is None else run
    found, described, opened = store.evaluated(run, MAIN), store.description(run), store.opened(run)
    setup = store.sessions(run).get(MAIN)
    if found is None or described is None or opened is None or setup is None:
        raise CheckpointError(f"the store has no whole model of run {run!r}: it was begun anew; wait for an evaluation")
    request: OpenRun = decode(opened)
    experiment = experiment_of(request, settings, base)  # first, as it imports the classes that are in the messages
    asked, begun = decode(found.request), decode(setup)
    assert isinstance(asked, Evaluate)
    assert isinstance(begun, Setup)
    facts = decode(described.reply).facts["agreed"]
    kind = SampleKind.from_json(facts)
    if request.preparation:
        preparation = Preparation.read(request.preparation)
        kind = kind._replace(shape=(len(preparation.terms),), preparation=preparation)
    like = kind.stand_in()
    population = experiment.build_population(like, request.seed, base)
    population.load(begun.start)
    backend = experiment.build_engine().backend(population, like.train, like.n_classes)
    features = None if facts["features"] is None else tuple(facts["features"])
    rows = found.states.rows
    states = rows._replace(ids=described.present if rows.ids is None else rows.ids)
    return SiteModels(
        settings.name, run, found.time, described.present, kind, features, population, backend,
        begun.method, asked.shared, asked.own, states,
    )  # fmt: skip
