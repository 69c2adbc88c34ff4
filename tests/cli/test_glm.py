"""`ppfl glm`: files that agree with the estimator, the printed tables, and error messages."""

import csv
import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from ppfl.glm import PopulationRegressor


@pytest.fixture
def shops(tmp_path: Path) -> Path:
    random = np.random.default_rng(0)
    shop = np.repeat([f"{i:03}" for i in range(10)], 8)
    table = pd.DataFrame({"shop": shop, "price": random.normal(size=80), "day": random.choice(["mo", "tu"], 80)})
    table["sold"] = np.where(shop < "005", 3.0, -3.0) * table["price"] + random.normal(size=80)
    table["open"] = np.where(table["sold"] > 0, "yes", "no")
    file = tmp_path / "shops.csv.gz"
    table.to_csv(file, index_label="rownames")
    return file


QUICK = ("--client", "shop", "--target", "sold", "--columns", "price,day", "--n-init", "2")


def read_rows(file: Path) -> list[dict[str, str]]:
    with file.open(encoding="utf-8", newline="") as text:
        return list(csv.DictReader(text))


def test_files_agree_with_the_estimator(ppfl, shops, tmp_path):
    assert ppfl("glm", shops, *QUICK, "-k", "2", "--out", tmp_path / "out", "--seed", "3").code == 0
    table = pd.read_csv(shops, dtype={"shop": str})
    x = np.stack([table["price"], table["day"] == "tu"], 1).astype(float)
    model = PopulationRegressor(2, n_init=2, random_state=3).fit(x, table["sold"].to_numpy(), clients=table["shop"])
    memberships = read_rows(tmp_path / "out" / "memberships.csv")
    assert [row["client"] for row in memberships] == model.clients_.tolist() == [f"{i:03}" for i in range(10)]
    assert {row["rows"] for row in memberships} == {"8"}
    found = np.array([[float(row["A"]), float(row["B"])] for row in memberships])
    np.testing.assert_allclose(found, np.asarray(model.memberships_), rtol=1e-12)
    np.testing.assert_allclose(found.sum(1), 1)
    coefficients = read_rows(tmp_path / "out" / "coefficients.csv")
    assert [row["term"] for row in coefficients] == ["intercept", "price", "day = tu"]
    written = np.array([[float(row["A"]), float(row["B"])] for row in coefficients])
    np.testing.assert_allclose(written, np.vstack([model.canonical_intercept_, model.canonical_coef_.T]), rtol=1e-12)
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["tried"][0]["bic"] == pytest.approx(model.bic_)
    assert list(result["shares"].values()) == pytest.approx(found.mean(0).tolist())
    assert result["mixed"] + sum(result["clear"].values()) == result["clients"] == 10


def test_the_printed_tables_agree_with_the_files(ppfl, shops, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = ppfl("glm", shops, "--client", "shop", "--target", "sold", "-k", "2,1", "--n-init", "2")
    assert done.code == 0
    result = json.loads((tmp_path / "runs" / "glm-shops" / "result.json").read_text())
    assert [tried["k"] for tried in result["tried"]] == [1, 2]
    assert result["k"] == 2
    assert "80 rows of 10 clients (shop); sold from price, day, open" in done.out
    assert "family gaussian, guessed" in done.out
    assert "left out: rownames (row numbers)" in done.out
    assert "day is text: tu, each against mo" in done.out
    for tried in result["tried"]:
        assert f"{tried['bic']:.1f}" in done.out
    for label, figures in result["held_out"].items():
        line = next(line for line in done.out.splitlines() if line.startswith(label))
        assert f"{figures['rmse']:#.4g}" in line
    assert "fitting k = 1, 2 (1 of 4)" in done.err
    assert "k = 2 is the largest that was tried; try more with -k 2,3,4,5" in done.out
    page = (tmp_path / "runs" / "glm-shops" / "report.html").read_text()
    assert f"ppfl glm {shops} --client shop --target sold -k 2,1 --n-init 2" in page


def test_a_second_run_is_the_same(ppfl, shops, tmp_path, snapshot):
    found = []
    for _ in range(2):
        assert ppfl("glm", shops, *QUICK, "-k", "2", "--out", tmp_path / "out", "--quiet") == (0, "", "")
        files = snapshot(tmp_path / "out")
        assert sorted(files) == ["coefficients.csv", "memberships.csv", "report.html", "result.json"]
        result = json.loads(files["result.json"])
        assert result.pop("seconds")
        found.append((files["coefficients.csv"], files["memberships.csv"], result))
    assert found[0] == found[1]


def test_classes_have_an_accuracy_and_holding_out_is_optional(ppfl, shops, tmp_path):
    options = ("--client", "shop", "--target", "open", "--columns", "price", "-k", "1", "--out", tmp_path / "out")
    done = ppfl("glm", shops, *options)
    assert "family bernoulli (no or yes), guessed" in done.out
    assert "accuracy" in done.out
    done = ppfl("glm", shops, *options, "--test-fraction", "0")
    assert done.code == 0
    assert "Held out" not in done.out


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (["--client", "who"], ["no column 'who'", "'shop'"]),
        (["--target", "sld"], ["no column 'sld'"]),
        (["--columns", "price,colour"], ["no column 'colour'"]),
        (["--shared", "colour"], ["shared names 'colour'"]),
        (["--family", "normal"], ["no family 'normal'", "gaussian"]),
        (["--family", "bernoulli"], ["80 classes"]),
        (["-k", "two"], ["-k is 'two'", "1,2,3"]),
        (["--choose", "aic"], ["choose is 'aic'", "held_out, prediction, bic"]),
        (["--formula", "sold ~ price + (1 | shop)"], ["what the formula says"]),
        (["--sep", ";;"], ["sep is ';;'"]),
        (["-k", "0"], ["k is 0"]),
        (["-k", "2,50"], ["k is 50", "10 clients"]),
        (["--affinity", "features"], ["penalty is 0"]),
        (["--mix", "outputs"], ["mix is 'outputs'"]),
        (["--ridge", "-1"], ["ridge is -1"]),
        (["--test-fraction", "2"], ["fraction is 2"]),
    ],
)
def test_bad_options_give_one_line_of_error(ppfl, shops, tmp_path, options, parts):
    done = ppfl("glm", shops, *QUICK, "-k", "1", "--out", tmp_path / "out", *options, "--quiet")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ")
    assert done.err.count("\n") == 1
    assert all(part in done.err for part in parts)
    assert not (tmp_path / "out").exists()


def test_bad_cells_and_lost_clients_are_reported(ppfl, shops, tmp_path):
    table = pd.read_csv(shops, dtype=str)
    table.loc[16, "price"] = "n/a?"
    table.loc[table["shop"] == "007", "price"] = ""
    file = tmp_path / "some.csv"
    table.to_csv(file, index=False)
    done = ppfl("glm", file, *QUICK, "-k", "1", "--out", tmp_path / "out")
    assert done.code == 0
    assert "price has 1 cell without a number, 'n/a?' in row 17: taken as missing" in done.out
    assert "9 rows lack a value" in done.out
    assert "left out, because every row lacks a value: client 007" in done.out
    assert "levels)" not in done.out
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["clients_left_out"] == ["007"]
    assert result["bad_cells"] == [{"column": "price", "cells": 1, "example": "n/a?", "row": 17}]


def test_a_formula_says_client_target_and_columns(ppfl, shops, tmp_path):
    formula = "sold ~ price + day + (price | shop)"
    assert ppfl("glm", shops, "--formula", formula, "-k", "2", "--n-init", "2", "--out", tmp_path / "a").code == 0
    assert ppfl("glm", shops, *QUICK, "--shared", "day", "-k", "2", "--out", tmp_path / "b").code == 0
    found, wanted = ((tmp_path / name / "memberships.csv") for name in "ab")
    assert [row["client"] for row in read_rows(found)] == [row["client"] for row in read_rows(wanted)]
    for left, right in zip(read_rows(found), read_rows(wanted), strict=True):
        assert float(left["A"]) == pytest.approx(float(right["A"]))
    shared = {row["term"]: row["shared"] for row in read_rows(tmp_path / "a" / "coefficients.csv")}
    assert shared == {"intercept": "no", "price": "no", "day[T.tu]": "yes"}


def test_decimal_commas_and_other_separators(ppfl, shops, tmp_path):
    table = pd.read_csv(shops, dtype={"shop": str})
    for sep, option in ((";", ";"), ("\t", "tab")):
        table.to_csv(tmp_path / "comma.csv", sep=sep, decimal=",", index=False)
        options = (*QUICK, "-k", "1", "--out", tmp_path / "out")
        assert ppfl("glm", tmp_path / "comma.csv", *options, "--sep", option, "--decimal", ",", "--quiet").code == 0
        found = read_rows(tmp_path / "out" / "coefficients.csv")
        assert ppfl("glm", shops, *options, "--quiet").code == 0
        assert found == read_rows(tmp_path / "out" / "coefficients.csv")
        assert f"separated by {sep!r}" in ppfl("glm", tmp_path / "comma.csv", *options).err


def test_clients_may_have_intercepts_only(ppfl, shops, tmp_path):
    done = ppfl(
        "glm", shops, "--client", "shop", "--target", "sold", "--columns", "", "-k", "1", "--out", tmp_path / "out"
    )
    assert done.code == 0
    assert "clients differ in their intercepts only" in done.out
    assert [row["term"] for row in read_rows(tmp_path / "out" / "coefficients.csv")] == ["intercept"]


def test_a_fit_that_does_not_converge_is_a_note(ppfl, shops, tmp_path):
    table = pd.read_csv(shops, dtype={"shop": str})
    table["sold"] = 2 * table["price"] + 1  # no noise, so the likelihood has no maximum
    table.to_csv(tmp_path / "exact.csv", index=False)
    options = (*QUICK, "-k", "2", "--n-init", "1", "--test-fraction", "0")
    done = ppfl("glm", tmp_path / "exact.csv", *options, "--out", tmp_path / "out")
    assert done.code == 0
    assert "the fit with k = 2 did not converge; a larger --ridge" in done.out
    assert "Warning" not in done.err
    assert ".py" not in done.err


def test_a_missing_file(ppfl, tmp_path):
    done = ppfl("glm", tmp_path / "nowhere.csv", "--client", "a", "--target", "b")
    assert done.code == 2
    assert "no file" in done.err
