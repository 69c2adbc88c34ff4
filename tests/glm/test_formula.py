"""Formulas: designs equal those made by hand, fits equal fits to arrays, and errors name the part that is wrong."""

import json
from functools import cache

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from kit.refusals import DataError, PPFLError, SettingError, assert_refused
from kit.tables import SMALL
from ppfl.glm import PopulationClassifier, PopulationRegressor
from ppfl.glm.formula import FormulaSpec, prepare_formula
from ppfl.glm.formula.expressions import used_columns
from ppfl.glm.formula.parts import split_formula

QUICK = {**SMALL, "tol": 1e-4}
SITES = {"site[T.north]", "site[T.west]"}


@cache
def make_nights() -> pd.DataFrame:
    random = np.random.default_rng(0)
    table = pd.DataFrame({"subject": np.repeat([f"s{i}" for i in range(12)], 8), "days": random.normal(size=96)})
    table["hours"] = random.gamma(3, size=96)
    table["site"] = random.choice(["east", "north", "west"], 96)
    table["body weight"] = random.normal(70, 9, size=96)
    slope = np.where(np.arange(96) % 16 < 8, 2.0, -2.0)
    table["reaction"] = slope * table["days"] + (table["site"] == "west") + 0.3 * random.normal(size=96)
    table["wakes"] = random.poisson(table["hours"] * np.exp(0.3 * slope * table["days"]))
    table["rested"] = np.where(table["reaction"] + random.logistic(size=96) > 0, "yes", "no")
    return table


def design(formula: str, data: pd.DataFrame | None = None) -> pd.DataFrame:
    return prepare_formula(formula, make_nights() if data is None else data).x


def fit(formula: str, data: pd.DataFrame | None = None, estimator=PopulationRegressor, **settings):
    return estimator.from_formula(formula, make_nights() if data is None else data, **{**QUICK, **settings})


# ---------------------------------------------------------------------- the design


def test_the_design_equals_one_made_by_hand():
    data = make_nights()
    west, north = (data["site"] == "west").astype(float), (data["site"] == "north").astype(float)
    by_hand = {
        "days": data["days"],
        "log(hours)": np.log(data["hours"]),
        "body weight": data["body weight"],
        "I(days ** 2)": data["days"] ** 2,
        "site[T.north]": north,
        "site[T.west]": west,
        "days:site[T.north]": data["days"] * north,
        "days:site[T.west]": data["days"] * west,
    }
    found = design("reaction ~ days * site + log(hours) + `body weight` + I(days ** 2) + (1 | subject)")
    assert set(found.columns) == set(by_hand)
    for name, values in by_hand.items():
        assert_allclose(found[name], values)
    few = data[["reaction", "days", "hours", "subject"]]
    assert list(design("reaction ~ . + (1 | subject)", few).columns) == ["days", "hours"]


def test_splines_add_up_to_one_and_use_the_knots_of_the_fit():
    found = prepare_formula("reaction ~ 0 + cr(days, df=5) + (0 + cr(days, df=5) | subject)", make_nights())
    assert_allclose(found.x.sum(axis=1), 1)
    assert_allclose(found.spec.read(make_nights().iloc[[40, 3]]).x, found.x.iloc[[40, 3]])


@pytest.mark.parametrize(
    ("formula", "shared"),
    [
        ("days + site + (days | subject)", SITES),
        ("days + site + (1 | subject)", {"days", *SITES}),
        ("days + site + (0 + days | subject)", {"intercept", *SITES}),
        ("days + site + (days - 1 | subject)", {"intercept", *SITES}),
        ("days + site + (days + site | subject)", set()),
        ("days + site + (0 + site | subject)", {"days"}),  # all three levels vary, so the intercept does
        ("days + site + (1 + `days` | `subject`)", SITES),
        ("days*hours + (0 + hours:days | subject)", {"intercept", "days", "hours"}),  # in any order
        ("site + (days | subject)", SITES),  # a term of the bar part alone is added
    ],
)
def test_the_bar_part_says_what_varies(formula, shared):
    spec = prepare_formula(f"reaction ~ {formula}", make_nights()).spec
    assert {each if isinstance(each, str) else spec.names[each] for each in spec.shared} == shared
    assert formula != "site + (days | subject)" or any("days" in note for note in spec.notes)


def test_quotes_and_functions_may_contain_any_sign():
    parts = split_formula("log(`a ~ b`) ~ I(x | z) + C(s, Treatment('+ (|')) - 1 + (0 + x | `the | client`)")
    assert parts.response == "log(`a ~ b`)"
    assert parts.fixed == "I(x | z) + C(s, Treatment('+ (|')) - 1"
    assert (parts.varying, parts.client) == ("0 + x", "the | client")


def test_columns_of_any_type_are_read():
    data = make_nights()
    other = pd.DataFrame({"subject": data["subject"].astype("category"), "days": data["days"].astype("Float64")})
    other["site"] = data["site"].astype("string")
    other["reaction.time"] = data["reaction"].astype(object)
    found = prepare_formula("reaction.time ~ days + site + (days | subject)", other)
    assert_allclose(found.x, design("reaction ~ days + site + (days | subject)"))
    assert_allclose(found.spec.target(found.frame, classes=False), data["reaction"])
    numbers = data.assign(site=data["site"].astype("category").cat.codes.astype("Int8"))
    assert list(design("reaction ~ C(site) + (1 | subject)", numbers).columns) == ["C(site)[T.1]", "C(site)[T.2]"]


# ---------------------------------------------------------------------- fits


def test_a_formula_fits_what_arrays_fit():
    data = make_nights()
    old, new = data[data["subject"] != "s3"], data[data["subject"] == "s3"]
    model = fit("reaction ~ days + log(hours) + (days | subject)", old)
    x, x_new = (np.stack([part["days"], np.log(part["hours"])], 1) for part in (old, new))
    same = PopulationRegressor(shared=[1], **QUICK).fit(x, old["reaction"], clients=old["subject"])
    assert_allclose(model.canonical_coef_, same.canonical_coef_)
    assert_allclose(model.canonical_intercept_, same.canonical_intercept_)
    assert_allclose(model.predict(old), same.predict(x, old["subject"]))
    assert model.score(old) == pytest.approx(same.score(x, old["reaction"], old["subject"]))
    assert model.feature_names_in_.tolist() == ["days", "log(hours)"]
    assert_allclose(model.onboard(new), same.onboard(x_new, new["reaction"], new["subject"]))
    arrays = data[["hours", "days"]]
    model.fit(arrays, data["reaction"], clients=data["subject"])  # forgets the formula
    assert len(model.predict(arrays, data["subject"])) == 96


@pytest.mark.parametrize(
    ("formula", "columns"),
    [
        ("wakes ~ days + offset(log(hours)) + (days | subject)", {}),
        ("wakes ~ days + (days | subject)", {"exposure": "hours"}),
        ("wakes ~ days + (days | subject)", {"offset": "log hours"}),
    ],
)
def test_offsets_and_weights_come_from_the_table(formula, columns):
    data = make_nights().assign(times=np.arange(96) % 3 + 1.0, **{"log hours": np.log(make_nights()["hours"])})
    model = fit(formula, data, weights="times", family="poisson", **columns)
    x, offset = data[["days"]], np.log(data["hours"])
    same = PopulationRegressor(family="poisson", **QUICK)
    same.fit(x, data["wakes"], clients=data["subject"], sample_weight=data["times"], offset=offset)
    assert_allclose(model.canonical_coef_, same.canonical_coef_)
    assert_allclose(model.predict(data[::-1]), same.predict(x, data["subject"], offset)[::-1])
    everything = x, data["wakes"], data["subject"], data["times"], offset
    assert model.deviance(data) == pytest.approx(same.deviance(*everything))


def test_classes_are_predicted_for_tables():
    data = make_nights()
    model = fit("rested ~ days + (days | subject)", estimator=PopulationClassifier)
    same = PopulationClassifier(**QUICK).fit(data[["days"]], data["rested"], clients=data["subject"])
    assert_allclose(model.predict_proba(data), same.predict_proba(data[["days"]], data["subject"]))
    assert model.predict(data).tolist() == same.predict(data[["days"]], data["subject"]).tolist()
    assert model.score(data) == same.score(data[["days"]], data["rested"], data["subject"])


@pytest.mark.parametrize("family", ["gaussian", "poisson"])
def test_intercepts_alone_may_vary(family):
    data = make_nights().assign(level=lambda t: np.where(t["subject"] < "s3", 9.0, 1.0) + np.tile([0, 1], 48))
    model = fit("level ~ 1 + (1 | subject)", data, family=family)
    assert model.canonical_coef_.shape == (2, 0)
    means = data.groupby("subject")["level"].mean()
    assert_allclose(model.predict(data.drop_duplicates("subject")), means[data["subject"].unique()], rtol=0.1)


def test_intercepts_may_be_absent_or_shared():
    data = make_nights().assign(days=lambda t: t["days"] + 2)  # not centred
    data["reaction"] = np.where(data["subject"] < "s3", 2.0, -2.0) * data["days"] + 1
    data["reaction"] += np.random.default_rng(1).normal(size=96)
    absent, shared = (
        fit("reaction ~ 0 + days + (0 + days | subject)", data),
        fit("reaction ~ days + (0 + days | subject)", data),
    )
    same = PopulationRegressor(fit_intercept=False, **QUICK)
    same.fit(data[["days"]], data["reaction"], clients=data["subject"])
    assert_allclose(absent.canonical_coef_, same.canonical_coef_)
    assert_array_equal(absent.canonical_intercept_, 0)
    assert np.ptp(shared.canonical_intercept_) < 1e-9
    at_zero = shared.predict(data.assign(days=0.0))  # clients agree where their columns are zero
    assert_allclose(at_zero, at_zero[0])
    assert_allclose(at_zero, 1.0, atol=0.6)


@cache
def fitted() -> PopulationRegressor:
    return fit("reaction ~ bs(days, df=4) + C(site, Treatment('west')) + scale(hours) + (1 + scale(hours) | subject)")


@given(st.permutations(range(96)), st.integers(1, 96))
def test_predictions_of_permuted_rows_are_permuted(order, count):
    some = list(order)[:count]
    assert_allclose(fitted().predict(make_nights().iloc[some]), fitted().predict(make_nights())[some], rtol=1e-12)


def test_a_formula_survives_json_and_a_damaged_one_is_refused():
    spec = fitted()._formula
    again = FormulaSpec.from_json(json.loads(json.dumps(spec.to_json())))
    assert again == spec
    assert_array_equal(again.read(make_nights()).x, spec.read(make_nights()).x)
    damages = {"terms": 3}, {"names": None}, {"client": None}, {"other": 1}, {"transforms": {"items": [[[1], 2]]}}
    for damage in damages:
        assert_refused(
            lambda damage=damage: FormulaSpec.from_json(spec.to_json() | damage), DataError, "save the model"
        )


def test_incomplete_rows_are_counted_by_client():
    data = make_nights().copy()
    data.loc[[0, 1], "days"] = np.nan
    data.loc[8:15, "site"] = None
    data.loc[95, "subject"] = None
    data.loc[50, "hours"] = np.nan  # not used
    formula = "reaction ~ days + site + (1 | subject)"
    model, same = fit(formula, data), fit(formula, data.dropna(subset=["days", "site", "subject"]))
    assert model.dropped_.to_dict() == {"s0": 2, "s1": 8, None: 1}
    assert model._formula.lost == ("s1",)
    described = "; ".join(model._formula.describe())
    assert all(part in described for part in (formula, "s0: 2, s1: 8, no client: 1", "'s1'"))
    assert same.dropped_.empty
    assert_allclose(model.canonical_coef_, same.canonical_coef_)
    assert_refused(lambda: model.predict(data.dropna(subset=["subject"])), DataError, "'days'", "'site'", "row 0")


# ---------------------------------------------------------------------- refusals


BAD_FORMULAS = {
    "reaction": ("reaction ~ days",),
    "reaction ~ days": ("(1 | subject)",),
    "reaction ~ days | subject": ("(days | subject)",),
    "reaction ~ days + (1 | site/subject)": ("site + (1 | subject)",),
    "reaction ~ days + (1 | site) + (1 | subject)": ("2 bar parts", "finest"),
    "reaction ~ days + (days || subject)": ("(days | subject)",),
    "reaction ~ days + (1 | site:subject)": ("join them into one column",),
    "reaction ~ days + (0 | subject)": ("(1 | subject)",),
    "reaction ~ 0 + days + (days | subject)": ("(0 + days | subject)",),
    "reaction ~ 0 + days + (1 | subject)": ("'0 + days'",),
    "reaction ~ days + + (1 | subject)": ("nothing after",),
    "reaction ~ days hours + (1 | subject)": ("'days hours'",),
    "reaction ~ (days + (1 | subject)": ("without an end",),
    "reaction ~ days + subject + (1 | subject)": ("'subject'", "client column"),
    "reaction ~ days + reaction + (1 | subject)": ("'reaction'", "target"),
    "cbind(a, b) ~ days + (1 | subject)": ("weights",),
    "reaction ~ dys + (1 | subject)": ("'dys'", "'days'"),
    "reaction ~ days + (1 | who)": ("'who'", "'subject'"),
    "reactn ~ days + (1 | subject)": ("'reactn'",),
    "site ~ days + (1 | subject)": ("'site'", "PopulationClassifier"),
    "reaction ~ log(days) + (1 | subject)": ("log(days)", "nan in row"),
    "reaction ~ days + offset(log(days)) + (1 | subject)": ("offset(log(days))", "nan in row"),
    "reaction ~ days + offset(site) + (1 | subject)": ("'site'", "text"),
    "reaction ~ sinus(days) + (1 | subject)": ("'sinus'", "sin, "),
    "reaction ~ factor(site) + (1 | subject)": ("'factor'", "C(x)"),
    "reaction ~ bs(days) + bs(site, df=4) + (1 | subject)": ("cannot be computed",),
    "reaction ~ Intercept + (1 | subject)": ("'Intercept'",),
    "reaction ~ exp(exp) + (1 | subject)": ("rename it",),
}


@pytest.mark.parametrize("formula", BAD_FORMULAS)
def test_bad_formulas_name_the_part(formula):
    data = make_nights().assign(Intercept=1.0, exp=2.0)
    assert_refused(lambda: fit(formula, data), PPFLError, *BAD_FORMULAS[formula])


def test_settings_and_tables_that_do_not_suit_the_formula_are_refused():
    formula, data = "reaction ~ days + site + (1 | subject)", make_nights()
    assert_refused(lambda: fit(formula, offset=[1.0]), SettingError, "offset", "name a column")
    assert_refused(lambda: fit(formula, shared=["days"]), SettingError, "shared")
    model = fit(formula)
    for changed, *words in (
        (data.assign(site="south"), "'site'", "'south'", "'west'"),
        (data.assign(days="many"), "'days'", "'many'"),
        (data.assign(days=np.nan), "'days'", "missing"),
        (data.assign(days=np.inf), "'days'", "inf in row"),
        (data.drop(columns="subject"), "'subject'"),
    ):
        assert_refused(lambda changed=changed: model.predict(changed), DataError, *words)
    assert_refused(lambda: fitted().predict(data.assign(site="south")), DataError, "south")  # levels in C() too


def test_no_formula_runs_code():
    spec = prepare_formula("reaction ~ days + (1 | subject)", make_nights()).spec.to_json()
    for expression in (
        "__import__('os').system('true')", "open('x')", "days.to_csv('x')", "np.load('x')", "(lambda: 1)()",
        "[x for x in days]", "9 ** 9 ** 9", "'a' * 1000000000", "scale(days, _state=days)", "days[0]",
        "C(days, **hours)",
    ):  # fmt: skip
        assert_refused(lambda: used_columns(expression), SettingError)
        for change in ({"terms": ["1", f"{{{expression}}}"]}, {"offsets": [expression]}, {"terms": [expression]}):
            assert_refused(lambda: FormulaSpec.from_json(spec | change), PPFLError)
