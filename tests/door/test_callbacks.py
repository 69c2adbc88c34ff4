"""What a fit tells while it runs: callbacks, which may end it; a bar; and Python's logging."""

import logging
import math
import re
import sys

import numpy as np
import pytest
import torch

from kit.problems import make_federation, make_net
from kit.refusals import SettingError, assert_refused
from kit.terminals import terminal
from ppfl import PPFL, FedAvg, Population, Watch, fit
from ppfl.callbacks import EarlyStopping, TensorBoard

FEDERATION = make_federation((17, 12, 30, 9), test_fraction=0.3)
WITH_VALIDATION = make_federation((30, 40, 30, 20), test_fraction=0.2, validation_fraction=0.3)


def train(on_round=None, method=None, rounds=3, federation=FEDERATION, **settings):
    method = method or PPFL(lr=0.3)
    population = Population(make_net(), k=2 if isinstance(method, PPFL) else 1)
    return fit(population, federation, method, rounds=rounds, on_round=on_round, **settings)


def test_a_callback_that_returns_true_ends_training_and_no_other_answer_does():
    """`lambda record: file.write(...)` returns a number, and means nothing by it."""
    for answer, last in ((True, 2), (np.bool_(True), 2), *((other, 3) for other in (False, 1, "yes", torch.ones(2)))):
        fitted = train(lambda record: answer if record["round"] == 2 else None)
        assert fitted.state.round == last == len(fitted.history)
    method = PPFL(lr=0.3, schedule="constant")  # so that no step depends on the number of rounds
    ended, whole = train(lambda record: record["round"] == 2, method), train(method=method, rounds=2)
    for client in FEDERATION.ids:
        assert torch.equal(ended.predict(client, torch.ones(5, 4)), whole.predict(client, torch.ones(5, 4)))


class Recorder:
    def __init__(self, log, name, stop=0):
        self.log, self.name, self.stop = log, name, stop

    def begin(self, setting):
        self.log.append(f"{self.name} begins {setting.problem.rounds}")

    def __call__(self, record):
        self.log.append(f"{self.name} {record['round']}")
        return record["round"] == self.stop

    def end(self):
        self.log.append(f"{self.name} ends")


def interrupt(record):
    raise KeyboardInterrupt


def test_callbacks_all_see_every_round_and_are_ended_after_an_error_too():
    train([Recorder(log := [], "a", stop=2), Recorder(log, "b"), lambda record: log.append("c")])
    assert log == ["a begins 3", "b begins 3", "a 1", "b 1", "c", "a 2", "b 2", "c", "b ends", "a ends"]
    with pytest.raises(KeyboardInterrupt):
        train([Recorder(log := [], "a"), interrupt])
    assert log == ["a begins 3", "a 1", "a ends"]


def margin(prediction, target):
    """How much more probable the label is than chance: higher is better, and its name does not say so."""
    return float(prediction.gather(1, target[:, None]).mean()) - 1 / 3


def confusion(prediction, target):
    return -margin(prediction, target)


confusion.higher_is_better = False


REFUSED = {
    "a class": (lambda: train(EarlyStopping), "EarlyStopping("),
    "a figure without data": (lambda: train([interrupt, EarlyStopping(metric="validation_loss")]), "holdout(0.1"),
    "a figure that is not measured": (lambda: train([interrupt, EarlyStopping(metric="rmse")]), "loss, accuracy"),
    "a metric that does not say which way is better": (
        lambda: train(EarlyStopping(metric="margin_mean"), watch=Watch(metrics={"margin": margin})),
        "'margin_mean'",
        'mode="max"',
    ),
    "no patience": (lambda: EarlyStopping(patience=0), "patience is 0"),
    "what cannot be called": (lambda: train([interrupt, 3]), "on_round has 3"),
    "a random round": (lambda: train(EarlyStopping(), watch=Watch(output="random")), "early stopping", '"best"'),
    "a mode that is none": (lambda: EarlyStopping(mode="up"), "'up'", '"min"'),
    "a random round cut short": (lambda: train(lambda _: True, watch=Watch(output="random")), "after round 1"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_callbacks_that_cannot_work_are_refused(name):
    call, *words = REFUSED[name]
    assert_refused(call, SettingError, *words)


def rounds_until_stop(values, **settings):
    stopping = EarlyStopping(**settings)
    answers = [stopping({"round": t, stopping.metric: value}) for t, value in enumerate(values, 1)]
    return answers.index(True) + 1 if True in answers else 0


def test_early_stopping_waits_for_evaluations_without_improvement():
    falls = [5.0, 4.0, 3.0, 3.0, 3.1, 3.2, 2.0]
    assert rounds_until_stop(falls, patience=3, mode="min") == 6
    assert rounds_until_stop(falls, patience=4, mode="min") == 0
    assert rounds_until_stop([-v for v in falls], patience=3, mode="max") == 6
    # small steps add up: they are compared with the best, and not with the round before
    assert rounds_until_stop([1.0, 0.9, 0.8, 0.7, 0.6], patience=2, min_delta=0.15, mode="min") == 0
    assert rounds_until_stop([1.0, math.nan, math.nan], patience=2, mode="min") == 3
    stopping = EarlyStopping(patience=1, metric="accuracy", min_delta=1)
    fitted = train(stopping, rounds=20, watch=Watch(every=3))
    assert (stopping.best_round, fitted.state.round) == (3, 6), "rounds that were not evaluated do not count"


def test_what_is_measured_is_what_a_record_has():
    numbers = ("round", "participants", "bytes_up", "bytes_down", "bytes_carried", "seconds")
    for settings in ({}, {"objective": True, "stationarity": True}, {"metrics": [margin]}):
        for federation in (FEDERATION, WITH_VALIDATION):
            settings_seen = Recorder([], "a")
            settings_seen.begin = lambda setting: found.append(setting.measured)
            found = []
            record = train(settings_seen, rounds=1, federation=federation, watch=Watch(**settings)).history[-1]
            figures = {name for name, value in record.items() if isinstance(value, int | float)}
            assert {*found[0]} == figures - {*numbers}


@pytest.mark.parametrize(
    ("metric", "mode", "rises"),
    [
        ("accuracy", None, True), ("accuracy_worst_tenth", None, True), ("validation_accuracy_mean", None, True),
        ("accuracy_sd", None, False), ("validation_loss", None, False), ("margin", "max", True),
        ("validation_margin_worst_tenth", "max", True), ("confusion", None, False), ("accuracy", "min", False),
    ],
)  # fmt: skip
def test_every_figure_is_followed_in_the_direction_that_is_better(metric, mode, rises):
    stopping = EarlyStopping(patience=100, metric=metric, mode=mode)
    watch = Watch(metrics={"margin": margin, "confusion": confusion})
    fitted = train(stopping, federation=WITH_VALIDATION, watch=watch, rounds=6)
    assert stopping.best == (max if rises else min)(record[metric] for record in fitted.history)


def test_the_best_state_is_that_of_the_best_round():
    stopping = EarlyStopping(patience=3, metric="validation_loss")
    settings = {"method": FedAvg(lr=3.0, momentum=0.0), "rounds": 60, "federation": WITH_VALIDATION}
    fitted = train(stopping, watch=Watch(output="best"), **settings)
    losses = [record["validation_loss"] for record in fitted.history]
    assert len(losses) < 60, "choose a case that overfits"
    assert fitted.state.round == stopping.best_round == losses.index(min(losses)) + 1 == len(losses) - 3
    assert fitted.evaluate(WITH_VALIDATION, "validation").loss.pooled == pytest.approx(min(losses))
    assert f"accuracy {100 * fitted.evaluate(WITH_VALIDATION).pooled:.2f}%" in repr(fitted)
    last = train(stopping, **settings)
    assert last.state.round == len(losses), "an object can be used again, and starts anew"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of tensorboard itself
def test_tensorboard_has_every_figure(tmp_path, monkeypatch):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    fitted = train(TensorBoard(tmp_path / "board"))
    events = accumulator.EventAccumulator(str(tmp_path / "board"))
    events.Reload()
    for name in ("loss", "accuracy", "bytes_up"):
        found = [(event.step, event.value) for event in events.Scalars(name)]
        assert found == [(r["round"], pytest.approx(r[name])) for r in fitted.history]
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    assert_refused(lambda: TensorBoard(tmp_path), SettingError, "pip install 'ppfl[tensorboard]'")


def test_a_terminal_sees_round_loss_and_score_and_is_left_in_order_after_an_error(capsys):
    with terminal(written := []):
        fitted = train(lambda record: print("printed", record["round"]))
    (text,), accuracy = written, f"{100 * fitted.history[-1]['accuracy']:.2f}%"
    assert re.search(rf"PPFL.*round 3/3.*loss \S+, accuracy {accuracy}.*0:00:0", text, re.DOTALL)
    assert "printed" not in text and capsys.readouterr().out == "printed 1\nprinted 2\nprinted 3\n"
    with terminal(written := []), pytest.raises(KeyboardInterrupt):
        train(interrupt)
    hidden, shown = (written[0].split(code) for code in ("\x1b[?25l", "\x1b[?25h"))  # the cursor
    assert len(hidden) == len(shown) == 2 and len(shown[0]) > len(hidden[0])


def test_nothing_is_shown_where_it_is_not_wanted_or_there_is_no_terminal_unless_it_is_asked_for(capfd):
    with terminal(written := []):
        train(progress=False)
    train()
    assert written == [""] and capfd.readouterr() == ("", "")
    train(progress=True)
    lines = capfd.readouterr().err.splitlines()
    assert [line.split(",")[0] for line in lines] == [f"PPFL: round {t} of 3" for t in (1, 2, 3)]


def test_one_line_is_logged_at_the_start_and_one_per_round_at_level_debug(caplog, capfd):
    with caplog.at_level(logging.DEBUG, logger="ppfl"):
        fitted = train(method=FedAvg())
    start, *rounds = caplog.records
    assert start.levelno == logging.INFO and f"lr = {fitted.method.lr:g} " in start.message
    assert [record.levelno for record in rounds] == [logging.DEBUG] * 3
    assert all(f"round {t} of 3: loss" in record.message for t, record in enumerate(rounds, 1))
    assert logging.getLogger("ppfl").handlers == [] and capfd.readouterr() == ("", "")
