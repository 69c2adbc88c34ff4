"""A run folder: one seed's run as files. Nothing in it is overwritten unless a run is resumed.

run.json                the experiment as it was asked for, the method as it ran (lr = "auto" has become a number), the
                        fingerprint of the data, of which run the start is, and what it ran on
clients.json            ids, sizes, true memberships where they are known, and what a sample is; over sites clients
                        may leave, and `changes` says after which round, and where the others stood
metrics.jsonl           one line per round
memberships.log         at the rounds that were evaluated; round_log.py says how it is read
start.safetensors       only with [start]: the network it began with
checkpoint.safetensors  state and kept state after the last round that is safe
result.safetensors      the state the run returns, with its scores; a run that has it is finished

JSON and tensors carry the SHA-256 of their content. The checkpoint and the result hold a chain: the digests of run.json
and clients.json, and of the two logs the length and the SHA-256 at that time; run.json has the digest of the start. So
a changed bit, a lost line and a file of another run are found by comparing these, and to resume is to cut the logs to
these lengths. The checkpoint and the result also name what the run was resumed on.
"""

from __future__ import annotations

import shutil
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ..algorithms.contract import Method
from ..core.settings import shown
from ..core.trees import Params, Tree
from ..data.federation import Federation
from ..data.sample_spec import SampleSpec
from ..errors import CheckpointError
from ..io.codec import dump, load, message, read_about, read_digest
from ..io.files import PARTIAL, atomic_write, damaged, digest_of, flush, read_json, write_json, writing
from ..server import Checkpoint, ServerState
from ..sites import SavedStates
from .experiment import Experiment
from .provenance import describe_environment, package_version
from .round_log import Record, RoundLog, finite
from .states import check_values, pack, pack_clients, pack_server, unpack


@message
class StartNetwork(NamedTuple):
    """The network that a run began with, and of which run it is."""

    values: Params
    about: Record


@message
class Result(NamedTuple):
    """What a run returned. As it is read, the server's state is its leaves by name, such as "shared.0.weight"."""

    state: ServerState
    clients: SavedStates
    memberships: Tensor | None  # (M, K), where clients show them
    scores: Record


class SavedRun(NamedTuple):
    """All that a run folder says."""

    about: Record  # run.json
    clients: Record
    resumed: list[Record]  # what it was resumed on
    metrics: list[Record]
    memberships: dict[int, Tensor]  # (M, K) by round
    result: Result | None  # of a finished run

    @property
    def experiment(self) -> Record:
        """All settings, with the method as it ran."""
        return {**self.about["experiment"], "method": self.about["method"]}


class RunFolder:
    """Where the run of an experiment with one seed is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.run_file, self.clients_file = path / "run.json", path / "clients.json"
        self.start_file, self.result_file = path / "start.safetensors", path / "result.safetensors"
        self.checkpoint_file = path / "checkpoint.safetensors"
        self._next_clients = path / "clients.next.json"
        self.log = RoundLog(path)
        self._clients = 0, ""  # how many are in clients.json, and its digest
        self._resumed: list[Record] = []

    @property
    def started(self) -> bool:
        """Whether there is a run."""
        return self.run_file.is_file()

    @property
    def finished(self) -> bool:
        """Whether the run came to its end."""
        return self.result_file.is_file()

    @cached_property
    def about(self) -> Record:
        """What was known before the first round."""
        return read_json(self.run_file)

    # ------------------------------------------------------------------ before the first round

    def claim(self, experiment: Experiment, *, resume: bool) -> None:
        """Refuse a folder that holds anything else, and this experiment unless it is to be resumed."""
        if not self.started:
            if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
                raise CheckpointError(f"{self.path} exists and is not a run; choose another --out")
            return
        there, here = self.about["experiment"], experiment.model_dump(mode="json")
        if there != here:
            raise CheckpointError(
                f"{self.path} exists with another experiment ({_difference(there, here)}); choose another --out"
            )
        if not resume:
            done = len(self.read().metrics)
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

        method: as it runs. clients: as `describe_clients` has them.
        """
        beside = RunFolder(self.path.with_name(self.path.name + PARTIAL))
        ran = experiment.model_copy(update={"method": method}).model_dump(mode="json", include={"method"})
        about: Record = {"experiment": experiment.model_dump(mode="json"), **ran, "data": clients["data"]}
        with writing(self.path):
            beside._remove_leftovers()
            try:
                beside.path.mkdir(parents=True)
                for file in beside.log.files:
                    file.touch()
                if start is not None:
                    _write(beside.start_file, start.values, "start", {})
                    about["start"] = [start.about, read_digest(beside.start_file)]
                beside.write_clients(clients)
                write_json(beside.run_file, {**about, "environment": environment})
                beside.path.rename(self.path)
            except BaseException:
                shutil.rmtree(beside.path, ignore_errors=True)
                raise
            flush(self.path.parent)
        self._clients = beside._clients

    def write_clients(self, clients: Record) -> None:
        """The clients, before the first round."""
        write_json(self.clients_file, clients)
        self._clients = len(clients["ids"]), digest_of(clients)

    def change_clients(self, clients: Record, checkpoint: Checkpoint) -> None:
        """Fewer clients than before, and a checkpoint of the state that knows these alone; both or neither."""
        write_json(self._next_clients, clients)
        self._clients = len(clients["ids"]), digest_of(clients)
        self.checkpoint(checkpoint)
        self.finish_change()

    def finish_change(self) -> None:
        """What `change_clients` does last, where a kill came before it; or undo what it had begun."""
        if not self._next_clients.exists():
            return
        digest = digest_of(read_json(self._next_clients))
        if self.checkpoint_file.exists() and read_about(self.checkpoint_file, "checkpoint")["clients"] == digest:
            self._next_clients.replace(self.clients_file)
            flush(self.path)
        else:
            self._next_clients.unlink()

    def _remove_leftovers(self) -> None:
        """Of a process that was killed while it made this folder."""
        if self.path.exists():
            files = (*vars(self).values(), *self.log.files)
            ours = {file.name for file in files if isinstance(file, Path)}
            for item in sorted(self.path.iterdir()):
                if item.name.removesuffix(PARTIAL) not in ours:
                    raise CheckpointError(f"{item} is in the way of a new run; move it to another folder")
            shutil.rmtree(self.path)

    # ------------------------------------------------------------------ on the way

    def checkpoint(self, checkpoint: Checkpoint) -> None:
        """Make everything up to this state safe."""
        at = {"round": checkpoint.state.round, "exchange": checkpoint.state.exchange}
        _write(self.checkpoint_file, pack(checkpoint, self._clients[0]), "checkpoint", at | self._chain())

    def finish(self, result: Result) -> None:
        """Write the state the run returns, which ends it."""
        state, clients = pack_server(result.state), pack_clients(result.clients, self._clients[0])
        _write(self.result_file, Result(state, clients, result.memberships, finite(result.scores)), "result",
               self._chain())  # fmt: skip

    def _chain(self) -> Record:
        """What ties a file to this run and to what its other files hold so far."""
        digests = {"run": digest_of(self.about), "clients": self._clients[1]}
        return {**digests, "logs": self.log.marks(), "resumed": self._resumed}

    # ------------------------------------------------------------------ going on

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
        if (version := self.about["environment"]["ppfl"]) != package_version("ppfl"):
            raise CheckpointError(
                f"{self.path} was begun with ppfl {version}, this is {package_version('ppfl')}, which may not give the "
                f"same result; install the older version, or choose another --out"
            )
        found, chain = None, self._read_chain(there)
        if self.checkpoint_file.exists():
            # the clients' states stay in the file: sites copy them, to memory or to files of their own
            packed = load(self.checkpoint_file, "checkpoint", mapped=("clients.", "kept_clients."))
            found = unpack(self.checkpoint_file, packed, server, client, tuple(clients["ids"]))
        self.log.cut(chain["logs"])
        self._clients = len(clients["ids"]), digest_of(clients)
        self._resumed = [*chain["resumed"], describe_environment()]
        return found

    def saved_at(self) -> Record | None:
        """The `round` and the `exchange` of the checkpoint; None where there is none."""
        return read_about(self.checkpoint_file, "checkpoint") if self.checkpoint_file.exists() else None

    # ------------------------------------------------------------------ reading it

    def read(self) -> SavedRun:
        """All of it; it may grow meanwhile, where the run is not finished."""
        try:
            # in this order, as the run may go on meanwhile
            result = load(self.result_file, "result") if self.finished else None
            clients, whole = read_json(self.clients_file), result is not None
            chain = self._read_chain(clients)
            metrics = self.log.read_metrics(chain["logs"], whole=whole)
            by_round = self.log.read_memberships(
                chain["logs"], len(metrics), len(clients["ids"]), whole=whole, changes=clients.get("changes", ())
            )
            if result is not None:
                shown = {} if result.memberships is None else {"memberships": result.memberships}
                check_values(self.result_file, {**result.state.server, **shown})
            return SavedRun(self.about, clients, chain["resumed"], metrics, by_round, result)
        except (KeyError, TypeError, AttributeError) as error:
            raise damaged(self.path, f"lacks {error} in one of its files") from None

    def read_start(self) -> StartNetwork | None:
        """What the run began with; None where it began with the network's own start values."""
        if "start" not in self.about:
            return None
        about, digest = self.about["start"]
        values = load(self.start_file, "start")
        if read_digest(self.start_file) != digest:
            raise damaged(self.start_file, f"is of another run than {self.run_file.name}")
        check_values(self.start_file, values)
        return StartNetwork(values, about)

    def _read_chain(self, clients: Record) -> Record:
        """What the result, or else the checkpoint, says of the other files; nothing where neither is there."""
        if clients["data"] != self.about["data"]:
            raise damaged(self.clients_file, f"is of another run than {self.run_file.name}")
        for file, kind in ((self.result_file, "result"), (self.checkpoint_file, "checkpoint")):
            if file.exists():
                chain = read_about(file, kind)
                if chain["run"] != digest_of(self.about):
                    raise damaged(file, f"is of another run than {self.run_file.name}")
                if kind == "result" and chain["clients"] != digest_of(clients):  # sites may join after a checkpoint
                    raise damaged(file, f"is of another run than {self.clients_file.name}")
                return chain
        return {"logs": {}, "resumed": []}


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


def method_that_ran(experiment: Experiment, about: Record) -> Method:
    """The method of a run, with what it chose where its experiment says "auto". about: what run.json says."""
    settings = {key: value for key, value in about["method"].items() if key != "name"}
    return type(experiment.method).model_validate(settings)


def _write(path: Path, value: Any, kind: str, about: Record) -> None:
    with atomic_write(path) as file:
        dump(value, file, kind, about=about)


def _difference(there: Any, here: Any, key: str = "") -> str:
    """The first difference, in a few words however long the two are.

    >>> _difference({"ids": ["a", "b", "c"]}, {"ids": ["a", "x", "c"]})
    "ids[1] is 'b' there and 'x' here"
    """
    if isinstance(there, dict) and isinstance(here, dict):
        odd = next(name for name in {**there, **here} if there.get(name) != here.get(name))
        return _difference(there.get(odd), here.get(odd), f"{key}.{odd}" if key else odd)
    if isinstance(there, list) and isinstance(here, list):
        if len(there) != len(here):
            return f"{key} has {len(there):,} entries there and {len(here):,} here"
        at = next(at for at, pair in enumerate(zip(there, here, strict=True)) if pair[0] != pair[1])
        return _difference(there[at], here[at], f"{key}[{at}]")
    return f"{key} is {shown(there)} there and {shown(here)} here"
