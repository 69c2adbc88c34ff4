"""What the commands do and print."""

import functools
import json
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file

import ppfl as package
from kit.experiments import file_bytes
from ppfl.cli.live import TAIL, progress_of
from ppfl.data import DATASETS
from ppfl.runs import load_run


def changes(*settings):
    return [part for setting in settings for part in ("--set", setting)]


def test_run_says_how_it_went_and_show_draws_scores_and_memberships(ppfl, experiment, here):
    done = ppfl("run", experiment, *changes("rounds=30", "seeds=[0, 3]", "name=mine", "watch.every=3"))
    folder = Path("runs") / "mine"
    record = load_run(folder / "seed-3")
    assert done.code == 0 and record.finished and "in true group" in done.out and str(folder) in done.out
    row = next(line for line in done.out.splitlines() if line.strip().startswith("3 "))
    assert f"{100 * record.scores['accuracy']:.2f}%" in row and f"{100 * record.agreement.share:.1f}%" in row
    assert "seed 3: round 30 of 30, loss" in done.err
    assert ppfl("run", experiment, "--out", here / "out", "--quiet") == (0, "", "")
    assert (here / "out" / "report.html").is_file()
    shown = ppfl("show", folder)
    rounds = [int(found) for found in re.findall(r"^ +(\d+) +\S+ +\S+%", shown.out, re.MULTILINE)]
    assert shown.code == 0 and rounds == sorted(rounds) and rounds[-1] == 30
    assert all(text in shown.out for text in ("finished", "truth", str(folder / "seed-3"), *record.ids))
    assert ppfl("run", experiment, "--out", "many", "-q", *changes("rounds=1", "data.n_clients=44")).code == 0
    assert "20 of 44 clients" in " ".join(ppfl("show", "many").out.split())
    settings = changes("method={name='local'}", "population.k=1", "data.task=regression")
    assert "rmse" in ppfl("run", experiment, "--out", "local", *settings).out
    assert "rmse" in ppfl("show", "local").out


def test_compare_puts_methods_side_by_side(ppfl, experiment, here):
    methods = "\n[methods.PPFL]\n[methods.FedAvg]\nmethod.name = 'fedavg'\npopulation.k = 1\n"
    (here / "both.toml").write_text(experiment.read_text() + methods)
    done = ppfl("compare", here / "both.toml", "--set", "seeds=[0, 1]", "--jobs", "1")
    assert done.code == 0, done.err
    page = (here / "runs" / "both" / "report.html").read_text()
    for label in ("PPFL", "FedAvg"):
        runs = [load_run(here / "runs" / "both" / label / f"seed-{seed}") for seed in (0, 1)]
        row = next(line for line in done.out.splitlines() if line.strip().startswith(label))
        assert f"{50 * sum(run.scores['accuracy'] for run in runs):.2f}% ± " in row
        assert f"{label}, seed 1: round 4 of 4" in done.err and f'<th scope="row">{label}</th>' in page
    shown = ppfl("show", here / "runs" / "both")
    table, again = ([line for line in text.splitlines() if line.split()[:1] in (["PPFL"], ["FedAvg"])]
                    for text in (done.out, shown.out))  # fmt: skip
    assert shown.code == 0 and again == table and len(table) == 2 and "ppfl show" in shown.out
    again = ppfl("report", here / "runs" / "both", "--out", "again", "--figures", "svg", "--tables", "csv,tex")
    assert again.code == 0 and {".html", ".svg", ".csv", ".tex"} == {file.suffix for file in Path("again").iterdir()}
    (client,) = (ppfl("show", here / "runs" / "both", "--client", "c1").out.split("client")[1].count("c1"),)
    assert client == 1 and ppfl("show", here / "runs" / "both", "--client", "nobody").code == 2


def test_the_version(ppfl):
    assert re.fullmatch(r"ppfl \d+\.\d+\S*\n", ppfl("--version").out)


SMALL = changes("rounds=2", "seeds=[0]", "data.n_clients=6", "data.dim=4", "data.max_size=60", "data.test_points=10")


def test_reproduce_runs_a_study_and_goes_on_where_it_was(ppfl, tmp_path, monkeypatch):
    out, chosen = tmp_path / "out", ("--case", "synthetic", "--method", "K = 1", "--method", "K = 2")
    reads, made = [], DATASETS["synthetic"].function
    counted = staticmethod(functools.wraps(made)(lambda **given: reads.append(given) or made(**given)))
    monkeypatch.setattr(DATASETS["synthetic"], "function", counted)
    command = ("reproduce", "k-sweep", *chosen, *SMALL, "--jobs", 1, "--out", out)
    first = ppfl(*command)
    assert first.code == 0, first.err
    assert len(reads) == 1
    page = (out / "k-sweep.md").read_text()
    assert "| K = 1 |" in page and "| K = 2 |" in page and "| K = 3 |" not in page
    assert "ppfl reproduce k-sweep --case synthetic" in page and str(out / "k-sweep.md") in first.out
    runs = file_bytes(out / "synthetic" / "K-2" / "seed-0")
    monkeypatch.setattr(DATASETS["synthetic"], "function", None)  # nothing is left to run, so nothing needs the data
    assert ppfl(*command).code == 0
    assert file_bytes(out / "synthetic" / "K-2" / "seed-0") == runs
    monkeypatch.setattr(DATASETS["synthetic"], "function", counted)
    monkeypatch.setenv("PPFL_DATA", str(tmp_path))
    stopped = ppfl(*command[:-1], tmp_path / "few", "--set", "data.n_clients=1")
    assert stopped.code == 2 and "synthetic: 1 of 2 runs failed" in stopped.err and "K = 2" in stopped.err
    failed = ppfl("reproduce", "k-sweep", "--out", tmp_path / "none")
    assert failed.code == 2 and "mnist" in failed.err and not (tmp_path / "none").exists()


def test_progress_is_that_of_the_last_round_of_a_record_that_is_not_read_as_a_whole(tmp_path):
    rows = [{"round": t, "accuracy": t / 100, "accuracy_worst_tenth": 0.1, "more": "x" * 2000} for t in range(1, 80)]
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    assert tmp_path.joinpath("metrics.jsonl").stat().st_size > 2 * TAIL
    assert progress_of(tmp_path) == (79, "accuracy", 0.79)
    assert progress_of(tmp_path / "nowhere") == (0, None, None)


def test_exported_files_hold_the_model_of_the_client(ppfl, experiment, here):
    assert ppfl("run", experiment, "--out", "runs", "-q").code == 0
    fitted = package.load(here / "runs" / "seed-0")
    done = ppfl("export", "runs/seed-0", "--client", "c1", "--client", "c0")
    assert done.code == 0 and "2 clients" in done.out and not done.err
    assert {file.name for file in (here / "models").iterdir()} == {
        "c0.safetensors",
        "c1.safetensors",
        "memberships.csv",
    }
    found, expected = load_file(here / "models" / "c1.safetensors"), fitted.model("c1").state_dict()
    assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in found)
    pytest.importorskip("onnxscript")
    done = ppfl("export", "runs/seed-0", "--client", "c1", "--onnx", "--out", "onnx")
    assert done.code == 0 and done.out.count("\n") == 1 and Path("onnx/c1.onnx").stat().st_size > 0


def test_rows_of_a_table_are_predicted_each_with_the_model_of_its_client(ppfl, experiment, here):
    assert ppfl("run", experiment, "--out", "runs", "-q").code == 0
    fitted = package.load(here / "runs" / "seed-0")
    x = np.random.default_rng(0).normal(size=(8, 3)).astype("float32")
    who = ["c1", "c0"] * 4
    pd.DataFrame(x, columns=["a", "b", "c"]).assign(client=who).to_csv("new.csv", index=False)
    fitted.save("fit.safetensors")
    for place in ("runs/seed-0", "fit.safetensors"):
        out = f"{Path(place).name}.csv"
        assert ppfl("predict", place, "new.csv", "--out", out).code == 0
        found = pd.read_csv(out)
        assert found["client"].tolist() == who
        shown = found[[name for name in found if name.startswith("probability")]].to_numpy()
        for row, client, probabilities in zip(x, who, shown, strict=True):
            assert probabilities == pytest.approx(fitted.predict(client, row[None])[0], abs=1e-6)
    refused = ppfl("predict", "runs/seed-0", "new.csv", "--out", "runs.csv", "--client-column", "nobody")
    assert refused.code == 2 and "nobody" in refused.err and not Path("runs.csv").exists()


@pytest.mark.parametrize("purpose", ["network", "methods", "sites", "table"])
def test_a_new_experiment_file_can_be_checked_and_run(ppfl, here, purpose):
    assert ppfl("init", "mine.toml", "--for", purpose).code == 0
    assert ppfl("init", "mine.toml", "--for", purpose).code == 2, "it is not overwritten"
    rows = [f"{'abc'[i % 3]},{i % 7},{i % 5}" for i in range(60)]
    (here / "table.csv").write_text("\n".join(["client,x,target", *rows]))
    before = sorted(here.iterdir())
    checked = ppfl("check", "mine.toml")
    assert checked.code == 0, checked.err
    assert sorted(here.iterdir()) == before, "nothing is written"
    assert "clients" in checked.out and "MB up" in checked.out
    command = "compare" if purpose == "methods" else "run"
    done = ppfl(command, "mine.toml", *changes("rounds=1"), *(("--jobs", 1) if command == "compare" else ()))
    assert done.code == 0 and "the report is" in done.out, done.err


def test_check_lists_what_a_file_can_name_and_says_what_a_round_costs(ppfl, experiment):
    listed = ppfl("check", "--list").out
    assert all(name in listed for name in ("fedavg", "ppfl", "perceptron", "digits", "membership_lr", "Data sets"))
    assert ppfl("check").code == 2
    wrong = ppfl("check", experiment, *changes("method.lr=-1"))
    assert wrong.code == 2 and "lr is -1" in wrong.err


def rows_of(file):
    return pd.read_csv(file, dtype=str).to_dict("records")


def test_glm_prints_and_writes_what_was_fitted(ppfl, here):
    """A formula, a decimal comma and a separator give what columns and decimal points give."""
    random = np.random.default_rng(0)
    shop = np.repeat([f"{i:03}" for i in range(10)], 8)
    table = pd.DataFrame({"shop": shop, "price": random.normal(size=80), "day": random.choice(["mo", "tu"], 80)})
    table["sold"] = np.where(shop < "005", 3.0, -3.0) * table["price"] + random.normal(size=80)
    table.to_csv("shops.csv.gz", index_label="rownames")
    fit = ("glm", "shops.csv.gz", "--client", "shop", "--target", "sold", "--columns", "price,day", "--n-init", "2")
    done, out = ppfl(*fit, "-k", "2,1"), here / "runs" / "glm-shops"
    assert done.code == 0 and "fitting k = 1, 2 (1 of 4)" in done.err
    assert sorted(file_bytes(out)) == ["coefficients.csv", "memberships.csv", "report.html", "result.json"]
    result = json.loads((out / "result.json").read_text())
    assert {tried["k"] for tried in result["tried"]} == {1, 2} and result["k"] == 2
    for text in ("80 rows of 10 clients (shop); sold from price, day", "family gaussian, guessed", "day is text: tu",
                 *(f"{tried['bic']:,.1f}" for tried in result["tried"])):  # fmt: skip
        assert text in done.out
    for label, figures in result["held_out"].items():
        assert f"{figures['rmse']:.3g}" in next(
            line for line in done.out.splitlines() if line.strip().startswith(label)
        )
    memberships = rows_of(out / "memberships.csv")
    assert [(row["client"], row["rows"]) for row in memberships] == [(f"{i:03}", "8") for i in range(10)]
    shares = np.array([[float(row["A"]), float(row["B"])] for row in memberships])
    np.testing.assert_allclose(shares.sum(1), 1)
    assert list(result["shares"].values()) == pytest.approx(shares.mean(0).tolist())
    assert [row["term"] for row in rows_of(out / "coefficients.csv")] == ["intercept", "price", "day = tu"]

    assert f"{result['mixed']} of 10 clients are mixed" in " ".join(done.out.split())
    assert "no other columns" not in done.out
    table[["shop", "sold"]].to_csv("alone.csv", index=False)
    alone = ppfl("glm", "alone.csv", *fit[2:6], "-k", "1")
    assert "there are no other columns, so clients differ in their intercepts only" in alone.out

    gaps = table.assign(price=table.price.mask(table.shop == "003").mask(table.index == 0), one="x")
    gaps.to_csv("gaps.csv", index=False)
    noted = ppfl("glm", "gaps.csv", *fit[2:6], "-k", "1")
    for note in ("left out: one (one value)", "9 rows lack a value", "every row lacks a value: client 003"):
        assert note in " ".join(noted.out.split())

    table.to_csv("tab.csv", sep="\t", decimal=",", index=False)
    formula = ("--formula", "sold ~ price + day + (price | shop)")
    ways = {"named": (*fit, "--shared", "day"), "formula": ("glm", "shops.csv.gz", *formula, "--n-init", "2"),
            "tab": ("glm", "tab.csv", *fit[2:], "--shared", "day", "--sep", "tab", "--decimal", ",")}  # fmt: skip
    for name, way in ways.items():
        assert ppfl(*way, "-k", "2", "--out", name, "--quiet") == (0, "", "")
        found = [float(row["A"]) for row in rows_of(here / name / "memberships.csv")]
        assert found == pytest.approx([float(row["A"]) for row in rows_of(here / "named" / "memberships.csv")])
