"""A dry run at a site: its data and its config against the experiment, before anyone waits for it. No network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch

from ..core.registry import find_function, python_names
from ..data import Federation
from ..data.sample_spec import SampleSpec
from ..errors import PPFLError, SettingError
from ..runs.experiment import Experiment
from ..server import Training, Watch, connect
from ..server.step_size import FIRST
from .opened_run import experiment_of
from .provisioning import load_secure_sums
from .site_data import SiteData
from .site_requests import OpenRun
from .site_settings import SiteSettings
from .state_store import StateStore
from .unsupported import refuse_unsupported

FEW = 8  # names that are listed


class SiteCheck(NamedTuple):
    """What was found, and what would be refused in a run, each with what to do."""

    facts: list[tuple[str, str]]
    problems: list[str]

    @contextmanager
    def noting(self, what: str) -> Iterator[None]:
        """An error of ours becomes a problem, and the check goes on."""
        try:
            yield
        except PPFLError as error:
            self.problems.append(f"{what}: {' '.join(str(error).split())}")


def check_site(settings: SiteSettings, base: Path, experiment: Experiment) -> SiteCheck:
    """Read the data, build the model, and do one local step of one client in memory."""
    found = SiteCheck([("site", settings.name), ("experiment", experiment.name)], [])
    with found.noting("experiment"):
        refuse_unsupported(experiment, secure=settings.secure_sums is not None)
    _check_files(settings, base, found)
    _check_functions(settings, base, experiment, found)
    federation: Federation | None = None
    with found.noting("data"):
        data = SiteData(settings, base, _forgotten(base / settings.state))
        missing = ("missing values", _missing_values(data.table, settings.data))
        try:
            as_read, federation = _as_used(data, experiment)
            found.facts.extend(_describe(as_read))
            found.problems.extend(_differences(as_read, experiment.data))
        finally:
            found.facts.append(missing)
    if federation is not None:
        found.facts.append(("leaves the site", _what_leaves(federation, experiment, settings)))
        with found.noting("model"):
            found.facts.append(("one step", _one_step(federation, settings, base, experiment)))
    return found


def _check_files(settings: SiteSettings, base: Path, found: SiteCheck) -> None:
    for name in ("superlink", "root_certificate", "private_key"):
        value = getattr(settings, name)
        if value is None:
            found.problems.append(f"{name}: it is not set; take the line from the site.toml that init made")
        elif isinstance(value, Path) and not (base / value).is_file():
            found.problems.append(f"{name}: there is no {base / value}; take the file from the folder that init made")
    if settings.secure_sums is not None:
        with found.noting("secure_sums"):
            keys = load_secure_sums(base / settings.secure_sums).public_keys
            if settings.name not in keys:
                raise SettingError(f"no key of {settings.name!r} is in it, only {', '.join(keys)}; ask for a new file")


def _check_functions(settings: SiteSettings, base: Path, experiment: Experiment, found: SiteCheck) -> None:
    for name in settings.allow:
        with found.noting("allow"):
            find_function(name, base, "allow")
    for name in python_names(experiment.model_dump(mode="json")):
        if name not in settings.allow:
            found.problems.append(
                f"allow: the experiment names {name!r}; read its code, install it, and add it to allow in site.toml"
            )


def _as_used(data: SiteData, experiment: Experiment) -> tuple[Federation, Federation]:
    """The data as they are, and as the experiment uses them: prepared with this site's sums, as others' are away."""
    preparation = experiment.preparation
    if preparation is None:
        federation, _ = data.plain()
        return federation, federation
    asked = preparation.model_dump(mode="json")
    federation = data.prepared_alone(asked)
    features = tuple(data.describe(asked).facts["agreed"]["features"])
    return federation.replace(features=features), federation


def _forgotten(store: Path) -> tuple[str, ...]:
    """Clients that take no part, as the site's store has it; there may be none yet."""
    if not store.is_file():
        return ()
    with closing(StateStore(store)) as opened:
        return opened.forgotten()


def _describe(federation: Federation) -> list[tuple[str, str]]:
    sizes = federation.train.sizes.tolist()
    least = min(range(len(sizes)), key=lambda at: sizes[at])
    samples = ", ".join(f"{len(part):,} {split}" for split, part in federation.splits.items())
    shape = tuple(federation.train.x.shape[1:])
    columns = f"{len(federation.features)}: {_few(federation.features)}" if federation.features else f"shape {shape}"
    classes = "none, targets are numbers"
    if federation.classes is not None:
        classes = f"{len(federation.classes)}: {_few(federation.classes)}"
    return [
        ("clients", f"{federation.n_clients:,}"),
        ("samples", samples),
        ("columns", columns),
        ("classes", classes),
        ("smallest client", f"{federation.ids[least]}: {sizes[least]} training samples"),
    ]


def _missing_values(table: Any, data: Any) -> str:
    """Of each column of a table that is used."""
    if table is None:
        return "none"  # other readers refuse them
    counts = {str(name): int(table[name].isna().sum()) for name in table.columns if name not in data.drop}
    return ", ".join(f"{name!r} {count}" for name, count in counts.items() if count) or "none"


def _differences(federation: Federation, expected: Any) -> list[str]:
    """Where the data differ from what `[data]` of the experiment says of all sites."""
    found = []
    for what, here in (("columns", federation.features), ("classes", federation.classes)):
        there = getattr(expected, what, None)
        if there is not None and here is not None and tuple(there) != tuple(here):
            odd = [name for name in (*there, *here) if (name in there) != (name in here)]
            said = f"differ in {_few(odd)}" if odd else "are in another order"
            found.append(f"{what}: they {said}, the experiment has {_few(there)}; set {what} under [data] as it has")
    for split in ("test", "validation"):
        fraction = getattr(expected, f"{split}_fraction", None)
        wanted = bool(fraction) or (split == "test" and getattr(expected, "is_test", None) is not None)
        if fraction is not None and ":" not in expected.name and wanted != (split in federation.splits):
            has = "has no" if wanted else "has"
            found.append(
                f"{split} data: this site {has} {split} samples; set {split}_fraction = {fraction} under [data]"
            )
    return found


def _what_leaves(federation: Federation, experiment: Experiment, settings: SiteSettings) -> str:
    """What the server can read, in words."""
    rows = list(experiment.method.shows)
    asked = _AskedTables(federation)
    with suppress(PPFLError):  # it is to note what is asked for
        experiment.build_affinity(cast(Federation, asked))
    rows += asked.tables
    if experiment.watch.report_clients and experiment.watch.share >= 1:
        rows.append("scores")
    sums = "masked sums" if settings.secure_sums is not None else "sums over its clients"
    columns = (
        "" if experiment.preparation is None else ", kinds of columns, levels of text that the experiment does not name"
    )
    return f"{sums}, names of clients{columns}" + (f"; client by client: {', '.join(rows)}" if rows else "")


class _AskedTables:
    """A federation that notes which tables of clients an affinity asks for."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self.tables: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name in ("label_counts", "feature_means"):
            self.tables.append(name.replace("_", " "))
        return getattr(self._federation, name)


def _one_step(federation: Federation, settings: SiteSettings, base: Path, experiment: Experiment) -> str:
    """One round of one client, the smallest, as a run would do it."""
    seed = experiment.seeds[0]
    asked = experiment.model_dump(mode="json", exclude={"data"})
    # functions that are not allowed have been noted; the step shows whether the rest fits
    allowed = settings.model_copy(update={"allow": (*settings.allow, *python_names(asked))})
    taken = experiment_of(OpenRun(asked, seed), allowed, base)
    population = taken.build_population(SampleSpec.of(federation), seed, base)
    metrics = taken.watch.with_functions(base).metrics
    at = int(federation.train.sizes.argmin())
    copies = _copies_of(federation, at, max(2, population.k))
    transport = connect(copies, population, taken.build_engine(), metrics=metrics)
    method = taken.method.with_local(lr=FIRST) if taken.method.local.lr == "auto" else taken.method
    watch = Watch(metrics=metrics)
    end = next(Training(transport, population, method, rounds=taken.rounds, seed=seed, watch=watch).begin().rounds())
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
