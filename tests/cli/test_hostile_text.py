"""Names from outside stay in their folder, and no text from outside can command a terminal."""

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ppfl.cli
from ppfl.cli.terminal import make_console, printable

COMMON = """
rounds = 2
data = { name = "npz", file = "data.npz" }
model = { name = "linear" }
algorithm = { name = "fedavg", lr = 0.3 }
"""
HOSTILE = {  # as it comes, and as it is shown
    "\x1b]0;owned\x07": r"\x1b]0;owned\x07",
    "[/] x": "[/] x",
    "\x9b31mred": r"\x9b31mred",
    "a\u202eb": r"a\u202eb",
    "[bold]b": "[bold]b",
    "two\nlines": r"two\nlines",
    "\x7f:smile:": r"\x7f:smile:",
    "naïve –": "naïve –",
}
CONTROLS = {chr(code) for code in (*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F))} - {"\n"}


@pytest.fixture
def folder(here: Path) -> Path:
    """A folder to work in, with data of clients of hostile names."""
    write_data(here / "data.npz", [*HOSTILE])
    return here


def write_data(file: Path, ids: list[str], largest: float = 1.0) -> None:
    """The samples of the last client are scaled by `largest`."""
    x = np.random.default_rng(0).normal(size=(len(ids), 30, 3))
    y = (x[:, :, 0] > 0).astype(int)
    x[-1] *= largest
    np.savez(file, x=x.reshape(-1, 3).astype("float32"), y=y.reshape(-1), client=np.repeat(np.array(ids), 30))


def write(file: str, text: str) -> Path:
    Path(file).write_text(text, encoding="utf-8")
    return Path(file)


def labels(*names: str) -> str:
    return "".join(f"[methods.{json.dumps(name)}]\n" for name in names)


def assert_harmless(*finished) -> None:
    for each in finished:
        assert not CONTROLS & {*each.out, *each.err}


def test_a_comparison_whose_name_leaves_its_folder_is_refused(ppfl, folder) -> None:
    before = {path.name for path in folder.parent.iterdir()}
    for name in ("../../x", str(folder.parent / "escaped"), "..", "a/b", 5, [1], "", "con"):
        done = ppfl("compare", write("c.toml", f"name = {json.dumps(name)}{COMMON}{labels('one', 'two')}"), "-q")
        assert (done.code, done.out) == (2, "") and done.err.startswith("error: c.toml: name is ")
    assert {path.name for path in folder.iterdir()} == {"c.toml", "data.npz"}
    assert {path.name for path in folder.parent.iterdir()} == before


def test_methods_and_files_whose_folders_would_not_be_any_are_refused(ppfl, folder) -> None:
    for label in ("..", "/", ".", "report.html"):
        done = ppfl("compare", write("c.toml", COMMON + labels("one", label)), "-q")
        assert (done.code, done.out) == (2, "") and f"method {label!r} would be written to folder" in done.err
    done = ppfl("tune", write(f"{'n' * 248}.toml", COMMON))
    assert done.code == 2 and "at most 255; choose another with --out" in done.err
    assert not (folder / "runs").exists()
    assert ppfl("compare", write("c.toml", COMMON), "-q", "--set", "name=mine").code == 0
    assert (folder / "runs" / "mine" / "report.html").is_file()


def test_hostile_labels_and_ids_are_shown_and_not_obeyed(ppfl, folder) -> None:
    settings = COMMON.replace('"fedavg"', '"ppfl"') + "population = { k = 2 }\n"
    done = ppfl("compare", write("c.toml", settings + labels(*HOSTILE)), "--jobs", 1)
    assert done.code == 0, done.err
    shown = [done, *(ppfl("show", run) for run in (folder / "runs" / "c").glob("*/seed-0"))]
    assert len(shown) == 1 + len(HOSTILE)
    for each in shown:
        assert each.code == 0 and not [name for name in HOSTILE.values() if name not in each.out]
    trials = ppfl("tune", "c.toml", "--budget", 1, "--rounds", 1)
    assert trials.code == 0
    assert_harmless(trials, *shown)


def test_hostile_folders_arguments_and_files_are_like_any_other(ppfl, folder) -> None:
    out = "o\x1b]0;x\x07<script>"
    done = ppfl("compare", write("c.toml", COMMON), "--out", out, "--jobs", 1)
    assert done.code == 0 and r"the report is o\x1b]0;x\x07<script>" in done.out
    page = (folder / out / "report.html").read_text(encoding="utf-8")
    assert "<script" not in page and r"<title>Methods compared: o\x1b]0;x\x07&lt;script&gt;</title>" in page
    text, shown = "\x1b]0;x\x07", r"\x1b]0;x\x07"
    refused = [ppfl(*arguments) for arguments in (["show", "a", text], [text], ["show", f"--{text}"])]
    assert all(each.code == 2 and shown in each.err for each in refused)
    rng = np.random.default_rng(0)
    rows = [f"{'ab'[i % 2]},{rng.normal():.3f},{rng.normal():.3f}" for i in range(40)]
    for name in ("\x1b[31mred", "n" * 250):
        file = write(f"{name}.csv", "\n".join(["who,x,y", *rows]))
        fitted = ppfl("glm", file, "--client", "who", "--target", "y", "-k", "1")
        assert fitted.code == 0 or (fitted.code == 2 and "at most" in fitted.err)
        assert_harmless(fitted)
    assert [path.name for path in (folder / "runs").iterdir()] == ["glm-31mred"]
    assert_harmless(done, *refused)


@pytest.mark.processes
def test_text_that_an_encoding_lacks_is_spelled_out(folder) -> None:
    for encoding in ("ascii", "latin-1", "cp1252", "utf-8"):
        for text in (*HOSTILE, "± … × 日本"):
            printable(text, encoding).encode(encoding)
    write("c.toml", COMMON + labels("naïve –", "日本"))
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "LANG": "C"}
    command = [sys.executable, "-m", "ppfl", "compare", "c.toml", "--jobs", "1"]
    done = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "\\u65e5\\u672c" in done.stdout.decode("ascii")


def test_nothing_is_printed_past_the_one_door_and_strings_are_never_markup(capsys) -> None:
    make_console().print("[/] [bold]x :smile: \x1b")
    assert capsys.readouterr().out == "[/] [bold]x :smile: \\x1b\n"
    for file in Path(ppfl.cli.__file__).parent.glob("*.py"):
        if file.name == "terminal.py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            name = getattr(node, "id", getattr(node, "attr", None))
            assert name not in {"Console", "stdout", "from_markup", "echo", "secho"}, file
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "print", f"{file.name}:{node.lineno} prints; use say or make_console"


@pytest.mark.filterwarnings("ignore::ppfl.server.RefusedUpdateWarning")
@pytest.mark.parametrize("scale", [1.0, 1e6, 1e30])
def test_a_client_whose_updates_are_refused_is_named_wherever_results_are(ppfl, folder, scale) -> None:
    write_data(folder / "data.npz", [f"c{i}" for i in range(8)], scale)
    done = ppfl("run", write("one.toml", COMMON), "--out", "one")
    compared = ppfl("compare", write("c.toml", COMMON + labels("a", "b")), "--jobs", 1)
    shown = ppfl("show", "one")
    page = (folder / "runs" / "c" / "report.html").read_text(encoding="utf-8")
    for each in (done, compared, shown):
        assert each.code == 0 and ("of client 'c7'" in " ".join(each.out.split())) == (scale > 1)
    for each in (done.out, compared.out, page):
        assert ("refused" in each) == (scale > 1)
    assert (">refused</th>" in page and "of client &#x27;c7&#x27;" in page) == (scale > 1)
