"""What the commands do and print."""

import os
import re
import signal
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from ppfl.cli.compare import progress_of
from ppfl.cli.demo import demo_experiments
from ppfl.cli.heatmap import ROWS
from ppfl.data.synthetic_settings import Synthetic
from ppfl.runs import RunFolder, load_run


def test_run_says_how_it_went_and_where_it_is(ppfl, experiment, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = ppfl("run", experiment, "--set", "seeds=[0, 3]", "--set", "name=mine")
    assert done.code == 0
    record = load_run(tmp_path / "runs" / "mine" / "seed-3")
    assert record.finished
    row = next(line for line in done.out.splitlines() if line.strip().startswith("3 "))
    assert f"{100 * record.scores['accuracy']:.2f}%" in row
    assert f"{100 * record.agreement.share:.2f}%" in row
    assert "grouped" in done.out
    assert str(Path("runs") / "mine") in done.out
    assert "round 4 of 4, loss" in done.err


def test_progress_tells_of_the_seed_at_hand(ppfl, experiment, tmp_path):
    done = ppfl("run", experiment, "--out", tmp_path / "out", "--set", "seeds=[0, 1]", "--set", "watch.every=3")
    for seed in (0, 1):
        lines = [line for line in done.err.splitlines() if line.startswith(f"seed {seed}: ")]
        assert ["accuracy" in line for line in lines] == [False, False, True, True]


def test_quiet_is_silent(ppfl, experiment, tmp_path):
    assert ppfl("run", experiment, "--out", tmp_path / "out", "--quiet") == (0, "", "")
    assert load_run(tmp_path / "out" / "seed-0").finished


def test_relative_data_start_at_the_experiment(ppfl, experiment, tmp_path, monkeypatch):
    (tmp_path / "table.csv").write_text("who,x,y\n" + "".join(f"{i % 3},{i % 7},{i % 2}\n" for i in range(60)))
    experiment.write_text(
        'rounds = 2\n[data]\nname = "csv"\nfile = "table.csv"\nclient = "who"\ntarget = "y"\n'
        '[model]\nname = "linear"\n[algorithm]\nname = "fedavg"\n'
    )
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert ppfl("run", experiment).code == 0


def test_a_terminal_sees_the_run_live(experiment, tmp_path):
    pty = pytest.importorskip("pty")
    reader, terminal = pty.openpty()
    command = [sys.executable, "-m", "ppfl", "run", str(experiment), "--out", str(tmp_path / "out")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=terminal) as process:
        process.wait()
    os.close(terminal)
    seen = os.read(reader, 1 << 16).decode()
    os.close(reader)
    assert process.returncode == 0
    assert re.search(r"seed 0.*4/4.*loss .*accuracy", seen, re.DOTALL)


def hear_ctrl_c():
    """Where tests run in the background, a shell has told them to ignore it."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def test_ctrl_c_says_how_to_go_on(ppfl, experiment, tmp_path):
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
    assert found
    assert found[2] == f"ppfl run {experiment} --set rounds=100000 --set watch.every=100000 --out {out} --resume"
    assert len(load_run(out / "seed-0").metrics) >= int(found[1])


def test_resume_goes_on_and_a_finished_run_stays(ppfl, experiment, tmp_path, monkeypatch, snapshot):
    out = tmp_path / "out"

    class Watching:
        def __enter__(self):
            return stop

        def __exit__(self, *error):
            return None

    def stop(_seed, end):
        if end.state.round == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("ppfl.cli.app.show_progress", lambda *_, **__: Watching())
        assert ppfl("run", experiment, "--out", out).code == 130
    assert load_run(out / "seed-0").rounds_done == 2
    assert ppfl("run", experiment, "--out", out, "--resume").code == 0
    before = snapshot(out)
    assert ppfl("run", experiment, "--out", out, "--resume").code == 0
    assert snapshot(out) == before


def test_show_draws_metrics_and_memberships(ppfl, experiment, tmp_path):
    ppfl("run", experiment, "--out", tmp_path / "out", "--set", "rounds=30", "--set", "seeds=[0, 1]")
    shown = ppfl("show", tmp_path / "out")
    record = load_run(tmp_path / "out" / "seed-0")
    assert shown.code == 0
    assert "finished" in shown.out
    rounds = [int(found) for found in re.findall(r"^ +(\d+) +\S+ +\S+%", shown.out, re.MULTILINE)]
    assert rounds == sorted(rounds)
    assert (rounds[0], rounds[-1], len(rounds)) == (1, 30, 12)
    assert all(name in shown.out for name in record.ids)
    assert "truth" in shown.out
    assert str(tmp_path / "out" / "seed-1") in shown.out
    groups = record.memberships.argmax(1)
    order = [record.ids.index(name) for name in re.findall(r"^ +(c\d)", shown.out, re.MULTILINE)]
    drawn = groups[order].tolist()
    assert sum(a != b for a, b in pairwise(drawn)) == len(set(drawn)) - 1  # no group twice
    share = record.memberships.mean(0)
    assert drawn[0] == int(share.argmax()) or torch.allclose(share, share.flip(0), atol=1e-2)


def test_show_samples_many_clients_and_says_so(ppfl, experiment, tmp_path):
    ppfl("run", experiment, "--out", tmp_path / "out", "--set", "data.n_clients=100", "--set", "rounds=1")
    shown = ppfl("show", tmp_path / "out" / "seed-0").out
    assert f"{ROWS} of 100 clients" in shown
    assert len(re.findall(r"^ +c\d\d ", shown, re.MULTILINE)) == ROWS


def test_show_takes_methods_without_memberships_and_regression(ppfl, experiment, tmp_path):
    changes = ["algorithm={name='local'}", "population.k=1", "data.task=regression"]
    options = [part for change in changes for part in ("--set", change)]
    done = ppfl("run", experiment, "--out", tmp_path / "out", *options)
    assert "rmse" in done.out
    shown = ppfl("show", tmp_path / "out")
    assert shown.code == 0
    assert "rmse" in shown.out


def test_version_and_help(ppfl):
    assert re.fullmatch(r"ppfl \d+\.\d+\S*\n", ppfl("--version").out)
    assert all(command in ppfl("--help").out for command in ("run", "show", "demo"))


def test_the_demo_shows_what_the_others_give(ppfl, tmp_path):
    done = ppfl("demo", "--out", tmp_path / "demo", "--seed", 1)
    assert done.code == 0
    local, fedavg, ours = (load_run(tmp_path / "demo" / name / "seed-1") for name in ("local", "fedavg", "ppfl"))
    for key in ("accuracy", "accuracy_mean", "accuracy_worst_tenth"):
        assert ours.scores[key] > max(local.scores[key], fedavg.scores[key])
    assert ours.agreement.share == 1.0
    assert (tmp_path / "demo" / "report.html").is_file()
    assert (tmp_path / "demo" / "memberships.svg").is_file()
    assert str(tmp_path / "demo" / "report.html") in done.out.replace("\n", "")
    again = ppfl("demo", "--out", tmp_path / "demo", "--seed", 1)
    assert again.err == ""  # nothing is run twice
    assert again.out == done.out


def test_the_demo_compares_like_with_like():
    def shared(experiment):
        settings = experiment.model_dump(exclude={"name", "population", "algorithm"})
        return settings, experiment.algorithm.lr, experiment.algorithm.batch_size, experiment.algorithm.local_epochs

    first, *others = demo_experiments(0).values()
    assert all(shared(other) == shared(first) for other in others)


def test_compare_puts_methods_side_by_side(ppfl, experiment, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    fedavg = "\n[methods.FedAvg]\nalgorithm.name = 'fedavg'\npopulation.k = 1\n"
    both = experiment.read_text() + "\n[methods.PPFL]\n[methods.PPFL-3]\npopulation.k = 3\n" + fedavg
    experiment.with_name("both.toml").write_text(both)
    done = ppfl("compare", experiment.with_name("both.toml"), "--set", "seeds=[0, 1]", "--jobs", "1")
    assert done.code == 0, done.err
    rows = {line.split()[0]: line for line in done.out.splitlines() if line.strip().startswith(("PPFL", "FedAvg"))}
    page = (tmp_path / "runs" / "both" / "report.html").read_text()
    for label in ("PPFL", "PPFL-3", "FedAvg"):
        runs = [load_run(tmp_path / "runs" / "both" / label / f"seed-{seed}") for seed in (0, 1)]
        mean = 100 * sum(run.scores["accuracy"] for run in runs) / 2
        assert f"{mean:.2f} ± " in rows[label]
        assert f"{label}, seed 1: round 4 of 4" in done.err
        assert f'<th scope="row">{label}</th>' in page


def test_progress_is_read_from_the_end_of_a_record(tmp_path):
    assert progress_of(tmp_path).round == 0
    lines = ['ut": 1}', '{"round": 1, "accuracy": 0.5, "accuracy_worst_tenth": 0.1}', '{"round": 2, "loss": 1.0}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"round": 3, "lo')
    assert progress_of(tmp_path) == (2, "accuracy", 0.5)


def test_reproduce_runs_a_study_and_goes_on_where_it_was(ppfl, tmp_path, snapshot, monkeypatch):
    small = ["rounds=2", "seeds=[0]", "data.n_clients=6", "data.dim=4", "data.max_size=60", "data.test_points=10"]
    changes = [part for change in small for part in ("--set", change)]
    chosen = ("--case", "synthetic", "--method", "K = 1", "--method", "K = 2")
    out = tmp_path / "out"
    first = ppfl("reproduce", "k-sweep", *chosen, *changes, "--jobs", 1, "--out", out)
    assert first.code == 0, first.err
    page = (out / "k-sweep.md").read_text()
    assert "| K = 1 |" in page and "| K = 2 |" in page and "| K = 3 |" not in page
    assert "ppfl reproduce k-sweep --case synthetic" in page
    assert f"Runs of {load_run(out / 'synthetic' / 'K-2' / 'seed-0').versions['started'][:10]}" in page
    assert all(word in first.out for word in ("K = 1", "K = 2", "accuracy", str(out / "k-sweep.md")))
    assert (out / "synthetic" / "report.html").is_file()
    runs = snapshot(out / "synthetic" / "K-2" / "seed-0")
    monkeypatch.setattr(Synthetic, "build", None)  # nothing is left to run, so nothing needs the data
    assert ppfl("reproduce", "k-sweep", *chosen, *changes, "--jobs", 1, "--out", out).code == 0
    assert snapshot(out / "synthetic" / "K-2" / "seed-0") == runs


def test_reproduce_asks_for_missing_data_before_it_runs(ppfl, tmp_path, monkeypatch):
    monkeypatch.setenv("PPFL_DATA", str(tmp_path))
    monkeypatch.setattr(Synthetic, "build", lambda *_: None)  # what can be drawn is never missing, and takes seconds
    failed = ppfl("reproduce", "k-sweep", "--out", tmp_path / "out")
    assert failed.code == 2 and "mnist" in failed.err and "--case synthetic" in failed.err
    assert not (tmp_path / "out").exists()


def test_a_case_in_which_a_run_fails_stops_no_other(ppfl, tmp_path):
    small = ["rounds=1", "seeds=[0]", "data.n_clients=6", "data.dim=4", "data.max_size=60", "data.test_points=10"]
    changes = [part for change in small for part in ("--set", change)]
    cases = ("--case", "synthetic", "--case", "synthetic-tuned", "--method", "FedAvg")
    out = tmp_path / "out"
    of_another = out / "synthetic" / "FedAvg" / "seed-0" / "experiment.json"
    of_another.parent.mkdir(parents=True)
    of_another.write_text("{}")
    failed = ppfl("reproduce", "table1", *cases, *changes, "--jobs", 1, "--out", out)
    assert failed.code == 2 and "synthetic: 1 of 1 runs failed" in failed.err and str(of_another.parent) in failed.err
    assert of_another.read_text() == "{}"
    assert RunFolder(out / "synthetic-tuned" / "FedAvg" / "seed-0").finished
