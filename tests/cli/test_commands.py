"""What the commands do and print."""

import csv
import json
import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

import ppfl as package
from kit.experiments import file_bytes
from ppfl.cli.compare import progress_of
from ppfl.cli.demo import demo_experiments
from ppfl.cli.heatmap import ROWS
from ppfl.data import DATASETS
from ppfl.runs import RunFolder, load_run


def changes(*settings: str) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


# ---------------------------------------------------------------------- run, show, compare


def test_run_says_how_it_went_and_where_it_is(ppfl, experiment, here) -> None:
    done = ppfl("run", experiment, *changes("seeds=[0, 3]", "name=mine", "watch.every=3"))
    assert done.code == 0
    record = load_run(here / "runs" / "mine" / "seed-3")
    assert record.finished
    row = next(line for line in done.out.splitlines() if line.strip().startswith("3 "))
    assert f"{100 * record.scores['accuracy']:.2f}%" in row and f"{100 * record.agreement.share:.2f}%" in row
    assert "grouped" in done.out and str(Path("runs") / "mine") in done.out
    for seed in (0, 3):
        lines = [line for line in done.err.splitlines() if line.startswith(f"seed {seed}: ")]
        assert ["accuracy" in line for line in lines] == [False, False, True, True]
        assert "round 4 of 4, loss" in lines[-1]
    assert ppfl("run", experiment, "--out", here / "out", "--quiet") == (0, "", "")
    assert load_run(here / "out" / "seed-0").finished


def test_show_draws_metrics_and_memberships(ppfl, experiment, tmp_path) -> None:
    ppfl("run", experiment, "--out", tmp_path / "out", *changes("rounds=30", "seeds=[0, 1]"))
    shown, record = ppfl("show", tmp_path / "out"), load_run(tmp_path / "out" / "seed-0")
    assert shown.code == 0
    rounds = [int(found) for found in re.findall(r"^ +(\d+) +\S+ +\S+%", shown.out, re.MULTILINE)]
    assert rounds == sorted(rounds) and (rounds[0], rounds[-1], len(rounds)) == (1, 30, 12)
    for text in ("finished", "truth", str(tmp_path / "out" / "seed-1"), *record.ids):
        assert text in shown.out
    groups = record.memberships.argmax(1)
    order = [record.ids.index(name) for name in re.findall(r"^ +(c\d)", shown.out, re.MULTILINE)]
    drawn = groups[order].tolist()
    assert sum(a != b for a, b in pairwise(drawn)) == len(set(drawn)) - 1  # no group twice
    share = record.memberships.mean(0)
    assert drawn[0] == int(share.argmax()) or torch.allclose(share, share.flip(0), atol=1e-2)


def test_show_samples_many_clients_and_takes_methods_without_memberships(ppfl, experiment, tmp_path) -> None:
    ppfl("run", experiment, "--out", tmp_path / "many", *changes("data.n_clients=100", "rounds=1"))
    shown = ppfl("show", tmp_path / "many" / "seed-0").out
    assert f"{ROWS} of 100 clients" in shown and len(re.findall(r"^ +c\d\d ", shown, re.MULTILINE)) == ROWS
    settings = changes("algorithm={name='local'}", "population.k=1", "data.task=regression")
    assert "rmse" in ppfl("run", experiment, "--out", tmp_path / "out", *settings).out
    shown = ppfl("show", tmp_path / "out")
    assert shown.code == 0 and "rmse" in shown.out


def test_compare_puts_methods_side_by_side(ppfl, experiment, here) -> None:
    fedavg = "\n[methods.FedAvg]\nalgorithm.name = 'fedavg'\npopulation.k = 1\n"
    both = experiment.read_text() + "\n[methods.PPFL]\n[methods.PPFL-3]\npopulation.k = 3\n" + fedavg
    experiment.with_name("both.toml").write_text(both)
    done = ppfl("compare", experiment.with_name("both.toml"), "--set", "seeds=[0, 1]", "--jobs", "1")
    assert done.code == 0, done.err
    rows = {line.split()[0]: line for line in done.out.splitlines() if line.strip().startswith(("PPFL", "FedAvg"))}
    page = (here / "runs" / "both" / "report.html").read_text()
    for label in ("PPFL", "PPFL-3", "FedAvg"):
        runs = [load_run(here / "runs" / "both" / label / f"seed-{seed}") for seed in (0, 1)]
        assert f"{50 * sum(run.scores['accuracy'] for run in runs):.2f} ± " in rows[label]
        assert f"{label}, seed 1: round 4 of 4" in done.err and f'<th scope="row">{label}</th>' in page


def test_progress_is_read_from_the_end_of_a_record_that_is_being_written(tmp_path) -> None:
    assert progress_of(tmp_path).round == 0
    lines = ['ut": 1}', '{"round": 1, "accuracy": 0.5, "accuracy_worst_tenth": 0.1}', '{"round": 2, "loss": 1.0}']
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + '\n{"round": 3, "lo')
    assert progress_of(tmp_path) == (2, "accuracy", 0.5)


def test_version_and_help(ppfl) -> None:
    assert re.fullmatch(r"ppfl \d+\.\d+\S*\n", ppfl("--version").out)
    assert all(command in ppfl("--help").out for command in ("run", "show", "demo", "glm", "federation"))


# ---------------------------------------------------------------------- demo, reproduce


def test_the_demo_shows_what_the_others_give_and_compares_like_with_like(ppfl, tmp_path) -> None:
    done = ppfl("demo", "--out", tmp_path / "demo", "--seed", 1)
    assert done.code == 0
    local, fedavg, ours = (load_run(tmp_path / "demo" / name / "seed-1") for name in ("local", "fedavg", "ppfl"))
    for key in ("accuracy", "accuracy_mean", "accuracy_worst_tenth"):
        assert ours.scores[key] > max(local.scores[key], fedavg.scores[key])
    assert ours.agreement.share == 1.0 and (tmp_path / "demo" / "memberships.svg").is_file()
    assert str(tmp_path / "demo" / "report.html") in done.out.replace("\n", "")
    assert ppfl("demo", "--out", tmp_path / "demo", "--seed", 1) == (0, done.out, "")  # nothing is run twice
    shared = [
        (each.model_dump(exclude={"name", "population", "algorithm"}), each.algorithm.lr, each.algorithm.batch_size)
        for each in demo_experiments(0).values()
    ]
    assert shared[0] == shared[1] == shared[2]


SMALL_STUDY = changes("rounds=2", "seeds=[0]", "data.n_clients=6", "data.dim=4", "data.max_size=60",
                      "data.test_points=10")  # fmt: skip


def test_reproduce_runs_a_study_and_goes_on_where_it_was(ppfl, tmp_path, monkeypatch) -> None:
    out, chosen = tmp_path / "out", ("--case", "synthetic", "--method", "K = 1", "--method", "K = 2")
    command = ("reproduce", "k-sweep", *chosen, *SMALL_STUDY, "--jobs", 1, "--out", out)
    first = ppfl(*command)
    assert first.code == 0, first.err
    page = (out / "k-sweep.md").read_text()
    assert "| K = 1 |" in page and "| K = 2 |" in page and "| K = 3 |" not in page
    assert "ppfl reproduce k-sweep --case synthetic" in page
    assert f"Runs of {load_run(out / 'synthetic' / 'K-2' / 'seed-0').versions['started'][:10]}" in page
    assert all(word in first.out for word in ("K = 1", "K = 2", "accuracy", str(out / "k-sweep.md")))
    assert (out / "synthetic" / "report.html").is_file()
    runs = file_bytes(out / "synthetic" / "K-2" / "seed-0")
    monkeypatch.setattr(DATASETS["synthetic"], "build", None)  # nothing is left to run, so nothing needs the data
    assert ppfl(*command).code == 0
    assert file_bytes(out / "synthetic" / "K-2" / "seed-0") == runs


def test_reproduce_asks_for_missing_data_before_it_runs(ppfl, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PPFL_DATA", str(tmp_path))
    monkeypatch.setattr(
        DATASETS["synthetic"], "build", lambda *_: None
    )  # it is drawn, never missing, and takes seconds
    failed = ppfl("reproduce", "k-sweep", "--out", tmp_path / "out")
    assert failed.code == 2 and "mnist" in failed.err and "--case synthetic" in failed.err
    assert not (tmp_path / "out").exists()


def test_a_case_in_which_a_run_fails_stops_no_other(ppfl, tmp_path) -> None:
    out, cases = tmp_path / "out", ("--case", "synthetic", "--case", "synthetic-tuned", "--method", "FedAvg")
    of_another = out / "synthetic" / "FedAvg" / "seed-0" / "experiment.json"
    of_another.parent.mkdir(parents=True)
    of_another.write_text("{}")
    failed = ppfl("reproduce", "table1", *cases, *SMALL_STUDY, "--jobs", 1, "--out", out)
    assert failed.code == 2 and "synthetic: 1 of 1 runs failed" in failed.err and str(of_another.parent) in failed.err
    assert of_another.read_text() == "{}" and RunFolder(out / "synthetic-tuned" / "FedAvg" / "seed-0").finished


# ---------------------------------------------------------------------- export


def test_exported_files_hold_the_model_of_the_client(ppfl, experiment, here) -> None:
    assert ppfl("run", experiment, "--out", "runs", "-q").code == 0
    finished = here / "runs" / "seed-0"
    fitted = package.load(finished)
    client = fitted.ids[1]
    done = ppfl("export", finished, "--client", client)
    assert done.code == 0 and f"{client}.safetensors" in done.out and not done.err
    found, expected = load_file(here / f"{client}.safetensors"), fitted.model(client).state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    done = ppfl("export", finished, "--client", client, "--onnx", "--out", "model.onnx")
    assert done.code == 0 and done.out.count("\n") == 1, done
    x = torch.linspace(-1, 1, 9).reshape(3, 3)
    (predicted,) = runtime.InferenceSession("model.onnx").run(None, {"x": x.numpy()})
    torch.testing.assert_close(torch.from_numpy(predicted), fitted.predict(client, x), rtol=0, atol=1e-6)


# ---------------------------------------------------------------------- glm


@pytest.fixture
def shops(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    shop = np.repeat([f"{i:03}" for i in range(10)], 8)
    table = pd.DataFrame({"shop": shop, "price": random.normal(size=80), "day": random.choice(["mo", "tu"], 80)})
    table["sold"] = np.where(shop < "005", 3.0, -3.0) * table["price"] + random.normal(size=80)
    table.to_csv(tmp_path / "shops.csv.gz", index_label="rownames")
    return tmp_path / "shops.csv.gz"


def rows_of(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8", newline="") as text:
        return list(csv.DictReader(text))


def test_glm_prints_and_writes_what_was_fitted(ppfl, shops, here) -> None:
    done = ppfl("glm", shops, "--client", "shop", "--target", "sold", "-k", "2,1", "--n-init", "2")
    assert done.code == 0 and "fitting k = 1, 2 (1 of 4)" in done.err
    out = here / "runs" / "glm-shops"
    assert sorted(file_bytes(out)) == ["coefficients.csv", "memberships.csv", "report.html", "result.json"]
    result = json.loads((out / "result.json").read_text())
    assert [tried["k"] for tried in result["tried"]] == [1, 2] and result["k"] == 2
    for text in ("80 rows of 10 clients (shop); sold from price, day", "family gaussian, guessed",
                 "left out: rownames (row numbers)", "day is text: tu, each against mo", "try more with -k 2,3,4,5",
                 *(f"{tried['bic']:.1f}" for tried in result["tried"])):  # fmt: skip
        assert text in done.out
    for label, figures in result["held_out"].items():
        assert f"{figures['rmse']:#.4g}" in next(line for line in done.out.splitlines() if line.startswith(label))
    assert f"ppfl glm {shops} --client shop --target sold -k 2,1 --n-init 2" in (out / "report.html").read_text()
    memberships = rows_of(out / "memberships.csv")
    assert [(row["client"], row["rows"]) for row in memberships] == [(f"{i:03}", "8") for i in range(10)]
    assert [row["term"] for row in rows_of(out / "coefficients.csv")] == ["intercept", "price", "day = tu"]
    shares = np.array([[float(row["A"]), float(row["B"])] for row in memberships])
    np.testing.assert_allclose(shares.sum(1), 1)
    assert list(result["shares"].values()) == pytest.approx(shares.mean(0).tolist())
    assert result["mixed"] + sum(result["clear"].values()) == result["clients"] == 10


def test_options_of_glm_say_how_a_file_is_read_and_what_is_fitted(ppfl, shops, tmp_path) -> None:
    """A formula, a decimal comma and a separator give what columns and decimal points give, to the last digit."""
    table, found = pd.read_csv(shops, dtype={"shop": str}), []
    columns = ("--client", "shop", "--target", "sold", "--columns", "price,day", "--shared", "day")
    ways = [("named", shops, columns), ("again", shops, columns)]
    for sep, option in ((";", ";"), ("\t", "tab")):
        table.to_csv(tmp_path / f"{option}.csv", sep=sep, decimal=",", index=False)
        ways.append((option, tmp_path / f"{option}.csv", (*columns, "--sep", option, "--decimal", ",")))
    for name, file, options in ways:
        out = tmp_path / f"out {name}"
        assert ppfl("glm", file, *options, "-k", "2", "--n-init", "2", "--out", out, "--quiet") == (0, "", "")
        found.append([rows_of(out / "memberships.csv"), rows_of(out / "coefficients.csv")])
    assert found[0] == found[1] == found[2] == found[3]
    assert "separated by ';'" in ppfl("glm", tmp_path / ";.csv", *columns, "-k", "1", "--out", tmp_path / "x").err
    formula = ("--formula", "sold ~ price + day + (price | shop)")
    assert ppfl("glm", shops, *formula, "-k", "2", "--n-init", "2", "--out", tmp_path / "formula").code == 0
    for left, right in zip(rows_of(tmp_path / "formula" / "memberships.csv"), found[0][0], strict=True):
        assert float(left["A"]) == pytest.approx(float(right["A"]))
    shared = {row["term"]: row["shared"] for row in rows_of(tmp_path / "formula" / "coefficients.csv")}
    assert shared == {"intercept": "no", "price": "no", "day[T.tu]": "yes"}


def test_notes_of_glm_tell_of_bad_cells_lost_clients_and_fits_that_do_not_converge(ppfl, shops, tmp_path) -> None:
    out, table = tmp_path / "out", pd.read_csv(shops, dtype=str)
    table["open"] = np.where(table["sold"].astype(float) > 0, "yes", "no")
    table["exact"] = 2 * table["price"].astype(float) + 1  # no noise, so the likelihood has no maximum
    table.loc[16, "price"] = "n/a?"
    table.loc[table["shop"] == "007", "price"] = ""
    table.to_csv(tmp_path / "some.csv", index=False)
    options = (tmp_path / "some.csv", "--client", "shop", "--out", out, "--columns")
    done = ppfl("glm", *options, "price", "--target", "open", "-k", "1")
    for text in ("1 cell without a number, 'n/a?' in row 17", "9 rows lack a value", "client 007", "accuracy",
                 "family bernoulli (no or yes), guessed"):  # fmt: skip
        assert text in done.out
    result = json.loads((out / "result.json").read_text())
    assert result["clients_left_out"] == ["007"]
    assert result["bad_cells"] == [{"column": "price", "cells": 1, "example": "n/a?", "row": 17}]
    done = ppfl("glm", *options, "price", "--target", "exact", "-k", "2", "--n-init", "1", "--test-fraction", "0")
    assert done.code == 0 and "the fit with k = 2 did not converge" in done.out and "Held out" not in done.out
    assert "Warning" not in done.err and ".py" not in done.err
    done = ppfl("glm", *options, "", "--target", "sold", "-k", "1")
    assert "clients differ in their intercepts only" in done.out
