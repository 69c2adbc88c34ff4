"""A run folder: one seed's run as files. Nothing in it is overwritten unless a run is resumed.

experiment.json         all settings, as they were asked for
chosen.json             the method's settings as it ran: lr = "auto" has become a number
clients.json            ids, sizes, true memberships where they are known, a fingerprint of the data, and what a
                        sample is: its shape and type, and the classes
versions.json           what it ran on, and when
metrics.jsonl           one line per round
memberships.log         at the rounds that were evaluated; round_log.py says how it is read
start.safetensors       only with [start]: the network it began with, and of which run that is
checkpoint.safetensors  state and kept state after the last round that is safe
result.safetensors      the state the run returns, with its scores; a run that has it is finished

JSON and tensors carry the SHA-256 of their content. All from versions.json on also say of which run they are, so that
files of two runs cannot be mixed up; of the two logs the checkpoint and the result say how long they were and their
SHA-256. The checkpoint and the result also name what the run was resumed on.
"""

from __future__ import annotations

import shutil
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError
from torch import Tensor

from ..algorithms.contract import Method, Roster
from ..core.trees import Params, Tree
from ..data.federation import Federation
from ..data.sample_spec import SampleSpec
from ..errors import CheckpointError
from ..io.codec import read_about
from ..io.files import PARTIAL, damaged, flush, read_json, write_json, writing
from ..server import Checkpoint
from .checkpoint import CheckpointNumbers, make_checkpoint, numbers_of, tensors_of
from .experiment import Experiment
from .identity import Identity
from .provenance import describe_environment, package_version
from .round_log import Record, RoundLog, finite_json
from .storage import read_tensors, restore, save_tree


class StartNetwork(NamedTuple):
    """The network that a run began with, and of which run it is."""

    values: Params
    about: Record


class RunFolder:
    """Where the run of an experiment with one seed is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.experiment_file = path / "experiment.json"
        self.chosen_file = path / "chosen.json"
        self.versions_file = path / "versions.json"
        self.clients_file = path / "clients.json"
        self.metrics_file = path / "metrics.jsonl"
        self.memberships_file = path / "memberships.log"
        self.start_file = path / "start.safetensors"
        self.checkpoint_file = path / "checkpoint.safetensors"
        self.result_file = path / "result.safetensors"
        self._resumed: list[Record] = []  # what the run was resumed on

    @property
    def started(self) -> bool:
        """Whether there is a run."""
        return self.experiment_file.is_file()

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return self.result_file.is_file()

    # ------------------------------------------------------------------ before the first round

    def claim(self, experiment: Experiment, *, resume: bool) -> None:
        """Refuse a folder that holds anything else, and this experiment unless it is to be resumed."""
        if not self.started:
            if self.path.exists() and (not self.path.is_dir() or _items(self.path)):
                raise CheckpointError(f"{self.path} exists and is not a run; choose another --out")
            return
        there, here = _with_defaults(read_json(self.experiment_file)), experiment.model_dump(mode="json")
        if there != here:
            raise CheckpointError(
                f"{self.path} exists with another experiment ({_difference(there, here)}); choose another --out"
            )
        if not resume:
            done = here["rounds"] if self.finished else len(self.log.read_metrics(self.read_chain()["logs"]))
            raise CheckpointError(
                f"{self.path} exists with rounds={here['rounds']} ({done} done); choose another --out or use --resume"
            )

    def begin(
        self,
        experiment: Experiment,
        method: Method,
        clients: Record,
        environment: Record,
        start: StartNetwork | None = None,
    ) -> None:
        """Make the folder, with what was known before the first round; it appears whole or not at all.

        clients: as `describe_clients` has them.
        """
        beside = RunFolder(self.path.with_name(self.path.name + PARTIAL))
        ran = experiment.model_copy(update={"method": method})
        asked, chosen = experiment.model_dump(mode="json"), ran.model_dump(mode="json", include={"method"})
        with writing(self.path):
            beside._remove_leftovers()
            try:
                beside.path.mkdir(parents=True)
                beside.metrics_file.touch()
                beside.memberships_file.touch()
                write_json(beside.experiment_file, asked)
                write_json(beside.chosen_file, chosen)
                write_json(beside.clients_file, clients)
                identity = Identity.of(asked | chosen, clients, environment["ppfl"])
                write_json(beside.versions_file, {**environment, "run": identity._asdict()})
                if start is not None:
                    about = {"start": start.about, "run": identity._asdict()}
                    save_tree(beside.start_file, start.values, "start", about)
                beside.path.rename(self.path)
            except BaseException:
                shutil.rmtree(beside.path, ignore_errors=True)
                raise
            flush(self.path.parent)

    def write_clients(self, clients: Record) -> None:
        """Other clients than at the beginning, where sites have joined; their digest stays."""
        write_json(self.clients_file, clients)

    def _remove_leftovers(self) -> None:
        """Of a process that was killed while it made this folder."""
        ours = {file.name for file in vars(self).values() if isinstance(file, Path)}
        for item in _items(self.path):
            if item.name.removesuffix(PARTIAL) not in ours:
                raise CheckpointError(f"{item} is in the way of a new run; move it to another folder")
        if self.path.exists():
            shutil.rmtree(self.path)

    @cached_property
    def identity(self) -> Identity:
        """Which run this is."""
        try:
            versions = read_json(self.versions_file)
            run = Identity.of(self.read_experiment(), read_json(self.clients_file), versions["ppfl"])
            run.refuse_other(self.versions_file, versions["run"])
            return run
        except (KeyError, TypeError) as error:
            raise damaged(self.path, f"lacks {error} in one of its files") from None

    @cached_property
    def log(self) -> RoundLog:
        """What is recorded of the rounds."""
        return RoundLog(self.metrics_file, self.memberships_file)

    def read_experiment(self) -> Record:
        """All settings, as the run has them."""
        return dict(read_json(self.experiment_file) | read_json(self.chosen_file))

    def resume(self, server: Tree, client: Tree, clients: Record) -> Checkpoint | None:
        """Where to go on; None where no checkpoint was reached. What came after it is forgotten.

        server, client: what states look like, the server's and that of one client, before the first round.
        """
        there = read_json(self.clients_file)
        if there != clients:
            raise CheckpointError(
                f"{self.clients_file} differs from the data, which changed since the run began "
                f"({_difference(there, clients)}); bring the old data back, or choose another --out"
            )
        if self.identity.version != package_version("ppfl"):
            raise CheckpointError(
                f"{self.path} was begun with ppfl {self.identity.version}, this is {package_version('ppfl')}, which "
                f"may not give the same result; install the older version, or choose another --out"
            )
        found = self._load_checkpoint(server, client) if self.checkpoint_file.exists() else None
        chain = self.read_chain()
        self._resumed = [*chain["resumed"], describe_environment()]
        self.log.cut(chain["logs"])
        return found

    # ------------------------------------------------------------------ on the way

    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Make everything up to this state safe."""
        numbers = numbers_of(checkpoint).model_dump()
        # the criterion as text, for JSON has no infinity
        about = numbers | {"criterion": repr(numbers["criterion"])} | self._chain()
        save_tree(self.checkpoint_file, tensors_of(checkpoint), "checkpoint", about)

    def finish(self, returned: dict[str, Any], round: int, memberships: Tensor | None, scores: Record) -> None:
        """Write the state the run returns, which ends it."""
        own = {} if memberships is None else {"memberships": memberships}
        about = {"round": round, "scores": finite_json(scores)} | self._chain()
        save_tree(self.result_file, returned | own, "result", about)

    def _chain(self) -> Record:
        """What ties a file to this run and to what its logs have so far."""
        return {"run": self.identity._asdict(), "logs": self.log.marks(), "resumed": self._resumed}

    # ------------------------------------------------------------------ reading it

    def read_start(self) -> StartNetwork | None:
        """What the run began with; None where it began with the network's own start values."""
        if self.read_experiment().get("start") is None:
            return None
        tensors, about = read_tensors(self.start_file, "start")
        self.identity.refuse_other(self.start_file, about.get("run"))
        return StartNetwork(tensors, about["start"])

    def read_result(self) -> tuple[dict[str, Tensor], Record]:
        """The tensors of the state that the run returned, its memberships where clients show them, and metadata."""
        tensors, about = read_tensors(self.result_file, "result")
        self.identity.refuse_other(self.result_file, about.get("run"))
        return tensors, about

    def read_chain(self) -> Record:
        """What the result, or else the checkpoint, says of this run and its logs; nothing where neither is there."""
        for file, kind in ((self.result_file, "result"), (self.checkpoint_file, "checkpoint")):
            if file.exists():
                about = read_about(file, kind)
                self.identity.refuse_other(file, about.get("run"))
                return about
        return {"logs": {}, "resumed": []}

    def read_versions(self, chain: Record) -> Record:
        """What the run ran on, and what it was resumed on."""
        versions = {key: value for key, value in read_json(self.versions_file).items() if key != "run"}
        return versions | ({"resumed": chain["resumed"]} if chain["resumed"] else {})

    def read_checkpoint_exchange(self) -> int | None:
        """The exchange of the checkpoint; None where there is none."""
        about = read_about(self.checkpoint_file, "checkpoint") if self.checkpoint_file.exists() else None
        return None if about is None else self._numbers(about).exchange

    def _numbers(self, about: Record) -> CheckpointNumbers:
        try:
            return CheckpointNumbers.model_validate(about)
        except ValidationError:
            raise damaged(self.checkpoint_file, "does not say of which round it is") from None

    def _load_checkpoint(self, server: Tree, client: Tree) -> Checkpoint:
        # the clients' states stay in the file: sites copy them, to memory or to files of their own
        tensors, about = read_tensors(self.checkpoint_file, "checkpoint", mapped=("state.clients.", "kept.clients."))
        self.identity.refuse_other(self.checkpoint_file, about.get("run"))
        numbers = self._numbers(about)
        tree = restore(self.checkpoint_file, tensors, numbers.template(server, client))
        return make_checkpoint(numbers, tree, Roster(read_json(self.clients_file)["ids"]))


def method_of(settings: Record, file: Path) -> Method:
    """The method of a run, from all its settings."""
    try:
        return Experiment.model_validate(settings).method
    except ValidationError:
        raise damaged(file, "does not hold the settings of a method") from None


def describe_clients(federation: Federation, fingerprint: str) -> Record:
    """What a run folder says of the clients."""
    truth = federation.truth
    return {
        "ids": list(federation.ids),
        "samples": {split: samples.sizes.tolist() for split, samples in federation.splits.items()},
        "truth": None if truth is None else truth.memberships.tolist(),
        "data": fingerprint,
        "spec": SampleSpec.of(federation).model_dump(mode="json"),
    }


def _with_defaults(settings: Record) -> Record:
    """Settings that a run began with, and the defaults of those that have come since."""
    try:
        return Experiment.model_validate(settings).model_dump(mode="json")
    except ValidationError:
        return settings


def _difference(there: Any, here: Any, key: str = "") -> str:
    if isinstance(there, dict) and isinstance(here, dict):
        odd = next(name for name in {**there, **here} if there.get(name) != here.get(name))
        return _difference(there.get(odd), here.get(odd), f"{key}.{odd}" if key else odd)
    return f"{key} is {there!r} there and {here!r} here"


def _items(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []
