"""A run folder: one seed's run as files. Nothing in it is overwritten unless a run is resumed.

experiment.json                  all settings, as they were asked for
chosen.json                      the method's settings as it ran: lr = "auto" has become a number
versions.json                    what it ran on, and when
clients.json                     ids, sizes, and true memberships where they are known
metrics.jsonl                    one line per round
memberships/<round>.safetensors  at the rounds that were evaluated
checkpoint.safetensors           state and kept state after the last round that is safe
result.safetensors               the state the run returns, with its scores; a run that has it is finished
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, NonNegativeInt, ValidationError
from torch import Tensor

from ..algorithms.contract import Method
from ..core.errors import CheckpointError
from ..data.federation import Federation
from ..server import Kept, ServerState
from .experiment import Experiment
from .provenance import describe_environment
from .storage import PARTIAL, damaged, flush, read_json, read_tensors, restore, save_tree, write_json, write_text

Record = dict[str, Any]


class Checkpoint(NamedTuple):
    """Where a run can be resumed: after the last round that is recorded in full."""

    state: ServerState
    clients: dict[str, Tensor]  # their states by name, leaves (M, ...) in the order of clients.json
    kept: Kept  # the state to return so far
    kept_clients: dict[str, Tensor]

    @property
    def numbers(self) -> CheckpointNumbers:
        """All but the tensors."""
        state, kept = self.state, self.kept.state
        return CheckpointNumbers(
            round=state.round, exchange=state.exchange, kept_round=kept.round, kept_exchange=kept.exchange,
            criterion=self.kept.criterion,
        )  # fmt: skip

    @classmethod
    def of(cls, numbers: CheckpointNumbers, tensors: dict[str, Any]) -> Checkpoint:
        """Put together again, from `tensors` as `tensors` has them."""
        now, kept = tensors["state"], tensors.get("kept", tensors["state"])
        state = ServerState(numbers.round, numbers.exchange, now["server"])
        kept_state = ServerState(numbers.kept_round, numbers.kept_exchange, kept["server"])
        return cls(state, now["clients"], Kept(kept_state, numbers.criterion), kept["clients"])

    @property
    def tensors(self) -> dict[str, Any]:
        """As a tree; the kept state only where it is another one."""
        parts = {"state": {"server": self.state.server, "clients": self.clients}}
        if self.numbers.has_kept:
            parts["kept"] = {"server": self.kept.state.server, "clients": self.kept_clients}
        return parts


class CheckpointNumbers(BaseModel):
    """What a checkpoint says of itself."""

    round: NonNegativeInt
    exchange: NonNegativeInt
    kept_round: NonNegativeInt
    kept_exchange: NonNegativeInt
    criterion: float

    @property
    def has_kept(self) -> bool:
        """Whether the kept state is another one than the last."""
        return self.kept_round != self.round


class RunFolder:
    """Where the run of an experiment with one seed is written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.experiment_file = path / "experiment.json"
        self.chosen_file = path / "chosen.json"
        self.versions_file = path / "versions.json"
        self.clients_file = path / "clients.json"
        self.metrics_file = path / "metrics.jsonl"
        self.memberships_folder = path / "memberships"
        self.checkpoint_file = path / "checkpoint.safetensors"
        self.result_file = path / "result.safetensors"
        self._unflushed: list[Path] = []  # a round can wait for the disk until the next checkpoint

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
            done = here["rounds"] if self.finished else len(read_metrics(self.metrics_file))
            raise CheckpointError(
                f"{self.path} exists with rounds={here['rounds']} ({done} done); choose another --out or use --resume"
            )

    def begin(
        self, experiment: Experiment, method: Method, federation: Federation, environment: dict[str, str]
    ) -> None:
        """Make the folder, with what was known before the first round; it appears whole or not at all."""
        beside = RunFolder(self.path.with_name(self.path.name + PARTIAL))
        beside.memberships_folder.mkdir(parents=True, exist_ok=True)
        write_json(beside.experiment_file, experiment.model_dump(mode="json"))
        ran = experiment.model_copy(update={"algorithm": method})
        write_json(beside.chosen_file, ran.model_dump(mode="json", include={"algorithm"}))
        write_json(beside.versions_file, environment)
        write_json(beside.clients_file, _describe_clients(federation))
        beside.path.rename(self.path)

    def read_experiment(self) -> Record:
        """All settings, as the run has them."""
        return dict(read_json(self.experiment_file) | read_json(self.chosen_file))

    def resume(self, start: dict[str, Any], federation: Federation) -> Checkpoint | None:
        """Where to go on; None where no checkpoint was reached. What came after it is forgotten.

        `start` shows what a state looks like: the server's and the clients' tensors before the first round.
        """
        if read_json(self.clients_file) != _describe_clients(federation):
            raise CheckpointError(
                f"{self.clients_file} differs from the clients in the data, which changed since the run began; "
                f"bring them back, or choose another --out"
            )
        found = self._load_checkpoint(start) if self.checkpoint_file.exists() else None
        self._forget_after(0 if found is None else found.state.round)
        versions = read_json(self.versions_file)
        resumed = [*versions.get("resumed", []), describe_environment()]
        write_json(self.versions_file, versions | {"resumed": resumed})
        return found

    # ------------------------------------------------------------------ on the way

    def append(self, record: Record, memberships: Tensor | None) -> None:
        """Add a round to the record, with memberships where they are to be kept."""
        if memberships is not None:
            at = self.memberships_folder / f"{record['round']}.safetensors"
            save_tree(at, {"memberships": memberships}, {"round": record["round"]}, flushed=False)
            self._unflushed.append(at)
        with self.metrics_file.open("a", encoding="utf-8") as file:
            file.write(json.dumps(_plain(record), ensure_ascii=False, allow_nan=False) + "\n")

    def save_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Make everything up to this state safe."""
        for file in (*self._unflushed, self.memberships_folder, self.metrics_file):
            flush(file)
        self._unflushed.clear()
        numbers = checkpoint.numbers.model_dump()
        # the criterion as text, for JSON has no infinity
        save_tree(self.checkpoint_file, checkpoint.tensors, numbers | {"criterion": repr(numbers["criterion"])})

    def finish(self, returned: dict[str, Any], round: int, memberships: Tensor | None, scores: Record) -> None:
        """Write the state the run returns, which ends it."""
        own = {} if memberships is None else {"memberships": memberships}
        save_tree(self.result_file, returned | own, {"round": round, "scores": _plain(scores)})

    def _load_checkpoint(self, start: dict[str, Any]) -> Checkpoint:
        tensors, metadata = read_tensors(self.checkpoint_file)
        try:
            numbers = CheckpointNumbers.model_validate(metadata)
        except ValidationError:
            raise damaged(self.checkpoint_file, "does not say of which round it is") from None
        parts = ["state", "kept"] if numbers.has_kept else ["state"]
        return Checkpoint.of(numbers, restore(self.checkpoint_file, tensors, dict.fromkeys(parts, start)))

    def _forget_after(self, round: int) -> None:
        lines = _whole_lines(self.metrics_file)[:round]
        if len(lines) < round:
            raise damaged(self.metrics_file, f"has {len(lines)} rounds, fewer than the checkpoint's {round}")
        write_text(self.metrics_file, "".join(lines))
        for file in _items(self.memberships_folder):
            if file.suffix == PARTIAL or (file.stem.isdigit() and int(file.stem) > round):
                file.unlink()


def method_of(settings: Record, file: Path) -> Method:
    """The method of a run, from all its settings."""
    try:
        return Experiment.model_validate(settings).algorithm
    except ValidationError:
        raise damaged(file, "does not hold the settings of a method") from None


def read_metrics(path: Path) -> list[Record]:
    """The rounds recorded so far."""
    try:
        return [json.loads(line) for line in _whole_lines(path)]
    except ValueError as error:
        raise damaged(path, f"cannot be read ({error})") from None


def _whole_lines(path: Path) -> list[str]:
    """A last line that a kill cut short is not one."""
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return [line for line in text.splitlines(keepends=True) if line.endswith("\n")]


def _describe_clients(federation: Federation) -> Record:
    truth = federation.truth
    return {
        "ids": list(federation.ids),
        "samples": {split: samples.sizes.tolist() for split, samples in federation.splits.items()},
        "truth": None if truth is None else truth.memberships.tolist(),
    }


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


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
