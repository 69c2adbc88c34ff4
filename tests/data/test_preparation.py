"""Sums of several tables prepare their rows as one table with all rows does."""

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.impute import SimpleImputer
from sklearn.preprocessing import StandardScaler

from ppfl.core.errors import DataError, SettingError
from ppfl.data.column_sums import agree
from ppfl.data.preparation import Preparation
from ppfl.data.preparation_settings import PreparationSettings
from ppfl.data.sample_kind import SampleKind
from ppfl.data.table_rows import TableRows
from ppfl.runs.experiment import Experiment
from ppfl.runs.run import read_data


def make_table(seed: int = 0, rows: int = 120) -> pd.DataFrame:
    random = np.random.default_rng(seed)
    site = np.repeat(["north", "south", "east"], rows // 3)
    frame = pd.DataFrame(
        {
            "client": [f"{name}-{i % 4}" for i, name in enumerate(site)],
            "age": random.normal(50, 12, rows),
            "year": 2000 + random.integers(0, 20, rows),
            "tiny": 1e-9 * random.normal(3, 1, rows),
            "same": 0.1,
            "ward": random.choice(["a", "b"], rows),
            "code": random.choice([10, 20, 30], rows),
            "y": random.normal(size=rows),
        }
    )
    frame.loc[site == "east", "ward"] = "only-east"
    return frame


def with_gaps(frame: pd.DataFrame) -> pd.DataFrame:
    random, frame = np.random.default_rng(1), frame.copy()
    for name in ("age", "ward"):
        frame.loc[random.random(len(frame)) < 0.2, name] = None
    frame.loc[frame.client.str.startswith("south"), "age"] = None  # a column that one site does not have at all
    return frame


def parts_of(frame: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """One table per site, read as a file of its own would be."""
    return {name: part.reset_index(drop=True).infer_objects() for name, part in frame.groupby(frame.client.str[:4])}


def rows_of(frame, settings, **more):
    return TableRows.of(frame, "client", "y", settings, **{"test_fraction": 0.25, **more})


def agree_over(sites: dict[str, TableRows], settings) -> Preparation:
    def ask(plan, center):
        found = [rows.sums(plan, center) for rows in sites.values()]
        assert all({name: len(part) for name, part in one.items()} == plan.sizes(second=center is not None)
                   for one in found)  # fmt: skip
        return {name: sum(one[name] for one in found) for name in found[0]}

    return agree({name: rows.describe() for name, rows in sites.items()}, settings, ask)


SETTINGS = {
    "complete": (PreparationSettings(text=("code",)), make_table()),
    "fill": (PreparationSettings(missing="fill", text=("code",)), with_gaps(make_table())),
    "drop": (PreparationSettings(missing="drop"), with_gaps(make_table()).assign(age=1.5)),
    "levels": (PreparationSettings(levels={"ward": ("b", "a", "other")}), make_table()),
    "plain": (PreparationSettings(standardise=False, standardise_target=True), make_table()),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_three_sites_prepare_every_row_as_one_process_does(case):
    settings, frame = SETTINGS[case]
    together = rows_of(frame, settings).prepare_alone()
    sites = {name: rows_of(part, settings) for name, part in parts_of(frame).items()}
    preparation = agree_over(sites, settings)
    assert preparation.terms == together.features
    for rows in sites.values():
        for client, split in ((c, s) for c in rows.federation.ids for s in ("train", "test")):
            here, there = rows.prepare(preparation).client(client)[split], together.client(client)[split]
            torch.testing.assert_close(here.x, there.x, rtol=0, atol=1e-6)
            torch.testing.assert_close(here.y, there.y, rtol=0, atol=1e-6)


def test_filled_and_standardised_columns_are_those_of_scikit_learn():
    frame = with_gaps(make_table())
    settings = PreparationSettings(missing="fill")
    rows = rows_of(frame, settings, test_fraction=0.25)
    train = frame.iloc[np.sort(rows.federation.train.x[:, 0].numpy())]
    names = ["age", "year", "tiny", "same", "code"]
    imputer = SimpleImputer().fit(train[names])
    scaler = StandardScaler().fit(imputer.transform(train[names]))
    expected = scaler.transform(imputer.transform(frame[names]))
    preparation = agree_over({"all": rows}, settings)
    found = preparation.apply(frame)
    at = [preparation.terms.index(name) for name in names]
    np.testing.assert_allclose(found[:, at], np.where(scaler.var_ > 1e-20, expected, 0), rtol=0, atol=1e-9)


def test_text_becomes_indicators_of_its_levels_with_mean_0_and_deviation_1():
    frame = with_gaps(make_table())
    rows = rows_of(frame, PreparationSettings(missing="fill"), test_fraction=0)
    prepared = rows.prepare_alone()
    assert {"ward = b", "ward = missing", "ward = only-east"} <= {*prepared.features}
    named = frame.ward.fillna("missing")
    for level in ("b", "missing", "only-east"):
        column = prepared.train.x[:, prepared.features.index(f"ward = {level}")].double()
        expected = torch.tensor((named == level).to_numpy(dtype=float))[rows.federation.train.x[:, 0]]
        torch.testing.assert_close(column, (expected - expected.mean()) / expected.std(correction=0), rtol=0, atol=1e-6)


def test_a_constant_column_becomes_0_however_it_rounds():
    preparation = agree_over({"a": rows_of(make_table(), PreparationSettings())}, PreparationSettings())
    (same,) = [column for column in preparation.columns if column.name == "same"]
    assert same.scale == (0.0,) and same.mean == pytest.approx((0.1,))
    assert not preparation.apply(make_table())[:, preparation.terms.index("same")].any()


def test_means_survive_numbers_that_are_large_for_their_spread():
    """Sums of squares of 1e9 + {0, 1, 2} have no digits left for the spread."""
    frame = make_table().assign(age=1e9 + np.arange(120) % 3)
    sites = {name: rows_of(part, PreparationSettings(), test_fraction=0) for name, part in parts_of(frame).items()}
    (age,) = [column for column in agree_over(sites, PreparationSettings()).columns if column.name == "age"]
    assert age.mean[0] - 1e9 == pytest.approx(1.0, abs=1e-6) and age.scale[0] == pytest.approx(np.sqrt(2 / 3), rel=1e-6)


def test_missing_values_and_dropped_rows_are_counted_over_all_sites():
    frame = with_gaps(make_table())
    filled = {name: rows_of(part, PreparationSettings(missing="fill")) for name, part in parts_of(frame).items()}
    counts = {column.name: column.missing for column in agree_over(filled, PreparationSettings(missing="fill")).columns}
    assert counts["age"] == frame.age.isna().sum() and counts["ward"] == frame.ward.isna().sum() and not counts["year"]
    settings, frame = SETTINGS["drop"]
    dropped = agree_over({name: rows_of(part, settings) for name, part in parts_of(frame).items()}, settings)
    assert dropped.dropped == frame.isna().any(axis=1).sum() > 0


def test_rows_to_predict_are_prepared_like_those_of_the_fit():
    settings, frame = SETTINGS["fill"]
    federation = rows_of(frame, settings, test_fraction=0).prepare_alone()
    kind = SampleKind.from_json(SampleKind.of(federation).to_json())
    order = rows_of(frame, settings, test_fraction=0).federation.train.x[:, 0].numpy()
    shuffled = frame[frame.columns[::-1]].iloc[order]
    torch.testing.assert_close(kind.batch(shuffled), federation.train.x)
    new = shuffled[:1].assign(ward="never seen")
    assert kind.batch(new).isfinite().all()


@pytest.mark.parametrize(
    ("change", "settings", "message"),
    [
        ({"age": None}, {"missing": "fill"}, "'age' has no value in any row.*drop"),
        ({"y": "text"}, {"standardise_target": True}, "target that is a number"),
        ({}, {"levels": {"ward": ("a", "b")}}, "'ward' has level 'only-east'.*add"),
        ({"age": np.where(np.arange(120) == 3, np.inf, 1.0)}, {}, "'age' has values up to inf"),
        ({"ward": None}, {}, r"'ward' \(120\) have missing values.*missing = 'drop' or 'fill'"),
        ({}, {"text": ("wards",)}, "names column 'wards', which is no feature"),
    ],
)
def test_what_cannot_be_prepared_is_refused_by_name(change, settings, message):
    settings, frame = PreparationSettings(**settings), make_table().assign(**change)
    with pytest.raises(DataError, match=message):
        rows_of(frame, settings).prepare_alone()


def test_a_column_of_names_is_refused_unless_its_levels_are_named():
    frame = make_table(rows=300).assign(ward=[f"name {i}" for i in range(300)])
    with pytest.raises(DataError, match="'ward' has .* levels, such as 'name .*drop"):
        rows_of(frame, PreparationSettings()).prepare_alone()
    named = PreparationSettings(levels={"ward": ("name 1", "other")})
    assert "ward = other" in rows_of(frame, named).prepare_alone().features


def test_text_at_one_site_and_numbers_at_another_is_refused_by_name():
    settings = PreparationSettings()
    north = rows_of(make_table(), settings)
    south = rows_of(make_table().assign(code=lambda frame: "c" + frame.code.astype(str)), settings)
    with pytest.raises(DataError, match="'code' has text at site 'south' and numbers at site 'north'.*under text"):
        agree_over({"north": north, "south": south}, settings)


def test_a_preparation_that_was_changed_on_the_way_is_refused():
    settings, frame = SETTINGS["fill"]
    said = agree_over({"a": rows_of(frame, settings)}, settings).to_json()
    assert Preparation.from_json(said).to_json() == said
    for damage in ({"columns": []}, {"rows": "many"}, {"target": [0.0, 0.0]},
                   {"columns": [{**said["columns"][0], "mean": [float("nan")]}]},
                   {"columns": [{**said["columns"][0], "scale": []}]}):  # fmt: skip
        with pytest.raises(DataError, match="preparation"):
            Preparation.from_json({**said, **damage})


def test_an_experiment_in_one_process_prepares_its_table(tmp_path):
    with_gaps(make_table()).to_csv(tmp_path / "table.csv", index=False)
    asked = {
        "name": "prepared", "rounds": 1, "model": {"name": "linear"}, "algorithm": {"name": "fedavg", "lr": 0.1},
        "data": {"name": "csv", "file": "table.csv", "client": "client", "target": "y"},
        "preparation": {"missing": "fill"},
    }  # fmt: skip
    federation = read_data(Experiment.model_validate(asked), tmp_path)
    assert federation.preparation is not None and federation.features == federation.preparation.terms
    torch.testing.assert_close(federation.train.x[:, 0].mean(), torch.tensor(0.0), rtol=0, atol=1e-6)
    with pytest.raises(SettingError, match="for tables"):
        read_data(Experiment.model_validate({**asked, "data": {"name": "digits"}}), tmp_path)
