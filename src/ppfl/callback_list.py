"""What a fit tells while it runs: a progress bar, Python's logging, and the callbacks that were given."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import numpy as np

from .algorithms.contract import Method, Problem
from .callbacks import Callback, FitSetting
from .errors import SettingError
from .server import Record, RoundEnd, Watch

OnRound = Callback | Sequence[Callback] | None

# No handler is added to it: what becomes of the messages is for the program to say, as with logging.basicConfig.
logger = logging.getLogger("ppfl")


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

    def end_training(self, end: RoundEnd) -> bool:
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
def running(
    on_round: OnRound, progress: bool | None, problem: Problem, method: Method, watch: Watch
) -> Iterator[CallbackList]:
    """Begin all callbacks, and end them whatever happens."""
    setting = FitSetting(problem, method, watch)
    callbacks = _as_list(on_round)
    with ExitStack() as stack:
        for callback in callbacks:
            _begin(callback, setting, stack)
        if progress is not False:
            callbacks += _progress(progress, setting, stack)
        if logger.isEnabledFor(logging.DEBUG):
            callbacks.append(_log_round(problem.rounds))
        yield CallbackList(setting, callbacks)


def _as_list(on_round: OnRound) -> list[Callback]:
    callbacks = list(on_round) if isinstance(on_round, Sequence) else [] if on_round is None else [on_round]
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
    from .report.progress_bar import show_rounds  # here, as rich takes time to import and scripts may not need it

    search = "set lr to skip this" if setting.method.local.lr == "auto" else None
    show = stack.enter_context(show_rounds(setting.problem.rounds, search=search, lines=progress is True))
    title = setting.method.title
    return [] if show is None else [lambda record: show(title, record)]


def show_frozen_layers(progress: bool | None) -> AbstractContextManager[None]:
    """While it is open, samples that run through the frozen layers of a network are shown."""
    if progress is False or (progress is None and not _may_show_bar()):
        return nullcontext()
    from .report.progress_bar import show_frozen_layers

    return show_frozen_layers(lines=progress is True)


def _may_show_bar() -> bool:
    """Whether standard error is a terminal, or this may be a notebook."""
    return "IPython" in sys.modules or (sys.stderr is not None and sys.stderr.isatty())


def _log_round(rounds: int) -> Callback:
    from .report.metric import show_score
    from .runs import metric_name

    def log(record: Record) -> None:
        metric = metric_name(record)
        score = "" if metric is None else f", {metric} {show_score(metric, record[metric])}"
        logger.debug("round %d of %d: loss %s%s", record["round"], rounds, show_score("loss", record["loss"]), score)

    return log
