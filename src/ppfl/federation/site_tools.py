"""What the owner of a site does without the server: a dry run and the approval of an experiment, and the use of the
models that the site's store has. Nothing is sent."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.ids import positions_of
from ..core.trees import Tree
from ..data import Federation
from ..data.load import TableSettings
from ..data.preparation import Preparation
from ..data.sample_spec import SampleSpec
from ..errors import CheckpointError, DataError, PPFLError
from ..io.files import make_folder, write_toml
from ..runs.experiment import Experiment
from ..server import Training, Watch, connect
from ..server.loop import MAIN
from ..server.step_size import FIRST
from ..sites import PersonalModels, Setup
from ..sites.messages import decode
from ..sites.totals import Spread
from .policy import as_settings, experiment_hash, load_approved, over_sites, refuse_unsupported, rows_shown, what_leaves
from .service import open_store
from .site_settings import ClientNames, SiteData, SiteSettings
from .store import StateStore, forget_client

FEW = 8  # names that are listed


class SiteCheck(NamedTuple):
    """What was found, what leaves the site, and what would be refused in a run, each with what to do."""

    facts: list[tuple[str, str]]
    leaves: list[str]
    problems: list[str]

    @contextmanager
    def noting(self, what: str) -> Iterator[None]:
        """An error of ours becomes a problem, and the check goes on."""
        try:
            yield
        except PPFLError as error:
            self.problems.append(f"{what}: {' '.join(str(error).split())}")


def check_site(settings: SiteSettings, base: Path, experiment: Experiment) -> SiteCheck:
    """Read the data, judge the experiment by the policy, and do one local step of one client in memory."""
    secure, policy, shown = settings.secure_sums is not None, settings.policy, rows_shown(over_sites(experiment))
    facts = [("site", settings.name), ("experiment", experiment.name), ("approval", experiment_hash(experiment))]
    found = SiteCheck(facts, what_leaves(experiment, policy, secure=secure), [])
    with found.noting("experiment"):
        refuse_unsupported(experiment, secure=secure)
    if lacking := [row for row in shown if row not in policy.rows]:
        found.problems.append(
            f"policy: the experiment shows {', '.join(lacking)} of each client; add them to rows under [policy], or "
            f"change the experiment"
        )
    with found.noting("names"):
        ClientNames(settings, base, experiment_hash(experiment))
    federation: Federation | None = None
    with found.noting("data"):
        data = SiteData(settings, base, _forgotten(base / settings.state))
        federation = data.prepared(experiment.preparation, {})
        found.facts.extend(_describe(federation, data))
        described = data.describe(experiment.preparation)
        effective = Spread.of(described.importance[:, None])
        if effective.is_few(settings.fewest):
            found.problems.append(
                f"policy: {federation.n_clients} clients, by their samples as many as {float(effective.clients):.1f} "
                f"equal ones, are fewer than min_clients = {settings.fewest}"
            )
    if federation is not None:
        with found.noting("model"):
            found.facts.append(("one step", _one_step(federation, base, experiment)))
    return found


def approve(settings: SiteSettings, base: Path, experiment: Experiment) -> Path:
    """Write the site's own copy of an experiment, which is then approved, or once more."""
    folder, hash = base / settings.approved, experiment_hash(experiment)
    make_folder(folder)
    before = load_approved(folder, base).get(hash)
    file = folder / f"{experiment.name}-{hash[:12]}-{1 if before is None else before.times + 1}.toml"
    write_toml(file, as_settings(experiment))
    if load_approved(folder, base).get(hash) is None:
        file.unlink()
        raise DataError(f"{experiment.name} cannot be written as it is read; leave out what is the default")
    return file


def _forgotten(store: Path) -> tuple[str, ...]:
    """Clients that take no part, as the site's store has it; there may be none yet."""
    if not store.is_file():
        return ()
    opened = StateStore(store)
    try:
        return opened.forgotten()
    finally:
        opened.close()


def _describe(federation: Federation, data: SiteData) -> list[tuple[str, str]]:
    sizes = federation.train.sizes.tolist()
    least = min(range(len(sizes)), key=lambda at: sizes[at])
    samples = ", ".join(f"{len(part):,} {split}" for split, part in federation.splits.items())
    shape = tuple(federation.train.x.shape[1:])
    columns = f"{len(federation.features)}: {_few(federation.features)}" if federation.features else f"shape {shape}"
    classes = "none, targets are numbers"
    if federation.classes is not None:
        classes = f"{len(federation.classes)}: {_few(federation.classes)}"
    missing = "none"  # other readers refuse them
    if data.frame is not None and isinstance(data.asked, TableSettings):
        used = [name for name in data.frame.columns if name not in data.asked.drop]
        counts = {str(name): int(data.frame[name].isna().sum()) for name in used}
        missing = ", ".join(f"{name!r} {count}" for name, count in counts.items() if count) or "none"
    return [
        ("clients", f"{federation.n_clients:,}"),
        ("samples", samples),
        ("columns", columns),
        ("classes", classes),
        ("missing values", missing),
        ("smallest client", f"{federation.ids[least]}: {sizes[least]} training samples"),
    ]


def _one_step(federation: Federation, base: Path, experiment: Experiment) -> str:
    """One round of one client, the smallest, as a run would do it."""
    experiment = over_sites(experiment)
    seed, method = experiment.seeds[0], experiment.method
    population = experiment.build_population(SampleSpec.of(federation), seed, base)
    metrics = experiment.watch.with_functions(base).metrics
    at = int(federation.train.sizes.argmin())
    copies = _copies_of(federation, at, max(2, population.k))
    transport = connect(copies, population, experiment.build_engine(), metrics=metrics)
    method = method.with_local(lr=FIRST) if method.local.lr == "auto" else method
    watch = Watch(metrics=metrics)
    end = next(
        Training(transport, population, method, rounds=experiment.rounds, seed=seed, watch=watch).begin().rounds()
    )
    return f"client {federation.ids[at]}: done, training loss {end.record['loss']:.4g}"


def _copies_of(federation: Federation, client: int, times: int) -> Federation:
    """One client several times, because methods ask for at least as many clients as there are models."""
    at = torch.full((times,), client, device=federation.train.x.device)
    parts: dict[str, Any] = {split: part.take(at) for split, part in federation.splits.items()}
    ids = tuple(f"copy {number}" for number in range(times))
    return federation.replace(ids=ids, weights=torch.full((times,), 1 / times, device=at.device), truth=None, **parts)


def _few(names: Sequence[str]) -> str:
    more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
    return ", ".join(map(str, names[:FEW])) + more


def forget_in_store(store: StateStore, settings: SiteSettings, base: Path, client: str) -> list[str]:
    """Leave a client out from now on and delete its states; the runs that had it. DataError where it is not known."""
    joined = {run: found for run in store.runs() if (found := store.joined(run)) is not None}
    names = {run: (client, *ClientNames(settings, base, found.experiment).outside([client]))
             for run, found in joined.items()}  # fmt: skip
    known = any({*names[run]} & {*found.ids} for run, found in joined.items())
    if not known and client not in store.forgotten():
        try:
            ids = SiteData(settings, base).ids
        except PPFLError:  # its rows may be gone already, and the data with them
            ids = ()
        if client not in ids:
            raise DataError(f"site {settings.name!r} has no client {client!r:.80}; it has {_few(ids) or 'none'}")
    return forget_client(store, client, names)


# ---------------------------------------------------------------------- the models of a site's clients


class SiteModels(NamedTuple):
    """One run's models of the clients of one site: nobody else has the states and memberships that never left."""

    run: str
    time: float  # when they were evaluated
    personal: PersonalModels  # by the names that clients have in the run
    names: ClientNames

    def name_of(self, client: str) -> str:
        """The name in the run of a client of the site's data."""
        at = self.names.position(client, self.personal.ids)
        if at is None:
            raise DataError(f"the run has no client {client!r:.80} of this site; names are those of the site's data")
        return str(self.personal.ids[at])


def load_site_models(settings: SiteSettings, base: Path, run: str | None = None) -> SiteModels:
    """The models of a run, by default of the one that was evaluated last. The data are not read: what a client was sent
    comes from the last evaluation, which a run has after its last round too."""
    store = open_store(settings, base)
    try:
        return _read_models(store, settings, base, run)
    finally:
        store.close()


def _read_models(store: StateStore, settings: SiteSettings, base: Path, run: str | None) -> SiteModels:
    known = store.evaluated_runs()
    if not known or (run is not None and run not in known):
        what = "no run" if run is None else f"no run {run!r:.80}"
        raise CheckpointError(
            f"the store of site {settings.name!r} has {what} with models; models come with a run's evaluations, and it "
            f"has those of: {', '.join(known) or 'none'}"
        )
    run = known[0] if run is None else run
    joined = store.joined(run)
    approved = load_approved(base / settings.approved, base).get("" if joined is None else joined.experiment)
    if joined is None or approved is None:
        raise CheckpointError(
            f"the experiment of run {run!r} is not among the approved ones any more; put its copy back"
        )
    found, setup = store.evaluated(run, MAIN), store.sessions(run).get(MAIN)
    if found is None or setup is None:
        raise CheckpointError(f"the store has no whole model of run {run!r}: it was begun anew; wait for an evaluation")
    made: Setup = decode(setup)
    experiment, request, ids = approved.experiment, found.request, joined.ids
    agreed = json.loads(joined.spec)
    spec = SampleSpec.model_validate({name: agreed[name] for name in SampleSpec.model_fields})
    if joined.preparation:
        spec = spec.prepared_by(Preparation.read(json.loads(joined.preparation)))
    population = experiment.build_population(spec, joined.seed, base)
    population.load(made.start)
    where = positions_of(ids)

    def send(clients: tuple[str, ...]) -> tuple[Tree, dict[str, Tensor]]:
        at = torch.tensor([where[client] for client in clients], dtype=torch.long)
        return request.shared, {name: leaf[at] for name, leaf in request.own.items()}

    rows = found.states.rows
    states = rows if rows.ids is not None else rows._replace(ids=ids)
    personal = PersonalModels(
        population, made.method, experiment.build_engine(), spec, ids, send, states, torch.device("cpu")
    )
    return SiteModels(run, found.time, personal, ClientNames(settings, base, approved.hash))
