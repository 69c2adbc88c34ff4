"""What a fit tells while it runs: callbacks, which may end it; logs in files; a bar on terminals and in notebooks; and
Python's logging."""

import csv
import logging
import math
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from kit.problems import make_federation, make_net
from kit.refusals import SettingError, WriteError, assert_refused
from kit.terminals import terminal
from ppfl import PPFL, FedAvg, Fitted, Population, Watch, fit
from ppfl.callbacks import CSVLog, EarlyStopping, FitSetting, TensorBoard

FEDERATION = make_federation((17, 12, 30, 9), test_fraction=0.3)
WITH_VALIDATION = make_federation((30, 40, 30, 20), test_fraction=0.2, validation_fraction=0.3)


def train(on_round=None, method=None, rounds: int = 3, federation=FEDERATION, net=None, **settings) -> Fitted:
    method = method or PPFL(lr=0.3)
    population = Population(net or make_net(), k=2 if isinstance(method, PPFL) else 1)
    return fit(population, federation, method, rounds=rounds, on_round=on_round, **settings)


def test_a_callback_that_returns_true_ends_training_and_no_other_answer_does() -> None:
    """`lambda record: file.write(...)` returns a number, and means nothing by it."""
    for answer, last in ((True, 2), (np.bool_(True), 2), *((other, 3) for other in (False, 1, "yes", torch.ones(2)))):
        fitted = train(lambda record: answer if record["round"] == 2 else None)
        assert fitted.state.round == last == len(fitted.history)


def test_a_fit_that_was_ended_is_the_fit_until_then() -> None:
    """A schedule knows the rounds it was asked for: with a constant step size the two are the same bits."""
    method = PPFL(lr=0.3, schedule="constant")
    ended, whole = train(lambda record: record["round"] == 2, method), train(method=method, rounds=2)
    assert torch.equal(ended.memberships, whole.memberships)
    for client in FEDERATION.ids:
        assert torch.equal(ended.predict(client, torch.ones(5, 4)), whole.predict(client, torch.ones(5, 4)))


class Recorder:
    def __init__(self, log: list[str], name: str, stop: int = 0) -> None:
        self.log, self.name, self.stop = log, name, stop

    def begin(self, setting: FitSetting) -> None:
        self.log.append(f"{self.name} begins {setting.problem.rounds}")

    def __call__(self, record) -> bool:
        self.log.append(f"{self.name} {record['round']}")
        return record["round"] == self.stop

    def end(self) -> None:
        self.log.append(f"{self.name} ends")


def interrupt(record) -> None:
    raise KeyboardInterrupt


def test_callbacks_all_see_every_round_and_are_ended_after_an_error_too() -> None:
    log: list[str] = []
    train([Recorder(log, "a", stop=2), Recorder(log, "b"), lambda record: log.append("c")])
    assert log == ["a begins 3", "b begins 3", "a 1", "b 1", "c", "a 2", "b 2", "c", "b ends", "a ends"]
    log.clear()
    with pytest.raises(KeyboardInterrupt):
        train([Recorder(log, "a"), interrupt])
    assert log == ["a begins 3", "a 1", "a ends"]


REFUSED = {
    "a number": (lambda: train([3]), SettingError, "3", "cannot be called"),
    "a class": (lambda: train(EarlyStopping), SettingError, "EarlyStopping("),
    "no patience": (lambda: EarlyStopping(patience=0), SettingError, "patience >= 1"),
    "a negative difference": (lambda: EarlyStopping(min_delta=-1.0), SettingError, "min_delta >= 0"),
    "a difference of nan": (lambda: EarlyStopping(min_delta=math.nan), SettingError, "min_delta >= 0"),
    "a figure without data": (lambda: train([interrupt, EarlyStopping(metric="validation_loss")]), SettingError,
                              'federation.holdout(0.1, into="validation")'),
    "a figure that is not measured": (lambda: train([interrupt, EarlyStopping(metric="rmse")]), SettingError,
                                      "loss, accuracy, test_loss"),
    "a random round": (lambda: train(EarlyStopping(), watch=Watch(output="random")), SettingError,
                       'Watch(output="last")'),
    "a random round cut short": (lambda: train(lambda record: True, watch=Watch(output="random")), SettingError,
                                 "after round 1"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_callbacks_that_cannot_work_are_refused_before_training(name: str) -> None:
    assert_refused(*REFUSED[name])


# ---------------------------------------------------------------------- early stopping


def rounds_until_stop(values, **settings) -> int:
    stopping = EarlyStopping(**settings)
    answers = [stopping({"round": t, stopping.metric: value}) for t, value in enumerate(values, 1)]
    return answers.index(True) + 1 if True in answers else 0


def test_early_stopping_waits_for_evaluations_without_improvement() -> None:
    falls = [5.0, 4.0, 3.0, 3.0, 3.1, 3.2, 2.0]
    assert rounds_until_stop(falls, patience=3, metric="loss") == 6
    assert rounds_until_stop(falls, patience=4, metric="loss") == 0
    assert rounds_until_stop([-v for v in falls], patience=3, metric="validation_accuracy") == 6
    assert rounds_until_stop([1.0, 0.9, 0.8, 0.7], patience=1, min_delta=0.15) == 2
    # small steps add up: they are compared with the best, and not with the round before
    assert rounds_until_stop([1.0, 0.9, 0.8, 0.7, 0.6], patience=2, min_delta=0.15) == 0
    assert rounds_until_stop([1.0, math.nan, math.nan], patience=2) == 3
    assert rounds_until_stop([math.nan, 1.0, 0.5], patience=1) == 0


def test_rounds_that_were_not_evaluated_do_not_count() -> None:
    stopping = EarlyStopping(patience=1, metric="accuracy", min_delta=1)
    fitted = train(stopping, rounds=20, watch=Watch(every=3))
    assert (stopping.best_round, fitted.state.round) == (3, 6)


def test_the_best_state_is_that_of_the_best_round() -> None:
    stopping = EarlyStopping(patience=3, metric="validation_loss")
    settings = {"method": FedAvg(lr=3.0, momentum=0.0), "rounds": 60, "federation": WITH_VALIDATION}
    fitted = train(stopping, watch=Watch(output="best"), **settings)
    losses = [record["validation_loss"] for record in fitted.history]
    assert len(losses) < 60, "choose a case that overfits"
    assert fitted.state.round == stopping.best_round == losses.index(min(losses)) + 1 == len(losses) - 3
    assert fitted.evaluate(WITH_VALIDATION, "validation").pooled_loss == pytest.approx(min(losses))
    last = train(stopping, **settings)
    assert last.state.round == len(losses), "an object can be used again, and starts anew"


# ---------------------------------------------------------------------- logs


def test_a_csv_file_has_the_figures_of_all_rounds(tmp_path: Path) -> None:
    log = CSVLog(tmp_path / "new" / "rounds.csv")
    for _ in range(2):  # the second fit replaces the file
        fitted = train(log, watch=Watch(every=2))
    with log.file.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 and {*rows[0]} >= {"round", "loss", "accuracy", "seconds"}
    for row, record in zip(rows, fitted.history, strict=True):
        numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
        assert {name: float(cell) for name, cell in row.items() if cell} == numbers
    assert_refused(lambda: train(CSVLog(log.file / "rounds.csv")), WriteError, "rounds.csv")


def test_a_kill_after_any_round_leaves_whole_lines(tmp_path: Path) -> None:
    log = CSVLog(tmp_path / "rounds.csv")
    for t in range(1, 9):
        log({"round": t, "loss": 1 / t, **({"accuracy": 1 - 1 / t} if t > 4 else {})})
        text = log.file.read_text()  # nothing waits in memory
        assert text.endswith("\n") and text.count("\n") == t + 1 and text.startswith("round,loss")
        assert [float(line.split(",")[1]) for line in text.splitlines()[1:]] == [1 / at for at in range(1, t + 1)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of tensorboard itself
def test_tensorboard_has_every_figure(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    stopping = EarlyStopping(patience=1, min_delta=100.0)  # ends after round 2
    fitted = train([stopping, CSVLog(tmp_path / "log.csv"), TensorBoard(tmp_path / "board")], rounds=9)
    events = accumulator.EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    for name in ("loss", "accuracy", "bytes_up"):
        found = [(event.step, event.value) for event in events.Scalars(name)]
        assert found == [(r["round"], pytest.approx(r[name])) for r in fitted.history]
    assert len(fitted.history) == 2 == len((tmp_path / "log.csv").read_text().splitlines()) - 1


def test_without_tensorboard_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delattr(torch.utils, "tensorboard", raising=False)
    assert_refused(lambda: TensorBoard(tmp_path), SettingError, "pip install 'ppfl[tensorboard]'")


# ---------------------------------------------------------------------- the bar

HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"  # the cursor


def test_a_terminal_sees_round_loss_score_and_time(capsys) -> None:
    with terminal(written := []):
        fitted = train(lambda record: print("printed", record["round"]))
    (text,), accuracy = written, f"{100 * fitted.history[-1]['accuracy']:.2f}%"
    assert re.search(rf"PPFL.*round 3/3.*loss \S+, accuracy {accuracy}.*0:00:0", text, re.DOTALL)
    assert "finding the step size" not in text and "printed" not in text
    assert text.rindex(SHOW) > text.rindex(HIDE) and "\n" in text[-10:]
    assert capsys.readouterr().out == "printed 1\nprinted 2\nprinted 3\n"


def test_frozen_layers_and_the_search_for_a_step_size_are_announced_before_round_1() -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 8).requires_grad_(False), torch.nn.ReLU(), torch.nn.Linear(8, 3))
    federation = make_federation((400, 500, 600), test_fraction=0.2)
    with terminal(written := []):
        train(method=FedAvg(), net=net, federation=federation, rounds=2)
    (text,), samples = written, sum(len(split) for split in federation.splits.values())
    assert re.search(rf"sample \d+/{samples}", text)
    assert text.index("frozen layers") < text.index("finding the step size") < text.index("round 2/2")
    assert "finding the step size" not in text[text.rindex("round 2/2") :]


def test_an_error_leaves_the_terminal_in_order() -> None:
    out, written = sys.stdout, []
    with terminal(written):
        err = sys.stderr
        with pytest.raises(KeyboardInterrupt):
            train(interrupt)
        assert sys.stderr is err
    (text,) = written
    assert sys.stdout is out and text.count(HIDE) == text.count(SHOW) == 1
    assert text.rindex(SHOW) > text.rindex(HIDE)


def test_nothing_is_shown_where_it_is_not_wanted_or_standard_error_is_no_terminal(capfd, monkeypatch) -> None:
    with terminal(written := []):
        train(progress=False)
    assert written == [""]
    train()
    monkeypatch.setenv("FORCE_COLOR", "1")
    train()
    assert capfd.readouterr() == ("", "")


def test_true_prints_lines_where_there_is_no_terminal(capsys) -> None:
    train(progress=True, watch=Watch(every=2))
    shown = capsys.readouterr()
    lines = shown.err.splitlines()
    assert shown.out == "" and [line.split(",")[0] for line in lines] == [f"PPFL: round {t} of 3" for t in (1, 2, 3)]
    assert ["accuracy" in line for line in lines] == [False, True, True]


class Output:
    """Stands for ipywidgets.Output."""

    def __enter__(self) -> None: ...
    def __exit__(self, *error: object) -> None: ...
    def clear_output(self, wait: bool = False) -> None: ...
    def close(self) -> None: ...


@pytest.fixture
def notebook(monkeypatch) -> list[str]:
    """A notebook as rich sees it; the list gets the text of all that is displayed."""
    displayed: list[str] = []

    def display(shown) -> None:
        if hasattr(shown, "_repr_mimebundle_"):
            displayed.append(shown._repr_mimebundle_((), ())["text/plain"])

    modules = {name: ModuleType(name) for name in ("IPython", "IPython.display", "ipywidgets")}
    for name, module in modules.items():
        module.__spec__ = ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    modules["IPython.display"].display = display
    modules["ipywidgets"].Output = Output
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    return displayed


def test_a_notebook_has_the_bar_in_its_cell(notebook, capfd) -> None:
    train()
    assert re.search(r"PPFL.*round 3/3.*loss \S+, accuracy", "".join(notebook))
    assert capfd.readouterr() == ("", "")


def test_a_notebook_without_widgets_has_no_bar_and_no_warning(notebook, capsys, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    train()
    assert notebook == [] and capsys.readouterr() == ("", "")
    train(progress=True)
    assert "round 3 of 3" in capsys.readouterr().err


# ---------------------------------------------------------------------- logging


def test_one_line_is_logged_at_the_start_and_one_per_round_at_level_debug(caplog, capfd) -> None:
    handlers = list(logging.getLogger().handlers)
    with caplog.at_level(logging.INFO):
        fitted = train(method=FedAvg())
    (record,) = caplog.records
    assert record.name == "ppfl" and record.levelno == logging.INFO
    assert re.search(rf"FedAvg.* 4 clients.*lr = {fitted.method.lr:g} ", record.message)
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="ppfl"):
        train(method=FedAvg(lr=0.25))
    start, *rounds = caplog.records
    assert start.message.endswith("lr = 0.25") and [record.levelno for record in rounds] == [logging.DEBUG] * 3
    assert all(re.fullmatch(rf"round {t} of 3: loss \S+, accuracy \S+%", r.message) for t, r in enumerate(rounds, 1))
    assert logging.getLogger("ppfl").handlers == [] and logging.getLogger().handlers == handlers
    assert capfd.readouterr() == ("", "")
