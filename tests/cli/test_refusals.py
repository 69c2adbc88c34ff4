"""Bad input ends in one line on standard error and exit code 2, and changes nothing; Ctrl-C says how to go on."""

import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from kit.experiments import PLACES, TEXT, Finished, file_bytes, interrupt_at
from kit.terminals import terminal
from ppfl.runs import load_run


def assert_refused(done, *words: str) -> None:
    """Each refusal is tested where it is raised; here, that it reaches the shell as one line."""
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ") and done.err.count("\n") == 1 and "Traceback" not in done.err
    missing = [word for word in words if word not in done.err]
    assert not missing, done.err


WRONG_SETTINGS = {
    "algorithm.membershp_lr=1": ("'algorithm.membershp_lr'", "'membership_lr'"),
    "algorithm.lr=fast": ("algorithm.lr is 'fast'",),
    "population.k=7": ("k is 7", "6 clients"),
    "population.canonical=head": ("'head'", "'classifier'"),
    "population": ("key.sub=value",),
    "data={name='npz', file='nowhere.npz'}": ("nowhere.npz", "check the path"),
    "model.name=cnn": ("cnn takes images", "perceptron"),
    "rounds=" + "9" * 5000: ("digits",),
    "rounds=" + "[" * 20_000: ("nested deeper",),
    "data.n_clients=1000000000": ("1,000,000,000 clients", "PPFL_LIMITS"),
    "watch={output='random', smoothness=[1e9, 1e9]}": ("output = 'last'",),
}


@pytest.mark.parametrize("change", WRONG_SETTINGS, ids=lambda change: change[:40])
def test_wrong_settings(ppfl, experiment, tmp_path, change) -> None:
    assert_refused(ppfl("run", experiment, "--out", tmp_path / "out", "--set", change), *WRONG_SETTINGS[change])
    assert not (tmp_path / "out").exists()


X, Y, WHO = [0.0, 1.0, 2.0, 3.0] * 4, [0, 1] * 8, ["a"] * 8 + ["b"] * 8
WRONG_DATA = {  # columns of a table or arrays of a file instead of good ones
    "nothing": ("csv", {}, ()),
    "nothing in arrays": ("npz", {}, ()),
    "a cell without a number": ("csv", {"x": [float("nan"), *X[1:]]}, ("'x' (1)", "missing")),
    "a client without a name": ("csv", {"who": ["", *WHO[1:]]}, ("clients has 1 missing",)),
    "nan": ("npz", {"x": np.full((16, 1), np.nan)}, ("NaN", "'a'")),
    "fewer clients than rows": ("npz", {"client": np.array(WHO[:15])}, ("16 rows", "clients 15")),
    "clients without training data": ("npz", {"is_test": np.arange(16) < 8}, ("'a' have no training sample",)),
}


@pytest.mark.parametrize("name", WRONG_DATA)
def test_wrong_data(ppfl, tmp_path, name) -> None:
    kind, change, words = WRONG_DATA[name]
    if kind == "csv":
        columns = {"x": X, "y": Y, "who": WHO} | change
        lines = [",".join(map(str, row)) for row in zip(*columns.values(), strict=True)]
        (tmp_path / "data.csv").write_text("\n".join([",".join(columns), *lines]))
    else:
        np.savez(
            tmp_path / "data.npz", **({"x": np.array(X)[:, None], "y": np.array(Y), "client": np.array(WHO)} | change)
        )
    source = f'name = "{kind}"\nfile = "data.{kind}"\n' + 'client = "who"\ntarget = "y"\n' * (kind == "csv")
    (tmp_path / "data.toml").write_text(re.sub(r"(?<=\[data\]\n)(.+\n)+", source, TEXT))
    done = ppfl("run", tmp_path / "data.toml", "--out", tmp_path / "out")
    if not words:
        assert done.code == 0, "the data are good before they are spoiled"
        return
    assert_refused(done, *words)
    assert not (tmp_path / "out").exists()


def test_files_that_are_not_there_or_not_what_they_should_be(ppfl, experiment, tmp_path) -> None:
    (tmp_path / "broken.toml").write_text("rounds = = 3")
    assert_refused(ppfl("run", tmp_path / "nowhere.toml"), "nowhere.toml")
    assert_refused(ppfl("run", tmp_path / "broken.toml"), "broken.toml is not TOML")
    assert_refused(ppfl("show", tmp_path), "there is no run in")
    assert_refused(ppfl("show", "x" * 5000), "File name too long")
    assert_refused(ppfl("glm", tmp_path / "nowhere.csv", "--client", "a", "--target", "b"), "no file")
    done = ppfl("run", experiment, "--resum")
    assert done.code == 2 and "--resum" in done.err


def test_a_run_that_exists_is_not_overwritten(ppfl, experiment, tmp_path) -> None:
    run = ("run", experiment, "--out", tmp_path / "out")
    assert ppfl(*run).code == 0
    before = file_bytes(tmp_path)
    assert_refused(ppfl(*run), "exists with rounds=4", "--resume")
    assert_refused(ppfl(*run, "--resume", "--set", "rounds=9"), "rounds is 4 there and 9 here", "another --out")
    (tmp_path / "out" / "seed-0" / "result.safetensors").unlink()
    checkpoint = tmp_path / "out" / "seed-0" / "checkpoint.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[: checkpoint.stat().st_size // 2])
    half = file_bytes(tmp_path)
    assert_refused(ppfl(*run, "--resume"), "checkpoint.safetensors", "another folder")
    assert file_bytes(tmp_path) == half and half.keys() < before.keys()


def test_exports_of_what_is_not_there(ppfl, experiment, tmp_path) -> None:
    assert ppfl("run", experiment, "--out", tmp_path / "runs", "-q").code == 0
    finished, out = tmp_path / "runs" / "seed-0", tmp_path / "out"
    assert_refused(ppfl("export", finished, "--client", "nobody", "--out", out), "no client 'nobody'")
    assert_refused(ppfl("export", tmp_path / "nowhere", "--client", "a", "--out", out), "there is no")
    assert_refused(ppfl("export", tmp_path, "--client", "a", "--out", out), "no run in")
    assert_refused(ppfl("export", finished, "--client", "c0", "--out", out / "b" / "c"))
    assert not out.exists()
    assert ppfl("export", finished.parent, "--client", "c0", "--out", out).code == 0
    assert_refused(ppfl("export", finished, "--client", "c0", "--out", out), "exists; choose another --out")


WRONG_OPTIONS = {
    "--client who": ("no column 'who'", "'shop'"),
    "--choose aic": ("choose is 'aic'", "held_out, prediction, bic"),
    "--sep ;;": ("sep is ';;'",),
    "--ridge -1": ("ridge is -1",),
    "--family normal": ("no family 'normal'", "gaussian"),
    "-k two": ("-k is 'two'", "1,2,3"),
    "-k 2,50": ("k is 50", "10 clients"),
    "--columns price --formula sold~price+(1|shop)": ("what the formula says",),
}


@pytest.mark.parametrize("options", WRONG_OPTIONS)
def test_wrong_options_of_glm(ppfl, tmp_path, options) -> None:
    rows = [f"{i % 10},{i % 7 / 3},{i % 11 / 5}" for i in range(80)]
    (tmp_path / "shops.csv").write_text("\n".join(["shop,price,sold", *rows]))
    quick = ("--client", "shop", "--target", "sold", "-k", "1", "--out", tmp_path / "out", "--quiet")
    assert_refused(ppfl("glm", tmp_path / "shops.csv", *quick, *options.split()), *WRONG_OPTIONS[options])
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------------- in a process of its own


def hear_ctrl_c() -> None:
    """Where tests run in the background, a shell has told them to ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.processes
def test_ctrl_c_says_how_to_go_on(experiment, tmp_path) -> None:
    out = tmp_path / "out"
    options = ["--out", str(out), "--set", "rounds=100000", "--set", "watch.every=100000"]
    command = [sys.executable, "-m", "ppfl", "run", str(experiment), *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, preexec_fn=hear_ctrl_c) as process:
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


def test_resume_goes_on_and_a_finished_run_stays(ppfl, experiment, tmp_path, monkeypatch) -> None:
    out = tmp_path / "out"
    with monkeypatch.context() as patched:
        interrupt_at(patched, PLACES["before their work is merged"])
        assert ppfl("run", experiment, "--out", out).code == 130
    assert 0 < load_run(out / "seed-0").rounds_done < 4
    assert ppfl("run", experiment, "--out", out, "--resume").code == 0
    before = file_bytes(out)
    assert ppfl("run", experiment, "--out", out, "--resume").code == 0
    assert file_bytes(out) == before


def test_a_terminal_sees_the_run_live(ppfl, experiment, tmp_path) -> None:
    with terminal(written := []):
        assert ppfl("run", experiment, "--out", tmp_path / "out").code == 0
    assert re.search(r"seed 0.*4/4.*loss .*accuracy", written[0], re.DOTALL)


@pytest.mark.processes
def test_no_traceback_reaches_a_shell(tmp_path) -> None:
    command = [sys.executable, "-m", "ppfl", "run", str(tmp_path / "nowhere.toml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert_refused(Finished(done.returncode, done.stdout, done.stderr), "nowhere.toml")
