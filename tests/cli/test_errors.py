"""Bad input ends in one line on standard error and exit code 2, and changes nothing."""

import subprocess
import sys

import numpy as np
import pytest

EXPERIMENT = """
rounds = 2
[data]
name = "{kind}"
{source}
[model]
name = "linear"
[population]
k = {k}
[algorithm]
name = "ppfl"
"""


def assert_refused(done, *parts: str) -> None:
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    for part in parts:
        assert part in done.err


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        ("algorithm.membershp_lr=1", ["'algorithm.membershp_lr'", "did you mean 'membership_lr'?"]),
        ("algorithm.lr=fast", ["algorithm.lr is 'fast'"]),
        ("population.k=7", ["k is 7", "6 clients"]),
        ("population.canonical=head", ["'head'", "'classifier'"]),
        ("population", ["key.sub=value"]),
        ("data={name='npz', file='nowhere.npz'}", ["nowhere.npz", "check the path"]),
        ("data={name='csv', file='nowhere.csv', client='a', target='b'}", ["nowhere.csv", "check the path"]),
        ("data.dim=1", ["dim=1"]),
        ("model.name=cnn", ["cnn takes images", "perceptron"]),
        ("affinity={name='nearest', neighbours=9}", ["9", "smaller k"]),
        ("algorithm.lr=1e300", ["algorithm.lr is 1e+300"]),
        ("rounds=" + "9" * 5000, ["digits"]),
        ("rounds=" + "[" * 20_000, ["nested deeper"]),
        ("data.n_clients=1000000000", ["1,000,000,000 clients", "PPFL_LIMITS"]),
        ("model={name='perceptron', hidden=[1000000000]}", ["parameters", "PPFL_LIMITS"]),
        ("device=abacus", ["device is 'abacus'"]),
        ("watch={output='random', smoothness=[1e9, 1e9]}", ["smaller steps or output = 'last'"]),
    ],
)
def test_bad_settings(ppfl, experiment, tmp_path, change, parts):
    assert_refused(ppfl("run", experiment, "--out", tmp_path / "out", "--set", change), *parts)
    assert not (tmp_path / "out").exists()


def test_files_that_are_not_there_or_not_toml(ppfl, tmp_path):
    assert_refused(ppfl("run", tmp_path / "nowhere.toml"), "nowhere.toml")
    (tmp_path / "broken.toml").write_text("rounds = = 3")
    assert_refused(ppfl("run", tmp_path / "broken.toml"), "broken.toml is not TOML")
    assert_refused(ppfl("show", tmp_path), "there is no run in")


ROWS = {"x": [0.0, 1.0, 2.0, 3.0] * 4, "y": [0, 1] * 8, "who": ["a"] * 8 + ["b"] * 8}


def csv_experiment(tmp_path, columns, extra="", k=1):
    lines = [",".join(map(str, row)) for row in zip(*columns.values(), strict=True)]
    (tmp_path / "table.csv").write_text("\n".join([",".join(columns), *lines]))
    source = f'file = "table.csv"\nclient = "who"\ntarget = "y"\n{extra}'
    return write_experiment(tmp_path, "csv", source, k)


def npz_experiment(tmp_path, arrays):
    np.savez(tmp_path / "arrays.npz", **arrays)
    return write_experiment(tmp_path, "npz", 'file = "arrays.npz"', 1)


def write_experiment(tmp_path, kind, source, k):
    file = tmp_path / "data.toml"
    file.write_text(EXPERIMENT.format(kind=kind, source=source, k=k))
    return file


def test_the_data_are_good_before_they_are_spoiled(ppfl, tmp_path):
    assert ppfl("run", csv_experiment(tmp_path, ROWS, k=2), "--out", tmp_path / "csv").code == 0
    arrays = {"x": np.array(ROWS["x"])[:, None], "y": np.array(ROWS["y"]), "client": np.array(ROWS["who"])}
    assert ppfl("run", npz_experiment(tmp_path, arrays), "--out", tmp_path / "npz").code == 0


@pytest.mark.parametrize(
    ("columns", "extra", "parts"),
    [
        ({"x": [float("nan"), *ROWS["x"][1:]]}, "", ["'x' (1)", "missing"]),
        ({"x": [float("inf"), *ROWS["x"][1:]]}, "", ["infinity", "'a'"]),
        ({"y": [1] * 16}, "", ["every label is 1", "two classes"]),
        ({"y": [-1, *ROWS["y"][1:]]}, "", ["-1"]),
        ({"y": [5, *ROWS["y"][1:]]}, 'classes = ["no", "yes"]', ["5"]),
        ({"who": ["", *ROWS["who"][1:]]}, "", ["clients has 1 missing"]),
        ({"test": [True] * 8 + [False] * 8}, 'is_test = "test"', ["'a' have no training sample"]),
        ({"x": ["low", *ROWS["x"][1:]]}, "", ["'x'", "not numeric"]),
        ({}, 'columns = ["x", "x"]', ["'x'", "twice"]),
        ({}, "columns = []", ["no column is left"]),
        ({"y": [1_800_000_000, *ROWS["y"][1:]]}, "", ["1,800,000,001 classes", "regression"]),
    ],
)
def test_bad_tables(ppfl, tmp_path, columns, extra, parts):
    file = csv_experiment(tmp_path, ROWS | columns, extra)
    assert_refused(ppfl("run", file, "--out", tmp_path / "out"), *parts)
    assert not (tmp_path / "out").exists()


def test_more_canonical_models_than_clients(ppfl, tmp_path):
    done = ppfl("run", csv_experiment(tmp_path, ROWS, k=3), "--out", tmp_path / "out")
    assert_refused(done, "k is 3 but there are 2 clients")


@pytest.mark.parametrize(
    ("arrays", "parts"),
    [
        ({"x": np.full((16, 1), np.nan)}, ["NaN", "'a'"]),
        ({"y": np.full(16, 3)}, ["every label is 3"]),
        ({"y": np.arange(16) - 1}, ["-1"]),
        ({"x": np.ones((16, 0))}, ["no features"]),
        ({"x": np.ones((16, 1), complex)}, ["complex128"]),
        ({"client": np.array(["a"] * 15)}, ["16 rows", "clients 15"]),
        ({"is_test": np.array([True] * 8 + [False] * 8)}, ["'a' have no training sample"]),
    ],
)
def test_bad_arrays(ppfl, tmp_path, arrays, parts):
    good = {"x": np.array(ROWS["x"])[:, None], "y": np.array(ROWS["y"]), "client": np.array(ROWS["who"])}
    assert_refused(ppfl("run", npz_experiment(tmp_path, good | arrays), "--out", tmp_path / "out"), *parts)
    assert not (tmp_path / "out").exists()


def test_a_run_that_exists_is_not_overwritten(ppfl, experiment, tmp_path, snapshot):
    out = tmp_path / "out"
    assert ppfl("run", experiment, "--out", out).code == 0
    before = snapshot(tmp_path)
    assert_refused(ppfl("run", experiment, "--out", out), "exists with rounds=4", "another --out or use --resume")
    changed = ppfl("run", experiment, "--out", out, "--resume", "--set", "rounds=9")
    assert_refused(changed, "rounds is 4 there and 9 here", "another --out")
    assert snapshot(tmp_path) == before


def test_half_a_checkpoint(ppfl, experiment, tmp_path, snapshot):
    out = tmp_path / "out"
    ppfl("run", experiment, "--out", out)
    (out / "seed-0" / "result.safetensors").unlink()
    checkpoint = out / "seed-0" / "checkpoint.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[: checkpoint.stat().st_size // 2])
    before = snapshot(out)
    assert_refused(ppfl("run", experiment, "--out", out, "--resume"), "checkpoint.safetensors", "another folder")
    assert snapshot(out) == before


def test_a_path_that_no_file_system_has(ppfl):
    assert_refused(ppfl("show", "x" * 5000), "File name too long")


def test_options_that_do_not_exist(ppfl, experiment):
    done = ppfl("run", experiment, "--resum")
    assert done.code == 2
    assert "--resum" in done.err


def test_no_traceback_reaches_a_shell(tmp_path):
    command = [sys.executable, "-m", "ppfl", "run", str(tmp_path / "nowhere.toml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: there is no file")
    assert done.stderr.count("\n") == 1
