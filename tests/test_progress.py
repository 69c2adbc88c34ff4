"""The progress of `fit`: a bar on a terminal and in a notebook, nothing elsewhere, and standard output untouched."""

import logging
import os
import re
import sys
import threading
from contextlib import suppress
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from kit.problems import make_federation, make_net
from ppfl import PPFL, FedAvg, Fitted, Population, Watch, fit
from ppfl.data import digits_federation

FEDERATION = make_federation((17, 12, 30, 9), test_fraction=0.3)
HIDE, SHOW = "\x1b[?25l", "\x1b[?25h"  # the cursor


def train(method=None, rounds: int = 3, **settings) -> Fitted:
    method = method or PPFL(lr=0.3)
    population = Population(make_net(), k=2 if isinstance(method, PPFL) else 1)
    return fit(population, FEDERATION, method, rounds=rounds, **settings)


class Screen:
    """Standard error is a terminal within `with`, and `text` is all that was written to it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.patch, self.text = monkeypatch, ""

    def __enter__(self) -> "Screen":
        self.reader, writer = pytest.importorskip("pty").openpty()
        self.stream, self.parts = os.fdopen(writer, "w"), []
        self.thread = threading.Thread(target=self.read)
        self.thread.start()
        self.patch.setattr(sys, "stderr", self.stream)
        return self

    def read(self) -> None:
        with suppress(OSError):  # when the other side is closed
            while part := os.read(self.reader, 1 << 16):
                self.parts.append(part)

    def __exit__(self, *error: object) -> None:
        self.same = sys.stderr is self.stream
        self.patch.undo()
        self.stream.close()
        self.thread.join()
        os.close(self.reader)
        self.text = b"".join(self.parts).decode()


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> Screen:
    for name, value in {"TERM": "xterm", "COLUMNS": "120"}.items():
        monkeypatch.setenv(name, value)
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    return Screen(monkeypatch)


def test_a_terminal_sees_round_loss_score_and_time(screen, capsys) -> None:
    with screen:
        fitted = train()
    accuracy = f"{100 * fitted.history[-1]['accuracy']:.2f}%"
    assert re.search(rf"PPFL.*round 3/3.*loss \S+, accuracy {accuracy}.*0:00:0", screen.text, re.DOTALL)
    assert "finding the step size" not in screen.text
    assert screen.text.rindex(SHOW) > screen.text.rindex(HIDE) and "\n" in screen.text[-10:]
    assert capsys.readouterr().out == ""


def test_a_search_for_the_step_size_is_announced_before_round_1(screen) -> None:
    with screen:
        train(FedAvg(), rounds=2)
    assert 0 <= screen.text.index("finding the step size") < screen.text.index("round 2/2")
    assert "finding the step size" not in screen.text[screen.text.rindex("round 2/2") :]


def test_what_callbacks_print_stays_on_standard_output(screen, capsys) -> None:
    with screen:
        train(on_round=lambda record: print("printed", record["round"]))
    assert capsys.readouterr().out == "printed 1\nprinted 2\nprinted 3\n"
    assert "round 3/3" in screen.text and "printed" not in screen.text


def test_samples_that_run_through_frozen_layers_are_counted(screen) -> None:
    federation = digits_federation()
    net = torch.nn.Sequential(torch.nn.Linear(64, 8).requires_grad_(False), torch.nn.ReLU(), torch.nn.Linear(8, 10))
    with screen:
        fit(Population(net, k=1), federation, FedAvg(lr=0.1), rounds=2)
    samples = sum(len(split) for split in federation.splits.values())
    assert screen.text.index("frozen layers") < screen.text.index("round 1/2")
    assert re.search(rf"sample \d+/{samples}", screen.text)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_an_error_leaves_the_terminal_in_order(screen, error) -> None:
    def fail(record) -> None:
        raise error

    out = sys.stdout
    with screen, pytest.raises(error):
        train(on_round=fail)
    assert screen.same and sys.stdout is out
    assert screen.text.count(HIDE) == screen.text.count(SHOW) == 1
    assert screen.text.rindex(SHOW) > screen.text.rindex(HIDE)


def test_false_silences(screen) -> None:
    with screen:
        train(progress=False)
    assert screen.text == ""


@pytest.mark.parametrize("variable", [None, "FORCE_COLOR"])
def test_nothing_is_shown_where_standard_error_is_no_terminal(capfd, monkeypatch, variable) -> None:
    if variable:
        monkeypatch.setenv(variable, "1")
    train()
    assert capfd.readouterr() == ("", "")


def test_true_prints_lines_where_there_is_no_terminal(capsys) -> None:
    train(progress=True, watch=Watch(every=2))
    shown = capsys.readouterr()
    assert shown.out == ""
    lines = shown.err.splitlines()
    assert [line.split(",")[0] for line in lines] == [f"PPFL: round {t} of 3" for t in (1, 2, 3)]
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
    monkeypatch.setattr("ppfl.report.progress_bar.find_spec", lambda name: None)
    train()
    assert notebook == [] and capsys.readouterr() == ("", "")
    train(progress=True)
    assert "round 3 of 3" in capsys.readouterr().err


# ---------------------------------------------------------------------- logging


def test_one_line_is_logged_at_the_start_and_one_per_round_at_level_debug(caplog) -> None:
    with caplog.at_level(logging.INFO):
        fitted = train(FedAvg())
    assert {record.name for record in caplog.records} == {"ppfl"}
    (line,) = caplog.messages
    assert line == f"FedAvg of 4 clients: 3 rounds, k = 1, lr = {fitted.method.lr:g} (found by trials)"
    caplog.clear()
    with caplog.at_level(logging.DEBUG, logger="ppfl"):
        train(FedAvg(lr=0.25))
    start, *rounds = caplog.records
    assert start.levelno == logging.INFO and start.message.endswith("lr = 0.25")
    assert [record.levelno for record in rounds] == [logging.DEBUG] * 3
    assert all(re.fullmatch(rf"round {t} of 3: loss \S+, accuracy \S+%", r.message) for t, r in enumerate(rounds, 1))


def test_no_handler_is_installed(capfd) -> None:
    before = list(logging.getLogger().handlers)
    train()
    assert logging.getLogger("ppfl").handlers == [] and logging.getLogger().handlers == before
    assert capfd.readouterr() == ("", "")
