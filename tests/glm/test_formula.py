"""Formulas: designs equal those made by hand, fits equal fits to arrays, and errors name the part that is wrong."""

from dataclasses import replace
from functools import cache
from io import BytesIO

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from kit.files import dump, load
from kit.refusals import DataError, PPFLError, SettingError, assert_refused
from kit.tables import SMALL
from ppfl.glm import PopulationClassifier, PopulationRegressor
from ppfl.glm.formula import FormulaDesign

QUICK = {**SMALL, "tol": 1e-4}
SITES = {"site[T.north]", "site[T.west]"}
RANDOM = np.random.default_rng(0)
SLOPE = np.where(np.arange(96) % 16 < 8, 2.0, -2.0)
NIGHTS = pd.DataFrame({"subject": np.repeat([f"s{i}" for i in range(12)], 8), "days": RANDOM.normal(size=96)})
NIGHTS["hours"] = RANDOM.gamma(3, size=96)
NIGHTS["site"] = RANDOM.choice(["east", "north", "west"], 96)
NIGHTS["body | weight"] = RANDOM.normal(70, 9, size=96)
NIGHTS["reaction"] = SLOPE * NIGHTS["days"] + (NIGHTS["site"] == "west") + 0.3 * RANDOM.normal(size=96)
NIGHTS["wakes"] = RANDOM.poisson(NIGHTS["hours"] * np.exp(0.3 * SLOPE * NIGHTS["days"]))
NIGHTS["rested"] = np.where(NIGHTS["reaction"] + RANDOM.logistic(size=96) > 0, "yes", "no")


def design(formula, data=NIGHTS):
    return FormulaDesign.fit(f"reaction ~ {formula}", data)[0]


def fit(formula, data=NIGHTS, estimator=PopulationRegressor, **settings):
    return estimator.from_formula(formula, data, **{**QUICK, **settings})


def test_the_design_equals_one_made_by_hand():
    west, north = (NIGHTS["site"] == "west").astype(float), (NIGHTS["site"] == "north").astype(float)
    by_hand = {
        "days": NIGHTS["days"],
        "log(hours)": np.log(NIGHTS["hours"]),
        "body | weight": NIGHTS["body | weight"],
        "I(days ** 2)": NIGHTS["days"] ** 2,
        "site[T.north]": north,
        "site[T.west]": west,
        "days:site[T.north]": NIGHTS["days"] * north,
        "days:site[T.west]": NIGHTS["days"] * west,
    }
    found = design("days * site + log(hours) + `body | weight` + I(days ** 2) + (1 | subject)").read(NIGHTS).x
    assert set(found.columns) == set(by_hand)
    for name, values in by_hand.items():
        assert_allclose(found[name], values)
    few = design(". + (1 | subject)", NIGHTS[["reaction", "days", "hours", "subject"]])
    assert few.names == ("days", "hours")


@pytest.mark.parametrize(
    ("formula", "shared"),
    [
        ("days + site + (1 + `days` | `subject`)", SITES),
        ("days + site + (1 | subject)", {"days", *SITES}),
        ("days + site + (0 + days | subject)", {"intercept", *SITES}),
        ("days + site + (0 + site | subject)", {"days"}),  # all three levels vary, so the intercept does
        ("site + (days | subject)", SITES),  # a term of the bar part alone is added
    ],
)
def test_the_bar_part_says_what_varies(formula, shared):
    spec = design(formula)
    assert {each if isinstance(each, str) else spec.names[each] for each in spec.shared} == shared


def test_columns_of_any_type_are_read():
    other = NIGHTS.astype({"subject": "category", "days": "Float64", "site": "string", "reaction": object})
    found = design("days + site + (days | subject)", other)
    assert_allclose(found.read(other).x, design("days + site + (days | subject)").read(NIGHTS).x)
    assert_allclose(found.target(other, classes=False), NIGHTS["reaction"])


def test_a_formula_fits_what_arrays_fit():
    old, new = NIGHTS[NIGHTS["subject"] != "s3"], NIGHTS[NIGHTS["subject"] == "s3"]
    model = fit("reaction ~ days + log(hours) + (days | subject)", old)
    x, x_new = (np.stack([part["days"], np.log(part["hours"])], 1) for part in (old, new))
    same = PopulationRegressor(shared=[1], **QUICK).fit(x, old["reaction"], clients=old["subject"])
    assert_allclose(model.canonical_coef_, same.canonical_coef_)
    assert_allclose(model.predict(old), same.predict(x, old["subject"]))
    assert model.score(old) == pytest.approx(same.score(x, old["reaction"], old["subject"]))
    assert_allclose(model.onboard(new), same.onboard(x_new, new["reaction"], new["subject"]))
    arrays = NIGHTS[["hours", "days"]]
    model.fit(arrays, NIGHTS["reaction"], clients=NIGHTS["subject"])  # forgets the formula
    assert len(model.predict(arrays, NIGHTS["subject"])) == 96
    model = fit("rested ~ days + (days | subject)", estimator=PopulationClassifier)
    same = PopulationClassifier(**QUICK).fit(NIGHTS[["days"]], NIGHTS["rested"], clients=NIGHTS["subject"])
    assert_allclose(model.predict_proba(NIGHTS), same.predict_proba(NIGHTS[["days"]], NIGHTS["subject"]))
    assert model.score(NIGHTS) == same.score(NIGHTS[["days"]], NIGHTS["rested"], NIGHTS["subject"])


@pytest.mark.parametrize(("part", "columns"), [("offset(log(hours)) + ", {}), ("", {"exposure": "hours"})])
def test_offsets_and_weights_come_from_the_table(part, columns):
    data = NIGHTS.assign(times=np.arange(96) % 3 + 1.0)
    model = fit(f"wakes ~ days + {part}(days | subject)", data, weights="times", family="poisson", **columns)
    x, offset = data[["days"]], np.log(data["hours"])
    same = PopulationRegressor(family="poisson", **QUICK)
    same.fit(x, data["wakes"], clients=data["subject"], sample_weight=data["times"], offset=offset)
    assert_allclose(model.canonical_coef_, same.canonical_coef_)
    assert_allclose(model.predict(data[::-1]), same.predict(x, data["subject"], offset)[::-1])
    wanted = same.deviance(x, data["wakes"], data["subject"], data["times"], offset)
    assert model.deviance(data) == pytest.approx(wanted)


def test_intercepts_may_vary_alone_be_absent_or_shared():
    data = NIGHTS.assign(days=lambda t: t["days"] + 2)  # not centred
    data["level"] = np.where(data["subject"] < "s3", 9.0, 1.0) + np.tile([0, 1], 48)
    data["reaction"] = np.where(data["subject"] < "s3", 2.0, -2.0) * data["days"] + 1
    data["reaction"] += np.random.default_rng(1).normal(size=96)
    alone = fit("level ~ 1 + (1 | subject)", data)
    assert alone.canonical_coef_.shape == (2, 0)
    means = data.groupby("subject")["level"].mean()
    assert_allclose(alone.predict(data.drop_duplicates("subject")), means[data["subject"].unique()], rtol=0.1)
    absent = fit("reaction ~ 0 + days + (0 + days | subject)", data)
    assert_array_equal(absent.canonical_intercept_, 0)
    shared = fit("reaction ~ days + (0 + days | subject)", data)
    at_zero = shared.predict(data.assign(days=0.0))  # clients agree where their columns are zero
    assert_allclose(at_zero, at_zero[0])


@cache
def fitted():
    return fit("reaction ~ bs(days, df=4) + C(site, Treatment('west')) + scale(hours) + (1 + scale(hours) | subject)")


@given(st.permutations(range(96)), st.integers(1, 96))
def test_predictions_of_permuted_rows_are_permuted(order, count):
    some = list(order)[:count]
    assert_allclose(fitted().predict(NIGHTS.iloc[some]), fitted().predict(NIGHTS)[some], rtol=1e-12)


def test_a_formula_survives_a_file_and_an_expression_of_a_file_is_checked():
    file, found = BytesIO(), fitted().formula_
    dump(found, file, "formula")
    again = load(file.getvalue(), "formula")
    assert again == found
    assert_allclose(again.read(NIGHTS).x, found.read(NIGHTS).x)


def test_incomplete_rows_are_counted_by_client():
    data = NIGHTS.copy()
    data.loc[[0, 1], "days"] = np.nan
    data.loc[8:15, "site"] = None
    data.loc[95, "subject"] = None
    data.loc[50, "hours"] = np.nan  # not used
    formula = "reaction ~ days + site + (1 | subject)"
    model, same = fit(formula, data), fit(formula, data.dropna(subset=["days", "site", "subject"]))
    assert model.dropped_.to_dict() == {"s0": 2, "s1": 8, None: 1}
    assert same.dropped_.empty
    assert_allclose(model.canonical_coef_, same.canonical_coef_)
    assert_refused(lambda: model.predict(data.dropna(subset=["subject"])), DataError, "'days'", "'site'", "row 0")


BAD_FORMULAS = {
    "reaction ~ days": ("(1 | subject)",),
    "reaction ~ days | subject": ("(days | subject)",),
    "reaction ~ days + (1 | site/subject)": ("site + (1 | subject)",),
    "reaction ~ days + (1 | site) + (1 | subject)": ("2 bar parts", "finest"),
    "reaction ~ 0 + days + (days | subject)": ("(0 + days | subject)",),
    "reaction ~ dys + (1 | subject)": ("'dys'", "'days'"),
    "reaction ~ days + (1 | who)": ("'who'", "'subject'"),
    "site ~ days + (1 | subject)": ("'site'", "PopulationClassifier"),
    "reaction ~ log(days) + (1 | subject)": ("log(days)", "nan in row"),
    "reaction ~ log(days * 0) + (1 | subject)": ("-inf in row",),
    "reaction ~ sinus(days) + (1 | subject)": ("'sinus'", "sin, "),
    "reaction ~ bs(site, df=4) + (1 | subject)": ("cannot be computed",),
}


@pytest.mark.parametrize("formula", BAD_FORMULAS)
def test_bad_formulas_name_the_part(formula):
    assert_refused(lambda: fit(formula), PPFLError, *BAD_FORMULAS[formula])


def test_settings_and_tables_that_do_not_suit_the_formula_are_refused():
    formula, data = "reaction ~ days + site + (1 | subject)", NIGHTS
    model = fit(formula)
    assert_refused(lambda: fit(formula, offset=[1.0]), SettingError, "offset", "name a column")
    assert_refused(lambda: model.predict(data.assign(site="south")), DataError, "'site'", "'south'", "'west'")
    assert_refused(lambda: model.predict(data.assign(days=np.inf)), DataError, "'days'", "inf in row")
    assert_refused(lambda: model.predict(data.drop(columns="subject")), DataError, "'subject'")
    assert_refused(lambda: fitted().predict(data.assign(site="south")), DataError, "south")  # levels in C() too


def test_no_formula_runs_code():
    found = design("days + (1 | subject)")
    for expression in (
        "__import__('os').system('true')", "open('x')", "days.to_csv('x')", "np.load('x')", "(lambda: 1)()", "days[0]",
        "[x for x in days]", "9 ** 9 ** 9", "'a' * 1000000000", "scale(days, _state=days)", "C(days, **hours)",
    ):  # fmt: skip
        assert_refused(lambda: design(f"I({expression}) + (1 | subject)"), PPFLError)
        for change in ({"terms": ("1", f"{{{expression}}}")}, {"offsets": (expression,)}, {"response": expression}):
            changed = replace(found, **change)
            assert_refused(changed.checked, PPFLError)
            if "response" not in change:
                assert_refused(lambda: changed.read(NIGHTS), PPFLError)
