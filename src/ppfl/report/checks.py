"""What `ppfl check` says: an experiment tried on a few clients, and what a file can name."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..algorithms import METHODS
from ..core.settings import shown
from ..data import DATASETS
from ..data.sample_spec import SampleSpec
from ..networks import NETWORKS
from ..runs import Experiment
from ..runs.comparison import DataReader
from ..server import Training, connect
from .tables import Column, Table
from .theme import MB, plural

FEW = 8  # clients that train


def check_table(experiments: Mapping[str, Experiment], base: Path) -> Table:
    """One row per method: what was built, and what a round of training costs. Nothing is written."""
    columns = (
        Column("method", text=True),
        Column("data", text=True),
        Column("parameters", "common + canonical of each model", text=True),
        Column("rounds", show="{:,.0f}".format),
        Column("MB up", "sent by a client in a round", "{:.3g}".format),
        Column("MB down", "received by a client in a round", "{:.3g}".format),
        Column("ms", "work for a client in a round, the first one here", "{:.3g}".format),
    )
    read = DataReader()
    return Table("", columns, tuple(_tried(label, one, base, read) for label, one in experiments.items()))


def _tried(label: str, experiment: Experiment, base: Path, read: DataReader) -> tuple[Any, ...]:
    federation = read(experiment, base)
    few = federation.select(federation.ids[:: max(1, federation.n_clients // FEW)][:FEW])
    population = experiment.build_population(SampleSpec.of(federation), experiment.seeds[0], base)
    if experiment.start is None and experiment.method.local.lr == "auto":  # the search takes many rounds
        experiment = experiment.model_copy(update={"method": experiment.method.with_local(lr=0.01)})
    affinity = experiment.build_affinity(few, base)
    transport = connect(few, population, experiment.build_engine())
    training = Training(transport, population, experiment.method, rounds=1, seed=experiment.seeds[0], affinity=affinity)
    begun = time.perf_counter()
    training.begin()
    (end,) = training.rounds()
    seconds = time.perf_counter() - begun
    n = few.n_clients
    sizes = dict.fromkeys(("common", "canonical"), 0)
    for name, p in population.net.named_parameters():
        if p.requires_grad:
            sizes["canonical" if name in population.canonical_names else "common"] += p.numel()
    data = f"{plural(federation.n_clients, 'client')}, {plural(len(federation.train), 'training sample')}"
    up, down = (end.record.get(f"bytes_{way}", 0) / n / MB for way in ("up", "down"))
    parameters = f"{sizes['common']:,} + {sizes['canonical']:,}"
    return label, data, parameters, experiment.rounds, up, down, 1e3 * seconds / n


def registry_tables() -> Iterator[Table]:
    """Methods, networks and data sets by the names that experiment files have for them, with their settings."""
    for title, table, registry in (
        ("Methods", "[method]", METHODS), ("Networks", "[model]", NETWORKS), ("Data sets", "[data]", DATASETS)
    ):  # fmt: skip
        rows = tuple((name, ", ".join(_settings(kind))) for name, kind in registry.items())
        note = f'In {table}, with name = "..."; "module:object" names one of your own.'
        yield Table(title, (Column("name", text=True), Column("settings", text=True)), rows, (note,))


def _settings(kind: Any) -> Iterator[str]:
    for name, field in kind.model_fields.items():
        if name != "name":
            yield name if field.is_required() else f"{name}={shown(field.default)}"
