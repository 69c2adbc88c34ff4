"""Callbacks for `fit(..., on_round=...)`, ready-made.

A callback is anything that can be called with the record of a round, a dict such as `{"round": 3, "loss": 0.41,
"accuracy": 0.88, ...}`; scores are in it where the round was evaluated. To end the training there, return True.

An object may also have two methods. `begin(setting)` is called once before training, with a `FitSetting`, and may raise
an error where the callback cannot work. `end()` is called once afterwards, also where training ended in an error.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from .algorithms.contract import Method, Problem
from .errors import SettingError
from .server import Record, Watch

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

Callback = Callable[[Record], object]  # with `begin` and `end` where it has them


class FitSetting(NamedTuple):
    """What is known before training.

    >>> import torch
    >>> from ppfl import FedAvg, Population, fit
    >>> from ppfl.data import digits_federation
    >>> class Announce:
    ...     def begin(self, setting):
    ...         print(setting.problem.n_clients, "clients,", setting.problem.rounds, "rounds of", setting.method.title)
    ...     def __call__(self, record):
    ...         print("round", record["round"])
    ...     def end(self):
    ...         print("done")
    >>> population = Population(torch.nn.Linear(64, 10), k=1)
    >>> fitted = fit(population, digits_federation(), FedAvg(lr=0.1), rounds=2, on_round=Announce())
    40 clients, 2 rounds of FedAvg
    round 1
    round 2
    done
    """

    problem: Problem  # population, client ids, rounds, seed, splits
    method: Method  # its lr may still be "auto"
    watch: Watch

    @property
    def measured(self) -> tuple[str, ...]:
        """The figures that every evaluated round has."""
        metric = self.problem.population.loss.metric_name
        splits = [split for split in ("test", "validation") if split in self.problem.splits]
        names = [name for split in splits for name in (f"{split}_{metric}".removeprefix("test_"), f"{split}_loss")]
        needed = self.watch.output == "best" and "validation" not in splits  # "best" is by the objective then
        return ("loss", *names, *(["objective"] if self.watch.objective or needed else []))


class EarlyStopping:
    """End training when a figure has not improved by more than `min_delta` in `patience` evaluations.

    metric: the name of a figure in the record, such as "loss" (training), "accuracy" (test data), "validation_loss" or
    "validation_accuracy". Accuracies should rise, everything else should fall. To stop by test data makes the test
    score too good: hold out validation data with `federation.holdout(0.1, into="validation")` and use these.

    Which state is returned is decided by `Watch`: that of the last round that ran, or with `Watch(output="best")` that
    of the round with the lowest loss on validation data. With `EarlyStopping(metric="validation_loss")` this is
    `best_round`. `Watch(output="random")` cannot be combined with early stopping.

    >>> stopping = EarlyStopping(patience=2, metric="accuracy")
    >>> [stopping({"round": t + 1, "accuracy": a}) for t, a in enumerate([0.5, 0.7, 0.6, 0.7])]
    [False, False, False, True]
    >>> stopping.best_round, stopping.best
    (2, 0.7)
    """

    def __init__(self, patience: int = 10, metric: str = "loss", min_delta: float = 0.0) -> None:
        if patience < 1 or not 0 <= min_delta < math.inf:
            raise SettingError(
                f"patience is {patience} and min_delta is {min_delta}; set patience >= 1 and min_delta >= 0"
            )
        self.patience, self.metric, self.min_delta = patience, metric, min_delta
        self._reset()

    def _reset(self) -> None:
        self.best: float | None = None  # of the figure
        self.best_round: int | None = None
        self.waited = 0  # evaluations since then

    def begin(self, setting: FitSetting) -> None:
        """Start anew; refuse a figure that this fit will not measure."""
        if setting.watch.output == "random":
            raise SettingError(
                'output = "random" draws the round before training, and early stopping may never get there; '
                'use Watch(output="last") or "best"'
            )
        if self.metric not in setting.measured and not setting.watch.stationarity:
            held_out = self.metric.startswith("validation") and "validation" not in setting.problem.splits
            advice = 'use federation.holdout(0.1, into="validation")' if held_out else "use one of these"
            raise SettingError(
                f"early stopping by {self.metric!r}, which is not measured in this fit "
                f"(measured: {', '.join(setting.measured)}); {advice}"
            )
        self._reset()

    def __call__(self, record: Record) -> bool:
        if self.metric not in record:  # a round without evaluation
            return False
        value = float(record[self.metric])
        sign = -1 if self.metric.endswith("accuracy") else 1
        if self.best is None or sign * (self.best - value) > self.min_delta or math.isnan(self.best):
            self.best, self.best_round, self.waited = value, int(record["round"]), 0
        else:
            self.waited += 1
        return self.waited >= self.patience


class CSVLog:
    """Write the figures of every round to a CSV file, one line per round; a file that exists is replaced.

    Every line is written at once, so that a process that is killed leaves whole lines. Figures of a client, such as
    its own score, are not written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     log = CSVLog(f"{folder}/rounds.csv")
    ...     log({"round": 1, "loss": 0.5})
    ...     log({"round": 2, "loss": 0.25, "accuracy": 0.75})
    ...     print(log.file.read_text(), end="")
    round,loss,accuracy
    1,0.5,
    2,0.25,0.75
    """

    def __init__(self, file: str | PathLike[str]) -> None:
        self.file = Path(file)
        self._columns: list[str] = []

    def begin(self, setting: FitSetting) -> None:
        """Make the folder, and forget the columns of another fit."""
        from .io.files import make_folder  # here and below, so that a fit without a file need not import it

        make_folder(self.file.parent)
        self._columns = []

    def __call__(self, record: Record) -> None:
        from .io.files import writing

        row = _numbers(record)
        new = [name for name in row if name not in self._columns]
        if new:
            self._add_columns(new)
        with writing(self.file), self.file.open("ab", buffering=0) as file:
            file.write(_csv_line([row.get(name) for name in self._columns]))

    def _add_columns(self, new: list[str]) -> None:
        """Write the file again with more columns: the first evaluated round has figures that others have not."""
        from .io.files import write_bytes

        rows: list[list[str]] = []
        if self._columns:
            with self.file.open(newline="", encoding="utf-8") as file:
                rows = list(csv.reader(file))[1:]
        self._columns += new
        lines = [self._columns, *([*row, *[""] * len(new)] for row in rows)]
        write_bytes(self.file, b"".join(map(_csv_line, lines)))


class TensorBoard:
    """Write the figures of every round for TensorBoard: `tensorboard --logdir FOLDER`.

    It needs an extra: `pip install 'ppfl[tensorboard]'`.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     board = TensorBoard(folder)
    ...     board({"round": 1, "loss": 0.5})
    ...     board.end()
    ...     [file.name.split(".")[0] for file in board.folder.iterdir()]
    ['events']
    """

    def __init__(self, folder: str | PathLike[str]) -> None:
        try:
            import torch.utils.tensorboard  # noqa: F401  # here, so that training does not begin in vain
        except ImportError as error:
            raise SettingError(
                f"TensorBoard({str(folder)!r}) needs the package tensorboard ({error}); "
                f"use pip install 'ppfl[tensorboard]'"
            ) from None
        self.folder = Path(folder)
        self._writer: SummaryWriter | None = None

    def __call__(self, record: Record) -> None:
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self.folder))
        for name, value in _numbers(record).items():
            if name != "round":
                self._writer.add_scalar(name, value, record["round"])

    def end(self) -> None:
        """Write what is still in memory."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _numbers(record: Record) -> dict[str, int | float]:
    return {name: value for name, value in record.items() if isinstance(value, int | float)}


def _csv_line(cells: list[str] | list[int | float | None]) -> bytes:
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(cells)
    return line.getvalue().encode()
