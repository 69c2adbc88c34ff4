"""Sums of several tables prepare their rows as one table with all rows does."""

import numpy as np
import pytest
import torch
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from kit.files import make_table, with_gaps
from kit.refusals import DataError, assert_refused
from ppfl.data.column_sums import agree
from ppfl.data.preparation import Preparation
from ppfl.data.preparation_settings import PreparationSettings
from ppfl.data.sample_spec import SampleSpec
from ppfl.data.table_rows import TableRows

FILL = PreparationSettings(missing="fill", text=("code",))
SETTINGS = {
    "complete": (PreparationSettings(text=("code",)), make_table()),
    "fill": (FILL, with_gaps(make_table())),
    "drop": (PreparationSettings(missing="drop"), with_gaps(make_table()).assign(age=1.5)),
    "levels": (PreparationSettings(levels={"ward": ("b", "a", "other")}), make_table()),
    "plain": (PreparationSettings(standardise=False, standardise_target=True), make_table()),
}


def rows_of(frame, settings, test_fraction=0.25):
    return TableRows.of(frame, "client", "y", settings, test_fraction=test_fraction)


def sites_of(frame, settings, test_fraction=0.25):
    """One table per site, read as a file of its own would be."""
    parts = {name: part.reset_index(drop=True).infer_objects() for name, part in frame.groupby(frame.client.str[:4])}
    return {name: rows_of(part, settings, test_fraction) for name, part in parts.items()}


def agree_over(sites, settings):
    def ask(plan, center):
        found = [rows.sums(plan, center) for rows in sites.values()]
        assert {name: len(part) for name, part in found[0].items()} == plan.sizes(second=center is not None)
        return {name: sum(one[name] for one in found) for name in found[0]}

    return agree({name: rows.describe() for name, rows in sites.items()}, settings, ask)


@pytest.mark.parametrize("case", SETTINGS)
def test_three_sites_prepare_every_row_as_one_process_does(case):
    settings, frame = SETTINGS[case]
    together, sites = rows_of(frame, settings).prepare_alone(), sites_of(frame, settings)
    preparation = agree_over(sites, settings)
    assert preparation.terms == together.features
    for prepared in (rows.prepare(preparation) for rows in sites.values()):
        expected = together.select(prepared.ids)
        for here, there in ((prepared.train, expected.train), (prepared.test, expected.test)):
            torch.testing.assert_close((here.x, here.y), (there.x, there.y), rtol=0, atol=1e-6)
    missing = {column.name: column.missing for column in preparation.columns}
    assert preparation.dropped == (frame.isna().any(axis=1).sum() if case == "drop" else 0)
    assert case != "fill" or missing["age"] == frame.age.isna().sum() > missing["year"] == 0


def test_filled_and_standardised_columns_are_those_of_scikit_learn():
    settings, frame = PreparationSettings(missing="fill"), with_gaps(make_table())
    rows = rows_of(frame, settings)
    train = frame.iloc[np.sort(rows.federation.train.x[:, 0].numpy())]
    names = ["age", "year", "tiny", "same", "code"]
    scaler = make_pipeline(SimpleImputer(), StandardScaler()).fit(train[names])
    expected = np.where(scaler[-1].var_ > 1e-20, scaler.transform(frame[names]), 0)
    preparation = agree_over({"all": rows}, settings)
    found = preparation.apply(frame)[:, [preparation.terms.index(name) for name in names]]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)


def test_text_becomes_indicators_of_its_levels_with_mean_0_and_deviation_1():
    frame = with_gaps(make_table())
    rows = rows_of(frame, PreparationSettings(missing="fill"), test_fraction=0)
    prepared, named = rows.prepare_alone(), frame.ward.fillna("missing")
    for level in ("b", "missing", "only-east"):
        column = prepared.train.x[:, prepared.features.index(f"ward = {level}")].double()
        expected = torch.tensor((named == level).to_numpy(dtype=float))[rows.federation.train.x[:, 0]]
        torch.testing.assert_close(column, (expected - expected.mean()) / expected.std(correction=0), rtol=0, atol=1e-6)


def test_means_survive_numbers_that_are_large_for_their_spread():
    """Sums of squares of 1e9 + {0, 1, 2} have no digits left for the spread."""
    sites = sites_of(make_table().assign(age=1e9 + np.arange(120) % 3), PreparationSettings(), test_fraction=0)
    (age,) = [column for column in agree_over(sites, PreparationSettings()).columns if column.name == "age"]
    assert age.mean[0] - 1e9 == pytest.approx(1.0, abs=1e-6) and age.scale[0] == pytest.approx(np.sqrt(2 / 3), rel=1e-6)


def test_rows_to_predict_are_prepared_like_those_of_the_fit():
    rows = rows_of(with_gaps(make_table()), FILL, test_fraction=0)
    federation = rows.prepare_alone()
    spec = SampleSpec.model_validate(SampleSpec.of(federation).model_dump(mode="json"))
    shuffled = with_gaps(make_table()).iloc[rows.federation.train.x[:, 0].numpy(), ::-1]
    torch.testing.assert_close(spec.batch(shuffled), federation.train.x)
    assert spec.batch(shuffled[:1].assign(ward="never seen")).isfinite().all()


def test_what_cannot_be_prepared_sites_that_disagree_and_changed_preparations_are_refused():
    for change, settings, *words in (
        ({"age": None}, {"missing": "fill"}, "'age' has no value in any row"),
        ({}, {"levels": {"ward": ("a", "b")}}, "'ward' has level 'only-east'"),
        ({"age": np.where(np.arange(240) == 3, np.inf, 1.0)}, {}, "'age' has values up to inf"),
        ({"ward": None}, {}, "'ward' (240) have missing values", "missing = 'drop' or 'fill'"),
        ({}, {"text": ("wards",)}, "names column 'wards'"),
        ({"ward": [f"name {i}" for i in range(240)]}, {}, "'ward' has 240 levels", "drop"),
    ):
        frame, settings = make_table(rows=240).assign(**change), PreparationSettings(**settings)
        assert_refused(lambda: rows_of(frame, settings, test_fraction=0).prepare_alone(), DataError, *words)
    text, plain = make_table().assign(code=lambda frame: "c" + frame.code.astype(str)), PreparationSettings()
    sites = {"north": rows_of(make_table(), plain), "south": rows_of(text, plain)}
    assert_refused(lambda: agree_over(sites, plain), DataError, "'code' has text at site 'south'", "site 'north'")
    said = agree_over({"a": rows_of(with_gaps(make_table()), FILL)}, FILL).to_json()
    assert Preparation.from_json(said).to_json() == said
    for damage in ({"rows": "many"}, {"columns": [{**said["columns"][0], "mean": [float("nan")]}]}):
        assert_refused(lambda: Preparation.from_json({**said, **damage}), DataError, "preparation")
