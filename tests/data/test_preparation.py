"""Sums of several tables prepare their rows as one table with all rows does."""

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.impute import SimpleImputer
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from kit.files import make_table, with_gaps
from kit.refusals import DataError, assert_refused
from ppfl.data import DataTable
from ppfl.data.column_sums import agree
from ppfl.data.ids import Holdout
from ppfl.data.preparation import Preparation, PreparationSettings
from ppfl.data.sample_spec import SampleSpec
from ppfl.data.table_sums import describe_columns, sum_rows

HOLDOUT, NOTHING = Holdout(test_fraction=0.25), Holdout(test_fraction=0)
FILL = PreparationSettings(missing="fill", text=("code",))
COLUMNS = ("age", "year", "tiny", "same", "ward", "code")
SETTINGS = {
    "complete": (PreparationSettings(text=("code",)), make_table(), COLUMNS),
    "fill": (FILL, with_gaps(make_table()), COLUMNS),
    "drop": (PreparationSettings(missing="drop"), with_gaps(make_table()).assign(age=1.5), COLUMNS),
    "levels": (PreparationSettings(levels={"ward": ("b", "a", "other")}), make_table(), COLUMNS),
    "plain": (PreparationSettings(standardise=False, standardise_target=True), make_table(), COLUMNS),
    "chosen": (FILL, with_gaps(make_table()).assign(note=[f"note {at}" for at in range(120)], empty=None), None),
}


def table_of(frame, settings, columns=None, choose=True):
    return DataTable.of(frame, "client", "y", columns=columns, text=settings.names, choose=choose)


def training_rows(table, settings, holdout=HOLDOUT):
    return table.rows(holdout, settings.missing)["train"].order.numpy()


def sites_of(frame, settings, columns=None):
    """One table per site, read as a file of its own would be."""
    parts = {name: part.reset_index(drop=True).infer_objects() for name, part in frame.groupby(frame.client.str[:4])}
    return {name: table_of(part, settings, columns, choose=False) for name, part in parts.items()}


def agree_over(sites, settings, holdout=HOLDOUT):
    train = {name: training_rows(table, settings, holdout) for name, table in sites.items()}

    def ask(plan, center):
        found = [sum_rows(table, plan, train[name], center) for name, table in sites.items()]
        assert {name: len(part) for name, part in found[0].items()} == plan.sizes(second=center is not None)
        return {name: sum(one[name] for one in found) for name in found[0]}

    return agree({name: describe_columns(table, settings, train[name]) for name, table in sites.items()}, settings, ask)


@pytest.mark.parametrize("case", SETTINGS)
def test_three_sites_prepare_every_row_as_one_process_does(case):
    settings, frame, columns = SETTINGS[case]
    whole, sites = table_of(frame, settings, columns), sites_of(frame, settings, columns)
    together, preparation = whole.federation(HOLDOUT, settings), agree_over(sites, settings)
    assert preparation.terms == together.features
    for prepared in (table.federation(HOLDOUT, preparation) for table in sites.values()):
        expected = together.select(prepared.ids)
        for here, there in ((prepared.train, expected.train), (prepared.test, expected.test)):
            torch.testing.assert_close((here.x, here.y), (there.x, there.y), rtol=0, atol=1e-6)
    missing = {column.name: column.missing for column in preparation.columns}
    assert preparation.dropped == (frame.isna().any(axis=1).sum() if case == "drop" else 0)
    assert case != "fill" or missing["age"] == frame.age.isna().sum() > missing["year"] == 0
    left_out = {"same": "one value", "note": "120 levels", "empty": "no value"}
    assert case != "chosen" or {*whole.left_out} == {*preparation.left_out} == {*left_out}
    assert case != "chosen" or whole.left_out == left_out


def test_filled_and_standardised_columns_are_those_of_scikit_learn():
    settings, frame = PreparationSettings(missing="fill"), with_gaps(make_table())
    table = table_of(frame, settings, COLUMNS)
    train = frame.iloc[np.sort(training_rows(table, settings))]
    names = ["age", "year", "tiny", "same", "code"]
    scaler = make_pipeline(SimpleImputer(), StandardScaler()).fit(train[names])
    expected = np.where(scaler[-1].var_ > 1e-20, scaler.transform(frame[names]), 0)
    preparation = agree_over({"all": table}, settings)
    found = preparation.apply(frame)[:, [preparation.terms.index(name) for name in names]]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-9)
    encoded = preparation.encode(frame)
    np.testing.assert_allclose(preparation.scale(encoded), preparation.apply(frame), rtol=0, atol=0)
    np.testing.assert_allclose(encoded[:, 0], frame.age.fillna(train.age.mean()), rtol=1e-12)


def test_text_becomes_indicators_of_its_levels_with_mean_0_and_deviation_1():
    frame, settings = with_gaps(make_table()), PreparationSettings(missing="fill")
    table = table_of(frame, settings)
    prepared, at = table.federation(NOTHING, settings), training_rows(table, settings, NOTHING)
    ward = frame.ward.fillna("a gap")
    for term, level in (("ward = b", "b"), ("ward = only-east", "only-east"), ("ward is missing", "a gap")):
        rows = ward == level
        column, expected = prepared.train.x[:, prepared.features.index(term)].double(), torch.tensor(rows.to_numpy())
        expected = expected.double()[at]
        torch.testing.assert_close(column, (expected - expected.mean()) / expected.std(correction=0), rtol=0, atol=1e-6)


@pytest.mark.parametrize("rows", [3, 20])
@pytest.mark.parametrize("named", [False, True])
def test_a_gap_is_no_cell_that_reads_missing(rows, named):
    """Few gaps are rare and become other, as few cells of any other level do."""
    ward = ["missing"] * 40 + ["a"] * 40 + [None] * rows
    frame = pd.DataFrame({"client": ["p", "q"] * ((80 + rows) // 2) + ["p"] * (rows % 2), "ward": ward})
    frame["y"] = np.arange(len(frame)) / 7
    settings = PreparationSettings(missing="fill", standardise=False,
                                   levels={"ward": ("a", "missing", "other")} if named else {})  # fmt: skip
    prepared = table_of(frame, settings).federation(NOTHING, settings).preparation
    one_of_each = pd.DataFrame({"ward": ["a", "missing", None]})
    found = pd.DataFrame(prepared.apply(one_of_each), columns=prepared.terms)
    assert found["ward = missing"].tolist() == [0, 1, 0]
    assert found["ward is missing" if named or rows == 20 else "ward = other"].tolist() == [0, 0, 1]


def test_means_survive_numbers_that_are_large_for_their_spread():
    """Sums of squares of 1e9 + {0, 1, 2} have no digits left for the spread."""
    settings = PreparationSettings()
    sites = sites_of(make_table().assign(age=1e9 + np.arange(120) % 3), settings)
    (age,) = [column for column in agree_over(sites, settings, NOTHING).columns if column.name == "age"]
    assert age.mean[0] - 1e9 == pytest.approx(1.0, abs=1e-6) and age.scale[0] == pytest.approx(np.sqrt(2 / 3), rel=1e-6)


def test_rows_to_predict_are_prepared_like_those_of_the_fit():
    table = table_of(with_gaps(make_table()), FILL)
    federation = table.federation(NOTHING, FILL)
    spec = SampleSpec.model_validate(SampleSpec.of(federation).model_dump(mode="json"))
    shuffled = with_gaps(make_table()).iloc[training_rows(table, FILL, NOTHING), ::-1]
    torch.testing.assert_close(spec.batch(shuffled), federation.train.x)
    assert spec.batch(shuffled[:1].assign(ward="never seen")).isfinite().all()


def test_what_cannot_be_prepared_sites_that_disagree_and_changed_preparations_are_refused():
    for change, settings, *words in (
        ({"age": None}, {"missing": "fill"}, "'age' has no value in any row"),
        ({}, {"levels": {"ward": ("a", "b")}}, "'ward' has level 'only-east'"),
        ({"age": np.where(np.arange(240) == 3, np.inf, 1.0)}, {}, "'age' has infinite values"),
        ({"age": 1e80}, {}, "'age' has values up to 1e+80"),
        ({"ward": None}, {}, "'ward' (240) have missing values", "missing = 'drop' or 'fill'"),
        ({"y": ["no", "yes"] * 120}, {"standardise_target": True}, "a target that is a number"),
        ({}, {"text": ("wards",)}, "names column 'wards'"),
    ):
        frame, settings = make_table(rows=240).assign(**change), PreparationSettings(**settings)
        assert_refused(lambda: table_of(frame, settings, COLUMNS).federation(NOTHING, settings), DataError, *words)
    text, plain = make_table().assign(code=lambda frame: "c" + frame.code.astype(str)), PreparationSettings()
    sites = {"north": table_of(make_table(), plain), "south": table_of(text, plain)}
    assert_refused(lambda: agree_over(sites, plain), DataError, "'code' has text at site 'south'", "site 'north'")
    said = agree_over({"a": table_of(with_gaps(make_table()), FILL)}, FILL).model_dump(mode="json")
    assert Preparation.read(said).model_dump(mode="json") == said
    plain = table_of(make_table(), PreparationSettings()).federation(NOTHING, PreparationSettings()).preparation
    assert_refused(lambda: plain.encode(with_gaps(make_table())), DataError, "missing values", "fills none")
    assert_refused(lambda: plain.encode(make_table().drop(columns="age")), DataError, "no column 'age'")
    for damage in ({"rows": "many"}, {"columns": [{**said["columns"][0], "mean": [float("nan")]}]}, {"target": [0, 0]}):
        assert_refused(lambda: Preparation.read({**said, **damage}), DataError, "preparation")
