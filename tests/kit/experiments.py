"""Small experiments and the runs of them: stopped, interrupted, compared byte by byte, and started by `ppfl`."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tomli_w
import torch

from ppfl.algorithms import PPFL
from ppfl.algorithms.contract import Rows as Rows
from ppfl.cli import main
from ppfl.cli.reproduce import tasks_of_study, write_study
from ppfl.core.trees import named_leaves as named_leaves
from ppfl.io.codec import dump, load
from ppfl.io.files import read_json as read_json
from ppfl.io.files import write_json as write_json
from ppfl.io.lock import locked as locked
from ppfl.paper import Study
from ppfl.runs import Experiment, OnRoundEnd, RunFolder, RunRecord
from ppfl.runs.affinities import AFFINITIES as AFFINITIES
from ppfl.runs.comparison import run_tasks
from ppfl.server import RoundEnd
from ppfl.sites import Site

from .files import limited

SMALL: dict[str, Any] = {
    "name": "small",
    "rounds": 6,
    "data": {"name": "synthetic_groups", "n_clients": 6, "groups": 2, "dim": 3, "samples": 9, "test_points": 4},
    "model": {"name": "linear"},
    "population": {"k": 2, "mix": "predictions"},
    "method": {"name": "ppfl", "lr": 0.3, "batch_size": 4},
    "watch": {"every": 2},
}
SHORT = {"rounds": 4, "data": SMALL["data"], "model": SMALL["model"], "population": {"k": 2}}
TEXT = tomli_w.dumps(SHORT | {"method": {"name": "ppfl", "lr": 0.3}})


def small_experiment(**changes: Any) -> Experiment:
    return Experiment.model_validate(SMALL | changes)


def write_experiment(folder: Path, text: str = TEXT, name: str = "groups") -> Path:
    """An experiment file, by default of an experiment that runs in a moment."""
    file = folder / f"{name}.toml"
    file.write_text(text)
    return file


def file_bytes(folder: Path) -> dict[str, bytes]:
    """Every file in a folder, by its path there."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def content_of(file: Path) -> dict[str, Any]:
    """What a checkpoint, a result or a start holds, by name: tensors, numbers and texts."""
    return named_leaves(load(file, file.stem))


def written_and_read(file: Path, value: Any, mapped: tuple[str, ...] = ()) -> Any:
    """The value, through a file."""
    with file.open("wb") as opened:
        dump(value, opened, file.stem)
    return load(file, file.stem, mapped=mapped)


def tensors_of(file: Path) -> dict[str, torch.Tensor]:
    """The tensors among that."""
    return {name: leaf for name, leaf in content_of(file).items() if isinstance(leaf, torch.Tensor)}


def memory_limit(size: int) -> AbstractContextManager[None]:
    """In this context, what would take more bytes is refused."""
    return limited(bytes=size)


class StopError(Exception):
    """An error that only a test raises."""


def stop_after(round: int, error: type[BaseException] = StopError) -> OnRoundEnd:
    """Give this as `on_round_end`, and a run ends with an error after this round."""

    def stop(_seed: int, end: RoundEnd) -> None:
        if end.state.round == round:
            raise error

    return stop


class Place(NamedTuple):
    """The nth call of a function, before what it does or after it."""

    owner: type
    function: str
    call: int
    after: bool = False


PLACES = {
    "in the work of a client": Place(PPFL, "work", 4),
    "after all clients have worked": Place(Site, "train", 4, after=True),
    "before their work is merged": Place(PPFL, "merge", 3),
    "after it is merged": Place(PPFL, "merge", 3, after=True),
    "in an evaluation": Place(Site, "evaluate", 2),
    "before a state is kept": Place(Site, "keep", 1),
    "after a state is kept": Place(Site, "keep", 1, after=True),
    "while a checkpoint is written": Place(RunFolder, "checkpoint", 3),
    "after a checkpoint is written": Place(RunFolder, "checkpoint", 3, after=True),
}


def interrupt_at(patch: pytest.MonkeyPatch, place: Place) -> None:
    """Ctrl-C at this place, once."""
    original, calls = getattr(place.owner, place.function), iter(range(10**6))

    def stopped(*arguments: Any, **settings: Any) -> Any:
        if next(calls) != place.call:
            return original(*arguments, **settings)
        if place.after:
            original(*arguments, **settings)
        raise KeyboardInterrupt

    patch.setattr(place.owner, place.function, stopped)


def run_study(study: Study, out: Path) -> tuple[dict[str, dict[str, list[RunRecord]]], Path]:
    """What `ppfl reproduce` does: runs by case and method, and the page that shows them."""
    tasks = tasks_of_study(study, out)
    runs = {case: run_tasks(own, jobs=1) for case, own in tasks.items()}
    return runs, write_study(study, tasks, runs, out, f"ppfl reproduce {study.name}")


class Finished(NamedTuple):
    """What a shell sees of a command."""

    code: int
    out: str
    err: str


def call_ppfl(capsys: pytest.CaptureFixture[str], *arguments: object) -> Finished:
    """`ppfl` with these arguments, in this process, on a terminal of 100 columns."""
    capsys.readouterr()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "100")
        with pytest.raises(SystemExit) as ended:
            main([str(argument) for argument in arguments])
    return Finished(int(ended.value.code or 0), *capsys.readouterr())


def ppfl_command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Finished]:
    """`call_ppfl` for tests that call it often."""
    return lambda *arguments: call_ppfl(capsys, *arguments)
