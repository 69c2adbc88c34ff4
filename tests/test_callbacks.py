"""Callbacks of `fit`: they see every round, may end training, and are told of its beginning and end."""

import csv
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from kit.problems import make_federation, make_linear, make_net
from ppfl import PPFL, FedAvg, Fitted, Population, Watch, fit
from ppfl.callbacks import CSVLog, EarlyStopping, FitSetting, TensorBoard
from ppfl.core.errors import SettingError, WriteError

FEDERATION = make_federation((17, 12, 30, 9), test_fraction=0.3)
WITH_VALIDATION = make_federation((30, 40, 30, 20), test_fraction=0.2, validation_fraction=0.3)


def train(on_round=None, method=None, rounds: int = 6, federation=FEDERATION, **settings) -> Fitted:
    method = method or PPFL(lr=0.3)
    population = Population(make_net(), k=2 if isinstance(method, PPFL) else 1)
    return fit(population, federation, method, rounds=rounds, on_round=on_round, **settings)


@pytest.mark.parametrize("answer", [True, np.bool_(True)])
def test_a_callback_that_returns_true_ends_training(answer) -> None:
    fitted = train(lambda record: answer if record["round"] == 3 else None)
    assert [record["round"] for record in fitted.history] == [1, 2, 3]
    assert fitted.state.round == 3


@pytest.mark.parametrize("answer", [False, None, 1, "yes", np.bool_(False), torch.ones(2)])
def test_no_other_answer_ends_it(answer) -> None:
    """`lambda record: file.write(...)` returns a number, and means nothing by it."""
    assert train(lambda record: answer, rounds=2).state.round == 2


def test_a_fit_that_was_ended_is_the_fit_until_then() -> None:
    """A schedule knows the rounds it was asked for: with a constant step size the two are the same bits."""
    method = PPFL(lr=0.3, schedule="constant")
    ended, whole = train(lambda record: record["round"] == 2, method), train(method=method, rounds=2)
    assert torch.equal(ended.memberships, whole.memberships)
    x = torch.randn(5, 4)
    for client in FEDERATION.ids:
        assert torch.equal(ended.predict(client, x), whole.predict(client, x))


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


def test_several_callbacks_all_see_every_round() -> None:
    log: list[str] = []
    train([Recorder(log, "a", stop=2), Recorder(log, "b"), lambda record: log.append("c")])
    assert log == ["a begins 6", "b begins 6", "a 1", "b 1", "c", "a 2", "b 2", "c", "b ends", "a ends"]


def test_callbacks_are_ended_after_an_error() -> None:
    log: list[str] = []

    def fail(record) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train([Recorder(log, "a"), fail])
    assert log == ["a begins 6", "a 1", "a ends"]


def test_what_is_no_callback_is_refused() -> None:
    with pytest.raises(SettingError, match="on_round has 3, which cannot be called"):
        train([3])
    with pytest.raises(SettingError, match=r"on_round has the class EarlyStopping; give an object: EarlyStopping\("):
        train(EarlyStopping)


# ---------------------------------------------------------------------- early stopping


def rounds_until_stop(values, **settings) -> int:
    stopping = EarlyStopping(**settings)
    answers = [stopping({"round": t, stopping.metric: value}) for t, value in enumerate(values, 1)]
    return answers.index(True) + 1 if True in answers else 0


def test_it_waits_for_patience_evaluations_without_improvement() -> None:
    falls = [5.0, 4.0, 3.0, 3.0, 3.1, 3.2, 2.0]
    assert rounds_until_stop(falls, patience=3, metric="loss") == 6
    assert rounds_until_stop(falls, patience=4, metric="loss") == 0
    assert rounds_until_stop([-v for v in falls], patience=3, metric="validation_accuracy") == 6


def test_a_small_improvement_is_none() -> None:
    assert rounds_until_stop([1.0, 0.9, 0.8, 0.7], patience=1, min_delta=0.15) == 2
    # small steps add up: they are compared with the best, and not with the round before
    assert rounds_until_stop([1.0, 0.9, 0.8, 0.7, 0.6], patience=2, min_delta=0.15) == 0


def test_nan_is_no_improvement() -> None:
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


def test_figures_that_are_not_measured_are_refused_before_training() -> None:
    seen: list[object] = []
    for metric, advice in {
        "validation_loss": 'use federation.holdout(0.1, into="validation")',
        "rmse": "(measured: loss, accuracy, test_loss); use one of these",
    }.items():
        with pytest.raises(SettingError) as error:
            train([seen.append, EarlyStopping(metric=metric)])
        assert advice in str(error.value)
    assert seen == []
    for settings in ({"patience": 0}, {"min_delta": -1.0}, {"min_delta": math.nan}):
        with pytest.raises(SettingError, match="patience >= 1"):
            EarlyStopping(**settings)


def test_a_random_round_cannot_be_drawn_from_a_fit_that_is_cut_short() -> None:
    watch = Watch(output="random")
    with pytest.raises(SettingError, match='use Watch\\(output="last"\\)'):
        train(EarlyStopping(), watch=watch)
    with pytest.raises(SettingError, match="ended training after round 2"):
        train(lambda record: record["round"] == 2, watch=watch)


# ---------------------------------------------------------------------- logs


def test_a_csv_file_has_the_figures_of_all_rounds(tmp_path: Path) -> None:
    log = CSVLog(tmp_path / "new" / "rounds.csv")
    for _ in range(2):  # the second fit replaces the file
        fitted = train(log, watch=Watch(every=2))
    with log.file.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 6 and {*rows[0]} >= {"round", "loss", "accuracy", "seconds"}
    for row, record in zip(rows, fitted.history, strict=True):
        numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
        assert {name: float(cell) for name, cell in row.items() if cell} == numbers


KILLED = """
import sys
from ppfl.callbacks import CSVLog
log = CSVLog(sys.argv[1])
for t in range(1, 10**6):
    log({"round": t, "loss": 1 / t, **({"accuracy": 1 - 1 / t} if t > 50 else {})})
    if t == 100:
        print("ready", flush=True)
"""


def test_a_kill_leaves_whole_lines(tmp_path: Path) -> None:
    file = tmp_path / "rounds.csv"
    with subprocess.Popen([sys.executable, "-c", KILLED, str(file)], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        os.kill(process.pid, signal.SIGKILL)
    text = file.read_text()
    assert text.startswith("round,loss,accuracy\n") and text.endswith("\n")
    rows = [line.split(",") for line in text.splitlines()[1:]]
    assert [int(row[0]) for row in rows] == list(range(1, len(rows) + 1))
    assert all(float(row[1]) == 1 / int(row[0]) for row in rows)


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteError, match="file"):
        train(CSVLog(tmp_path / "file" / "rounds.csv"))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of tensorboard itself
def test_tensorboard_has_every_figure(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    fitted = train(TensorBoard(tmp_path), rounds=3)
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    for name in ("loss", "accuracy", "bytes_up"):
        found = [(event.step, event.value) for event in events.Scalars(name)]
        assert found == [(r["round"], pytest.approx(r[name])) for r in fitted.history]


def test_without_tensorboard_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delattr(torch.utils, "tensorboard", raising=False)
    with pytest.raises(SettingError, match=r"pip install 'ppfl\[tensorboard\]'") as error:
        TensorBoard(tmp_path)
    assert "\n" not in str(error.value)


def test_all_three_work_together(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    population = Population(make_linear(), k=1)
    callbacks = [EarlyStopping(patience=1, min_delta=100.0), CSVLog(tmp_path / "log.csv"), TensorBoard(tmp_path / "tb")]
    fitted = fit(population, FEDERATION, FedAvg(lr=0.1), rounds=9, on_round=callbacks)
    assert len(fitted.history) == 2 == len((tmp_path / "log.csv").read_text().splitlines()) - 1
