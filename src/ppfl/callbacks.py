"""What a fit reports while it runs: callbacks, a progress bar, and Python's logging.

A callback is anything that can be called with the record of a round, a dict such as `{"round": 3, "loss": 0.41,
"accuracy": 0.88, ...}`; scores are in it where the round was evaluated. To end the training there, return True.

An object may also have two methods. `begin(setting)` is called once before training, with a `FitSetting`, and may raise
an error where the callback cannot work. `end()` is called once afterwards, also where training ended in an error.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np

from .algorithms.contract import Method, Problem
from .errors import SettingError
from .server import Record, RoundEnd, Watch
from .server.evaluation import figures_of_split

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = ["Callback", "EarlyStopping", "FitSetting", "OnRound", "TensorBoard"]

Callback = Callable[[Record], object]  # with `begin` and `end` where it has them
OnRound = Callback | Sequence[Callback] | None

# No handler is added to it: what becomes of the messages is for the program to say, as with logging.basicConfig.
logger = logging.getLogger("ppfl")


class FitSetting(NamedTuple):
    """What is known before training.

    Attributes:
        problem: Population, client ids, rounds, seed and splits.
        method: The method; its lr may still be "auto".
        watch: What is measured, and which state is returned.

    Example:
        >>> import torch
        >>> from ppfl import FedAvg, Population, fit
        >>> from ppfl.data import digits_federation
        >>> class Announce:
        ...     def begin(self, setting):
        ...         print(setting.problem.n_clients, "clients, method", setting.method.title)
        ...     def __call__(self, record):
        ...         print("round", record["round"])
        ...     def end(self):
        ...         print("done")
        >>> population = Population(torch.nn.Linear(64, 10), k=1)
        >>> fitted = fit(population, digits_federation(), FedAvg(lr=0.1), rounds=2, on_round=Announce())
        40 clients, method FedAvg
        round 1
        round 2
        done
    """

    problem: Problem
    method: Method
    watch: Watch

    @property
    def measured(self) -> dict[str, bool | None]:
        """The figures that every evaluated round has, and whether higher is better; None where that is not known."""
        watch, loss, splits = self.watch, self.problem.population.loss, self.problem.splits
        found: dict[str, bool | None] = {"loss": False}
        for split in ("test", "validation"):
            if split in splits:
                found |= figures_of_split(split, loss, watch.metrics)
        if watch.objective or (
            watch.output == "best" and "validation" not in splits
        ):  # "best" is by the objective then
            found["objective"] = False
        if watch.stationarity and self.method.stationarity_task(self.problem) is not None:
            found["stationarity"] = False
        return found


class EarlyStopping:
    """Ends training when a figure has not improved in the last few evaluations.

    To stop by test data makes the test score too good: hold out validation data with
    `federation.holdout(0.1, into="validation")` and use `metric="validation_loss"`.

    `Watch` decides which state is returned: that of the last round that ran, or with `Watch(output="best")` that of the
    round with the lowest loss on validation data. With `metric="validation_loss"` this is `best_round`.

    Args:
        patience: Number of evaluations without improvement after which training ends.
        metric: A figure of the record: "loss" (training), "accuracy" (test data), "validation_loss",
            "accuracy_worst_tenth", or a metric of your own in `Watch(metrics=...)`, by its name.
        min_delta: What counts as an improvement: a change by more than this.
        mode: "min" if the figure should fall, "max" if it should rise. By default it is known by name for losses,
            accuracy, rmse, mae and deviance, and for metrics with an attribute `higher_is_better`. Without a fit it
            must be given.

    Attributes:
        best: The best value so far.
        best_round: The round that had it.

    Raises:
        SettingError: When a fit begins that will not measure the figure, or if its direction is not known.

    Example:
        >>> stopping = EarlyStopping(patience=2, metric="accuracy", mode="max")
        >>> [stopping({"round": t + 1, "accuracy": a}) for t, a in enumerate([0.5, 0.7, 0.6, 0.7])]
        [False, False, False, True]
        >>> stopping.best_round, stopping.best
        (2, 0.7)
    """

    def __init__(
        self,
        patience: int = 10,
        metric: str = "loss",
        min_delta: float = 0.0,
        mode: Literal["min", "max"] | None = None,
    ) -> None:
        if patience < 1 or not 0 <= min_delta < math.inf:
            raise SettingError(
                f"patience is {patience} and min_delta is {min_delta}; set patience >= 1 and min_delta >= 0"
            )
        if mode not in ("min", "max", None):
            raise SettingError(f'mode is {mode!r}; use "max" if {metric!r} should rise, "min" if it should fall')
        self.patience, self.metric, self.min_delta, self.mode = patience, metric, min_delta, mode
        self._higher_is_better = None if mode is None else mode == "max"
        self._reset()

    def _reset(self) -> None:
        self.best: float | None = None  # of the figure
        self.best_round: int | None = None
        self.waited = 0  # evaluations since then

    def begin(self, setting: FitSetting) -> None:
        """Starts anew; refuses a figure that this fit will not measure, or whose direction is not known."""
        if setting.watch.output == "random":
            raise SettingError(
                'output = "random" draws the round before training, and early stopping may never get there; '
                'use Watch(output="last") or "best"'
            )
        measured = setting.measured
        if self.metric not in measured:
            advice = "use one of these, or Watch(metrics=...)"
            if self.metric.startswith("validation") and "validation" not in setting.problem.splits:
                advice = 'use federation.holdout(0.1, into="validation")'
            raise SettingError(
                f"early stopping by {self.metric!r}, which is not measured in this fit "
                f"(measured: {', '.join(measured)}); {advice}"
            )
        if self.mode is None:
            self._higher_is_better = measured[self.metric]
        self._known_direction()
        self._reset()

    def __call__(self, record: Record) -> bool:
        if self.metric not in record:  # a round without evaluation
            return False
        value = float(record[self.metric])
        sign = -1 if self._known_direction() else 1
        if self.best is None or sign * (self.best - value) > self.min_delta or math.isnan(self.best):
            self.best, self.best_round, self.waited = value, int(record["round"]), 0
        else:
            self.waited += 1
        return self.waited >= self.patience

    def _known_direction(self) -> bool:
        if self._higher_is_better is None:
            raise SettingError(
                f"early stopping by {self.metric!r}, and it is not known whether that should rise or fall; "
                f'pass mode="max" or mode="min"'
            )
        return self._higher_is_better


class TensorBoard:
    """Writes the figures of every round for TensorBoard: `tensorboard --logdir FOLDER`.

    Args:
        folder: Where the events go.

    Raises:
        SettingError: If the package tensorboard is missing: `pip install 'ppfl[tensorboard]'`.

    Example:
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
        for name, value in record.items():
            if name != "round" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, record["round"])

    def end(self) -> None:
        """Writes what is still in memory."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None


# ---------------------------------------------------------------------- what a fit does with them


class CallbackList:
    """The callbacks of one fit, in the order in which they were given."""

    def __init__(self, setting: FitSetting, callbacks: Sequence[Callback]) -> None:
        self.setting, self.callbacks = setting, callbacks

    def log_start(self, method: Method) -> None:
        """One line, when the step size is known."""
        problem = self.setting.problem
        logger.info(
            "%s of %d clients: %d rounds, k = %d, lr = %g%s",
            method.title,
            problem.n_clients,
            problem.rounds,
            problem.population.k,
            method.local.step_size(0, problem.rounds),
            " (found by trials)" if self.setting.method.local.lr == "auto" else "",
        )

    def end_round(self, end: RoundEnd) -> bool:
        """Call every callback with the record of a round; whether one of them ends training there."""
        answers = [callback(end.record) for callback in self.callbacks]  # all of them: each sees every round
        if not any(isinstance(answer, bool | np.bool_) and bool(answer) for answer in answers):
            return False
        if self.setting.watch.output == "random":
            raise SettingError(
                f'a callback ended training after round {end.state.round}, but output = "random" has drawn one of '
                f'{self.setting.problem.rounds} rounds; use Watch(output="last") or "best"'
            )
        logger.info("ended by a callback after round %d", end.state.round)
        return True


@contextmanager
def running(on_round: OnRound, progress: bool | None, setting: FitSetting) -> Iterator[CallbackList]:
    """Begin all callbacks, and end them whatever happens."""
    callbacks = _as_list(on_round)
    with ExitStack() as stack:
        for callback in callbacks:
            _begin(callback, setting, stack)
        if progress is not False:
            callbacks += _progress(progress, setting, stack)
        if logger.isEnabledFor(logging.DEBUG):
            callbacks.append(_log_round(setting.problem.rounds))
        yield CallbackList(setting, callbacks)


def _as_list(on_round: OnRound) -> list[Callback]:
    if on_round is None:
        return []
    callbacks = list(on_round) if isinstance(on_round, Sequence) and not isinstance(on_round, str) else [on_round]
    for callback in callbacks:
        if not callable(callback):
            raise SettingError(
                f"on_round has {callback!r}, which cannot be called; give functions or objects that take a record"
            )
        if isinstance(callback, type):
            raise SettingError(f"on_round has the class {callback.__name__}; give an object: {callback.__name__}(...)")
    return callbacks


def _begin(callback: Any, setting: FitSetting, stack: ExitStack) -> None:
    begin: Callable[[FitSetting], object] | None = getattr(callback, "begin", None)
    end: Callable[[], object] | None = getattr(callback, "end", None)
    if begin is not None:
        begin(setting)
    if end is not None:
        stack.callback(end)


def _progress(progress: bool | None, setting: FitSetting, stack: ExitStack) -> list[Callback]:
    if progress is None and not _may_show_bar():
        return []
    from .report.progress import show_rounds  # here, as rich takes time to import and scripts may not need it

    search = "set lr to skip this" if setting.method.local.lr == "auto" else None
    show = stack.enter_context(show_rounds(setting.problem.rounds, search=search, lines=progress is True))
    title = setting.method.title
    return [] if show is None else [lambda record: show(title, record)]


def show_frozen_layers(progress: bool | None) -> AbstractContextManager[None]:
    """While it is open, samples that run through the frozen layers of a network are shown."""
    if progress is False or (progress is None and not _may_show_bar()):
        return nullcontext()
    from .report.progress import show_frozen_layers

    return show_frozen_layers(lines=progress is True)


def _may_show_bar() -> bool:
    """Whether standard error is a terminal, or this may be a notebook."""
    return "IPython" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())


def _log_round(rounds: int) -> Callback:
    from .report.theme import show_score
    from .runs import metric_name

    def log(record: Record) -> None:
        metric = metric_name(record)
        score = "" if metric is None else f", {metric} {show_score(metric, record[metric])}"
        logger.debug("round %d of %d: loss %s%s", record["round"], rounds, show_score("loss", record["loss"]), score)

    return log
