"""The models of a site's clients, from its own store: nobody else has the states and memberships that never left.

What a client was sent comes from the last evaluation, which a run has after its last round too; what it keeps is in the
client states. The data are not read.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.ids import positions_of
from ..core.trees import Tree
from ..data.preparation import Preparation
from ..data.sample_spec import SampleSpec
from ..errors import CheckpointError
from ..server.loop import MAIN
from ..sites import Evaluate, PersonalModels, Setup
from ..sites.messages import decode
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
    personal: PersonalModels

    def name_of(self, client: str) -> str:
        """The full name of a client, which may be given as the site's own data have it."""
        return full_name(client, self.site, self.personal.ids)


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
    spec = SampleSpec.model_validate({name: facts[name] for name in SampleSpec.model_fields})
    if request.preparation:
        spec = spec.prepared_by(Preparation.from_json(request.preparation))
    population = experiment.build_population(spec, request.seed, base)
    population.load(begun.start)
    rows, ids, shared, own = found.states.rows, described.present, asked.shared, asked.own
    states, position = rows._replace(ids=ids if rows.ids is None else rows.ids), positions_of(ids)

    def send(clients: tuple[str, ...]) -> tuple[Tree, dict[str, Tensor]]:
        at = torch.tensor([position[client] for client in clients])
        return shared, {name: leaf[at] for name, leaf in own.items()}

    engine = experiment.build_engine()
    models = PersonalModels(population, begun.method, engine, spec, ids, send, states, torch.device("cpu"))
    return SiteModels(settings.name, run, found.time, models)
