"""Bad input ends in one line on standard error and exit code 2, and changes nothing; Ctrl-C says how to go on."""

import re
import signal
import subprocess
import sys
import time

import pytest

from kit.experiments import PLACES, TEXT, file_bytes, interrupt_at
from kit.terminals import terminal
from ppfl.runs import load_run

ROWS = ["who,x,y", *(f"{'ab'[i % 2]},{i % 7 / 3},{i % 2}" for i in range(16))]
FILES = {
    "good.csv": "\n".join(ROWS),
    "gap.csv": "\n".join([*ROWS, "a,,1"]),
    "gap.toml": re.sub(r"(?<=\[data\]\n)(.+\n)+", "name='csv'\nfile='gap.csv'\nclient='who'\ntarget='y'\n", TEXT),
    "broken.toml": "rounds = = 3",
}
REFUSED = {  # each refusal is tested where it is raised; here, that it reaches the shell as one line
    "a setting that is none": ("run groups.toml --set method.membershp_lr=1", "'membership_lr'"),
    "deep nesting": ("run groups.toml --set rounds=" + "[" * 20_000, "nested deeper"),
    "a cell without a number": ("run gap.toml", "'x' (1)", "missing"),
    "a file that is no TOML": ("run broken.toml", "broken.toml is not TOML"),
    "a number that is none": ("glm good.csv --client who --target y -k two", "-k is 'two'", "auto"),
    "a name that no file can have": (f"show {'x' * 5000}", "File name too long", "check the path"),
    "a name too long for what is tuned": (f"tune {'x' * 250}", "255", "choose another with --out"),
    "an option that cannot be": ("glm good.csv --client who --target y -k 2,50", "k is 50", "2 clients"),
}


def assert_refused(done, *words):
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ") and done.err.count("\n") == 1 and "Traceback" not in done.err
    assert not [word for word in words if word not in done.err], done.err


@pytest.mark.parametrize("name", REFUSED)
def test_bad_input_is_one_line(ppfl, experiment, here, name):
    for file, text in FILES.items():
        (here / file).write_text(text)
    command, *words = REFUSED[name]
    assert_refused(ppfl(*command.split()), *words)
    assert {file.name for file in here.iterdir()} == {*FILES, experiment.name}


@pytest.mark.processes
def test_ctrl_c_says_how_to_go_on(experiment, tmp_path):
    out = tmp_path / "out"
    options = ["--out", str(out), "--set", "rounds=100000", "--set", "watch.every=100000"]
    command = [sys.executable, "-m", "ppfl", "run", str(experiment), *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # where tests run in the background, a shell has told them to ignore Ctrl-C
    hear = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}
    with subprocess.Popen(command, **pipes, **hear) as process:
        metrics = out / "seed-0" / "metrics.jsonl"
        while not (metrics.is_file() and metrics.read_text().count("\n") > 3):
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        said = process.stderr.read()
    assert process.returncode == 130
    found = re.fullmatch(r"stopped after round (\d+) of 100000; resume with: (.*)\n", said)
    assert found[2] == f"ppfl run {experiment} --set rounds=100000 --set watch.every=100000 --out {out} --resume"
    assert len(load_run(out / "seed-0").metrics) >= int(found[1])


def test_resume_goes_on_and_what_exists_is_not_overwritten(ppfl, experiment, tmp_path, monkeypatch):
    run = ("run", experiment, "--out", tmp_path / "out")
    with monkeypatch.context() as patched:
        interrupt_at(patched, PLACES["before their work is merged"])
        assert ppfl(*run).code == 130
    assert 0 < load_run(tmp_path / "out" / "seed-0").rounds_done < 4
    with terminal(written := []):  # which sees the run live
        assert ppfl(*run, "--resume").code == 0
    assert re.search(r"seed 0.*4/4.*loss .*accuracy", written[0], re.DOTALL)
    export = ("export", tmp_path / "out", "--client", "c0", "--out", tmp_path / "models")
    assert ppfl(*export).code == 0
    before = file_bytes(tmp_path)
    assert ppfl(*run, "--resume").code == 0
    assert_refused(ppfl(*run), "exists with rounds=4", "--resume")
    assert_refused(ppfl(*run, "--resume", "--set", "rounds=9"), "rounds is 4 there and 9 here", "another --out")
    assert_refused(ppfl(*export), "exists; choose another --out")
    assert file_bytes(tmp_path) == before
