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
from ppfl.core.text import visible

COMMON = """
rounds = 2
data = { name = "npz", file = "data.npz" }
model = { name = "linear" }
algorithm = { name = "fedavg", lr = 0.3 }
"""
HOSTILE = ["\x1b]0;owned\x07", "[/] x", "\x9b31mred", "a\u202eb", "[bold]b", "two\nlines", "\x7f:smile:", "naïve –"]
CONTROLS = {chr(code) for code in (*range(0x20), *range(0x7F, 0xA0), *range(0x202A, 0x202F))} - {"\n"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder to work in, with data of clients of hostile names."""
    monkeypatch.chdir(tmp_path)
    write_data(tmp_path / "data.npz", HOSTILE)
    return tmp_path


def write_data(file: Path, ids: list[str], scales: dict[str, float] = {}) -> None:  # noqa: B006
    rng = np.random.default_rng(0)
    x = rng.normal(size=(len(ids), 30, 3))
    y = (x[:, :, 0] > 0).astype(int)
    x *= np.array([scales.get(client, 1.0) for client in ids])[:, None, None]
    np.savez(file, x=x.reshape(-1, 3).astype("float32"), y=y.reshape(-1), client=np.repeat(np.array(ids), 30))


def write(file: str, text: str) -> Path:
    Path(file).write_text(text, encoding="utf-8")
    return Path(file)


def labels(*names: str) -> str:
    return "".join(f"[methods.{json.dumps(name)}]\n" for name in names)


def outside(folder: Path) -> set[str]:
    return {path.name for path in folder.parent.iterdir()}


@pytest.mark.parametrize("name", ['"../../x"', '"{here}/escaped"', '".."', '"a/b"', "5", "[1]", '""', '"con"'])
@pytest.mark.parametrize("methods", ["", labels("one", "two")])
def test_a_comparison_whose_name_leaves_its_folder_is_refused(ppfl, folder, name, methods):
    before = outside(folder)
    name = name.replace("{here}", str(folder.parent))
    done = ppfl("compare", write("c.toml", f"name = {name}{COMMON}{methods}"), "-q")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: c.toml: name is ")
    assert {path.name for path in folder.iterdir()} == {"c.toml", "data.npz"}
    assert outside(folder) == before


@pytest.mark.parametrize("label", ["..", "/", ".", "report.html"])
def test_a_method_whose_folder_would_not_be_one_is_refused(ppfl, folder, label):
    done = ppfl("compare", write("c.toml", COMMON + labels("one", label)), "-q")
    assert (done.code, done.out) == (2, "")
    assert f"method {label!r} would be written to folder" in done.err
    assert not (folder / "runs").exists()


def test_the_name_that_is_set_names_the_folder(ppfl, folder):
    assert ppfl("compare", write("c.toml", COMMON), "-q", "--set", "name=mine").code == 0
    assert (folder / "runs" / "mine" / "report.html").is_file()


def test_hostile_labels_and_ids_are_shown_and_not_obeyed(ppfl, folder):
    settings = COMMON.replace('"fedavg"', '"ppfl"') + "population = { k = 2 }\n"
    done = ppfl("compare", write("c.toml", settings + labels(*HOSTILE)), "--jobs", 1)
    assert done.code == 0, done.err
    shown = [done, *(ppfl("show", run) for run in (folder / "runs" / "c").glob("*/seed-0"))]
    assert len(shown) == 1 + len(HOSTILE)
    for each in shown:
        assert each.code == 0
        assert not CONTROLS & {*each.out, *each.err}
        for name in HOSTILE:
            assert visible(name) in each.out
    trials = ppfl("tune", "c.toml", "--budget", 1, "--rounds", 1)
    assert trials.code == 0
    assert not CONTROLS & {*trials.out, *trials.err}


def test_a_hostile_folder_is_a_title_and_a_path_like_any_other(ppfl, folder):
    out = "o\x1b]0;x\x07<script>"
    done = ppfl("compare", write("c.toml", COMMON), "--out", out, "--jobs", 1)
    assert done.code == 0
    assert f"the report is {visible(out)}" in done.out
    assert not CONTROLS & {*done.out, *done.err}
    page = (folder / out / "report.html").read_text(encoding="utf-8")
    assert "<script" not in page
    assert r"<title>Methods compared: o\x1b]0;x\x07&lt;script&gt;</title>" in page


def test_usage_errors_repeat_arguments_visibly(ppfl, folder):
    for arguments in (["show", "a", "\x1b]0;x\x07"], ["\x1b]0;x\x07"], ["show", "--\x1b]0;x\x07"]):
        done = ppfl(*arguments)
        assert done.code == 2
        assert r"\x1b]0;x\x07" in done.err
        assert not CONTROLS & {*done.out, *done.err}


def test_file_names_are_shown_visibly_and_fit_into_folders(ppfl, folder):
    rng = np.random.default_rng(0)
    rows = [f"{'ab'[i % 2]},{rng.normal():.3f},{rng.normal():.3f}" for i in range(40)]
    for name in ("\x1b[31mred", "n" * 250):
        file = write(f"{name}.csv", "\n".join(["who,x,y", *rows]))
        done = ppfl("glm", file, "--client", "who", "--target", "y", "-k", "1")
        assert not CONTROLS & {*done.out, *done.err}
        assert done.code == 0 or (done.code == 2 and "at most" in done.err)
    assert [path.name for path in (folder / "runs").iterdir()] == ["glm-31mred"]


def test_a_file_name_that_leaves_no_room_for_an_ending_is_refused(ppfl, folder):
    done = ppfl("tune", write(f"{'n' * 248}.toml", COMMON))
    assert done.code == 2
    assert "at most 255; choose another with --out" in done.err


def test_text_that_an_encoding_lacks_is_spelled_out(folder):
    write("c.toml", COMMON + labels("naïve –", "日本"))
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "LANG": "C"}
    command = [sys.executable, "-m", "ppfl", "compare", "c.toml", "--jobs", "1"]
    done = subprocess.run(command, capture_output=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert "\\u65e5\\u672c" in done.stdout.decode("ascii")


def test_text_is_cut_to_what_an_encoding_has():
    for encoding in ("ascii", "latin-1", "cp1252", "utf-8"):
        for text in (*HOSTILE, "± … × 日本"):
            printable(text, encoding).encode(encoding)


def test_strings_are_never_markup(capsys):
    make_console().print("[/] [bold]x :smile: \x1b")
    assert capsys.readouterr().out == "[/] [bold]x :smile: \\x1b\n"


def test_nothing_is_printed_past_the_one_door():
    for file in Path(ppfl.cli.__file__).parent.glob("*.py"):
        if file.name == "terminal.py":
            continue
        for node in ast.walk(ast.parse(file.read_text())):
            name = getattr(node, "id", getattr(node, "attr", None))
            assert name not in {"Console", "stdout", "from_markup", "echo", "secho"}, file
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "print", f"{file.name}:{node.lineno} prints; use say or make_console"


@pytest.mark.filterwarnings("ignore::ppfl.server.loop.RefusedUpdateWarning")
@pytest.mark.parametrize("scale", [1e6, 1e30])
def test_a_client_whose_updates_are_refused_is_named_wherever_results_are(ppfl, folder, scale):
    ids = [f"c{i}" for i in range(8)]
    write_data(folder / "data.npz", ids, {"c3": scale})
    done = ppfl("run", write("one.toml", COMMON), "--out", "one")
    compared = ppfl("compare", write("c.toml", COMMON + labels("a", "b")), "--jobs", 1)
    shown = ppfl("show", "one")
    for each in (done, compared, shown):
        assert each.code == 0
        assert "of client 'c3'" in " ".join(each.out.split())
    for each in (done, compared):
        assert " refused " in each.out
    page = (folder / "runs" / "c" / "report.html").read_text(encoding="utf-8")
    assert ">refused</th>" in page
    assert "of client &#x27;c3&#x27;" in page


def test_nothing_is_said_of_refused_updates_where_there_are_none(ppfl, folder):
    done = ppfl("compare", write("c.toml", COMMON + labels("a", "b")), "--jobs", 1)
    assert done.code == 0
    assert "refused" not in done.out + (folder / "runs" / "c" / "report.html").read_text(encoding="utf-8")
