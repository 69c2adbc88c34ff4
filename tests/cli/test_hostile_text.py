"""Names from outside stay in their folder, and no text from outside can command a terminal."""

import ast
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ppfl.cli
from ppfl.cli.terminal import make_console, safe_output

COMMON = """
rounds = 2
data = { name = "npz", file = "data.npz" }
model = { name = "linear" }
method = { name = "ppfl", lr = 0.3 }
population = { k = 2 }
"""
HOSTILE = {  # as it comes, and as it is shown
    "\x1b]0;owned\x07": r"\x1b]0;owned\x07",
    "[/] x": "[/] x",
    "\x9b31mred": r"\x9b31mred",
    "a\u202eb": r"a\u202eb",
    "two\nlines": r"two\nlines",
    "\x7f:smile:": r"\x7f:smile:",
    "naïve –": "naïve –",
}
CONTROLS = {chr(code) for code in (*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F))} - {"\n"}


@pytest.fixture
def folder(here):
    """A folder to work in, with data of clients of hostile names."""
    write_data(here / "data.npz", [*HOSTILE])
    return here


def write_data(file, ids, largest=1.0):
    """The samples of the last client are scaled by `largest`."""
    x = np.random.default_rng(0).normal(size=(len(ids), 30, 3))
    y = (x[:, :, 0] > 0).astype(int)
    x[-1] *= largest
    np.savez(file, x=x.reshape(-1, 3).astype("float32"), y=y.reshape(-1), client=np.repeat(np.array(ids), 30))


def write_comparison(*labels, name="c"):
    methods = "".join(f"[methods.{json.dumps(label)}]\n" for label in labels)
    Path("c.toml").write_text(f"name = {json.dumps(name)}{COMMON}{methods}", encoding="utf-8")
    return "c.toml"


def test_names_that_leave_their_folder_are_refused(ppfl, folder):
    before = {path.name for path in folder.parent.iterdir()}
    for name in ("../../x", str(folder.parent / "escaped"), ".."):
        assert "name is " in ppfl("compare", write_comparison("one", name=name)).err
    assert "would be written to folder" in ppfl("compare", write_comparison("one", "..")).err
    assert {path.name for path in folder.parent.iterdir()} == before


def test_hostile_labels_ids_folders_and_arguments_are_shown_and_not_obeyed(ppfl, folder):
    out, shown = "o\x1b]0;x\x07<script>", r"o\x1b]0;x\x07"
    done = ppfl("compare", write_comparison(*HOSTILE), "--out", out, "--jobs", 1)
    page = (folder / out / "report.html").read_text(encoding="utf-8")
    assert "<script>" not in page and f"<title>Methods compared: {shown}&lt;script&gt;</title>" in page
    runs = [done, *(ppfl("show", run) for run in (folder / out).glob("*/seed-0"))]
    assert len(runs) == 1 + len(HOSTILE) and f"the report is {shown}<script>" in done.out
    for each in runs:
        assert each.code == 0, each
        assert not [name for name in HOSTILE.values() if name not in each.out], each
    refused = [ppfl(*arguments) for arguments in (["show", f"{out}2"], [out], ["show", f"--{out}"])]
    assert all(each.code == 2 and shown in each.err for each in refused)
    compared = ppfl("show", out)
    assert compared.code == 0
    for each in (*runs, compared, *refused, ppfl("tune", "c.toml", "--budget", 1, "--rounds", 1)):
        assert not CONTROLS & {*each.out, *each.err}


@pytest.mark.processes
def test_text_that_an_encoding_lacks_is_spelled_out(folder):
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "LANG": "C"}
    command = [sys.executable, "-m", "ppfl", "compare", write_comparison("naïve –", "日本"), "--jobs", "1"]
    done = subprocess.run(command, capture_output=True, env=environment, check=True)
    assert "\\u65e5\\u672c" in done.stdout.decode("ascii")


def test_text_of_other_packages_is_spelled_out_too(monkeypatch):
    terminal = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stderr", terminal)
    with safe_output():
        print("naïve", file=sys.stderr, flush=True)
    assert terminal.buffer.getvalue() == b"na\\xefve\n"


def test_nothing_is_printed_past_the_one_door_and_strings_are_never_markup(capsys):
    make_console().print("[/] [bold]x :smile: \x1b")
    assert capsys.readouterr().out == "[/] [bold]x :smile: \\x1b\n"
    for file in Path(ppfl.cli.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())) if file.name != "terminal.py" else ():
            name, attribute = getattr(node, "id", None), getattr(node, "attr", None)
            assert not {name, attribute} & {"Console", "stdout", "from_markup", "echo", "secho"}, file
            assert name != "print", f"{file.name} prints; use say or make_console"


@pytest.mark.filterwarnings("ignore::ppfl.server.RefusedUpdateWarning")
@pytest.mark.parametrize("scale", [1.0, 1e30])
def test_a_client_whose_updates_are_refused_is_named_wherever_results_are(ppfl, folder, scale):
    write_data(folder / "data.npz", [f"c{i}" for i in range(8)], scale)
    compared = ppfl("compare", write_comparison("a", "b"), "--jobs", 1)
    shown = ppfl("show", next((folder / "runs" / "c").glob("a/seed-0")))
    page = (folder / "runs" / "c" / "report.html").read_text(encoding="utf-8")
    for text in (compared.out, shown.out, page.replace("&#39;", "'")):
        assert ("of client 'c7'" in " ".join(text.split())) == (scale > 1)
