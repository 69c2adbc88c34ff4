"""Formulas: designs equal those made by hand, fits equal fits to arrays, and errors name the part that is wrong."""

import json
from functools import cache

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.testing import assert_allclose, assert_array_equal

from ppfl.core.errors import DataError, PPFLError, SettingError
from ppfl.glm import PopulationClassifier, PopulationRegressor
from ppfl.glm.formula import FormulaSpec, prepare_formula
from ppfl.glm.formula.expressions import used_columns
from ppfl.glm.formula.parts import split_formula

QUICK = {"k": 2, "n_init": 2, "random_state": 0, "tol": 1e-4}


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


def shared_names(formula: str) -> set[str]:
    spec = prepare_formula(formula, make_nights()).spec
    return {each if isinstance(each, str) else spec.names[each] for each in spec.shared}


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


def test_splines_add_up_to_one_and_use_the_knots_of_the_fit():
    data = make_nights()
    fit = prepare_formula("reaction ~ 0 + cr(days, df=5) + (0 + cr(days, df=5) | subject)", data)
    assert_allclose(fit.x.sum(axis=1), 1)
    some = data.iloc[[40, 3]]
    assert_allclose(fit.spec.read(some).x, fit.x.iloc[[40, 3]])


@pytest.mark.parametrize(
    ("bar", "shared"),
    [
        ("(days | subject)", {"site[T.north]", "site[T.west]"}),
        ("(1 | subject)", {"days", "site[T.north]", "site[T.west]"}),
        ("(0 + days | subject)", {"intercept", "site[T.north]", "site[T.west]"}),
        ("(days - 1 | subject)", {"intercept", "site[T.north]", "site[T.west]"}),
        ("(days + site | subject)", set()),
        ("(0 + site | subject)", {"days"}),  # all three levels vary, so the intercept does
        ("(1 + `days` | `subject`)", {"site[T.north]", "site[T.west]"}),
    ],
)
def test_the_bar_part_says_what_varies(bar, shared):
    assert shared_names(f"reaction ~ days + site + {bar}") == shared


def test_the_order_in_an_interaction_does_not_matter():
    assert shared_names("reaction ~ days*hours + (0 + hours:days | subject)") == {"intercept", "days", "hours"}


def test_a_term_that_only_the_bar_part_has_is_added_and_noted():
    spec = prepare_formula("reaction ~ site + (days | subject)", make_nights()).spec
    assert "days" in spec.names
    assert spec.names.index("days") not in spec.shared
    assert any("days" in note for note in spec.notes)


def test_a_dot_is_all_other_columns():
    data = make_nights()[["reaction", "days", "hours", "subject"]]
    assert list(design("reaction ~ . + (1 | subject)", data).columns) == ["days", "hours"]


# ---------------------------------------------------------------------- fits


def test_a_formula_fits_what_arrays_fit():
    data = make_nights()
    model = PopulationRegressor.from_formula("reaction ~ days + log(hours) + (days | subject)", data, **QUICK)
    x = np.stack([data["days"], np.log(data["hours"])], 1)
    same = PopulationRegressor(shared=[1], **QUICK).fit(x, data["reaction"], clients=data["subject"])
    assert_allclose(model.canonical_coef_, same.canonical_coef_)
    assert_allclose(model.canonical_intercept_, same.canonical_intercept_)
    assert_allclose(model.memberships_, same.memberships_)
    assert_allclose(model.predict(data), same.predict(x, data["subject"]))
    assert model.score(data) == pytest.approx(same.score(x, data["reaction"], data["subject"]))
    assert np.ptp(model.canonical_coef_[:, 1]) == 0
    assert model.feature_names_in_.tolist() == ["days", "log(hours)"]


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
    model = PopulationRegressor.from_formula(formula, data, weights="times", family="poisson", **columns, **QUICK)
    x, offset = data[["days"]], np.log(data["hours"])
    same = PopulationRegressor(family="poisson", **QUICK)
    same.fit(x, data["wakes"], clients=data["subject"], sample_weight=data["times"], offset=offset)
    assert_allclose(model.canonical_coef_, same.canonical_coef_)
    assert_allclose(model.predict(data[::-1]), same.predict(x, data["subject"], offset)[::-1])
    everything = x, data["wakes"], data["subject"], data["times"], offset
    assert model.deviance(data) == pytest.approx(same.deviance(*everything))


def test_classes_are_predicted_for_tables():
    data = make_nights()
    model = PopulationClassifier.from_formula("rested ~ days + (days | subject)", data, **QUICK)
    same = PopulationClassifier(**QUICK).fit(data[["days"]], data["rested"], clients=data["subject"])
    assert_allclose(model.predict_proba(data), same.predict_proba(data[["days"]], data["subject"]))
    assert model.predict(data).tolist() == same.predict(data[["days"]], data["subject"]).tolist()
    assert model.score(data) == same.score(data[["days"]], data["rested"], data["subject"])


@pytest.mark.parametrize("family", ["gaussian", "poisson"])
def test_intercepts_alone_may_vary(family):
    data = make_nights().assign(level=lambda t: np.where(t["subject"] < "s3", 9.0, 1.0))
    data["level"] += np.tile([0, 1], 48)
    model = PopulationRegressor.from_formula("level ~ 1 + (1 | subject)", data, family=family, **QUICK)
    assert model.canonical_coef_.shape == (2, 0)
    means = data.groupby("subject")["level"].mean()
    predicted = model.predict(data.drop_duplicates("subject"))
    assert_allclose(predicted, means[data["subject"].unique()], rtol=0.1)


def test_no_intercept():
    data = make_nights()
    model = PopulationRegressor.from_formula("reaction ~ 0 + days + (0 + days | subject)", data, **QUICK)
    same = PopulationRegressor(fit_intercept=False, **QUICK)
    same.fit(data[["days"]], data["reaction"], clients=data["subject"])
    assert_allclose(model.canonical_coef_, same.canonical_coef_)
    assert_array_equal(model.canonical_intercept_, 0)


@cache
def fitted() -> PopulationRegressor:
    formula = "reaction ~ bs(days, df=4) + C(site, Treatment('west')) + scale(hours) + (1 + scale(hours) | subject)"
    return PopulationRegressor.from_formula(formula, make_nights(), **QUICK)


@settings(max_examples=20)
@given(st.permutations(range(96)), st.integers(1, 96))
def test_predictions_of_permuted_rows_are_permuted(order, count):
    data, model = make_nights(), fitted()
    some = list(order)[:count]
    assert_allclose(model.predict(data.iloc[some]), model.predict(data)[some], rtol=1e-12)


def test_a_formula_survives_json():
    model = fitted()
    again = FormulaSpec.from_json(json.loads(json.dumps(model._formula.to_json())))
    assert again == model._formula
    assert_array_equal(again.read(make_nights()).x, model._formula.read(make_nights()).x)


@pytest.mark.parametrize(
    "change",
    [{"terms": 3}, {"names": None}, {"client": None}, {"other": 1}, {"transforms": {"items": [[[1], 2]]}}],
)
def test_a_damaged_formula_is_refused(change):
    with pytest.raises(DataError, match="save the model again"):
        FormulaSpec.from_json(fitted()._formula.to_json() | change)


def test_a_fit_to_arrays_forgets_the_formula():
    data = make_nights()
    model = PopulationRegressor.from_formula("reaction ~ days + (days | subject)", data, **QUICK)
    model.fit(data[["hours"]], data["reaction"], clients=data["subject"])
    assert len(model.predict(data[["hours"]], data["subject"])) == 96


def test_new_clients_are_onboarded_from_a_table():
    data = make_nights()
    old, new = data[data["subject"] != "s3"], data[data["subject"] == "s3"]
    model = PopulationRegressor.from_formula("reaction ~ days + (days | subject)", old, **QUICK)
    same = PopulationRegressor(**QUICK).fit(old[["days"]], old["reaction"], clients=old["subject"])
    assert_allclose(model.onboard(new), same.onboard(new[["days"]], new["reaction"], new["subject"]))


# ---------------------------------------------------------------------- missing values


def test_incomplete_rows_are_counted_by_client():
    data = make_nights().copy()
    data.loc[[0, 1], "days"] = np.nan
    data.loc[8:15, "site"] = None
    data.loc[95, "subject"] = None
    data.loc[50, "hours"] = np.nan  # not used
    formula = "reaction ~ days + site + (1 | subject)"
    model = PopulationRegressor.from_formula(formula, data, **QUICK)
    assert model.dropped_.to_dict() == {"s0": 2, "s1": 8, None: 1}
    assert model._formula.lost == ("s1",)
    described = "; ".join(model._formula.describe())
    assert all(part in described for part in (formula, "11 (subject s0: 2, s1: 8, no client: 1)", "complete row: 's1'"))
    complete = data.dropna(subset=["days", "site", "subject"])
    same = PopulationRegressor.from_formula(formula, complete, **QUICK)
    assert same.dropped_.empty
    assert_allclose(model.canonical_coef_, same.canonical_coef_)
    with pytest.raises(DataError, match="'days', 'site'.*row 0"):
        model.predict(data.dropna(subset=["subject"]))


# ---------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("formula", "message"),
    [
        ("reaction", "not 'target ~ terms'.*reaction ~ days"),
        ("reaction ~ days", "who the clients are.*\\(1 \\| subject\\)"),
        ("reaction ~ days | subject", "not in a group of its own.*\\(days \\| subject\\)"),
        ("reaction ~ days + (1 | site/subject)", "nests 'subject' in 'site'.*site \\+ \\(1 \\| subject\\)"),
        ("reaction ~ days + (1 | site) + (1 | subject)", "2 bar parts.*one membership.*finest"),
        ("reaction ~ days + (days || subject)", "uncorrelated.*\\(days \\| subject\\)"),
        ("reaction ~ days + (1 | site:subject)", "join them into one column"),
        ("reaction ~ days + (0 | subject)", "no terms.*\\(1 \\| subject\\)"),
        ("reaction ~ 0 + days + (days | subject)", "has an intercept.*\\(0 \\+ days \\| subject\\)"),
        ("reaction ~ days + + (1 | subject)", "nothing after"),
        ("reaction ~ days hours + (1 | subject)", "'days hours' is not a sum of terms"),
        ("reaction ~ (days + (1 | subject)", "without an end"),
        ("reaction ~ days + subject + (1 | subject)", "'subject' is the client column and a term"),
        ("cbind(a, b) ~ days + (1 | subject)", "two columns.*weights"),
        ("reaction ~ dys + (1 | subject)", "'dys'.*'days'"),
        ("reaction ~ days + (1 | who)", "'who'.*'subject'"),
        ("reactn ~ days + (1 | subject)", "'reactn'"),
        ("site ~ days + (1 | subject)", "'site' holds text.*PopulationClassifier"),
        ("reaction ~ log(days) + (1 | subject)", "'log\\(days\\)' is nan in row"),
        ("reaction ~ days + offset(log(days)) + (1 | subject)", "offset\\(log\\(days\\)\\) is nan in row"),
        ("reaction ~ days + offset(site) + (1 | subject)", "'site', which holds text"),
        ("reaction ~ sinus(days) + (1 | subject)", "'sinus', which no formula can; use .*sin, "),
        ("reaction ~ factor(site) + (1 | subject)", "'factor'.*C\\(x\\)"),
        ("reaction ~ days + reaction + (1 | subject)", "'reaction' is the target and a term"),
        ("reaction ~ 0 + days + (1 | subject)", "leave the 0 or -1 out of '0 \\+ days'"),
        ("reaction ~ bs(days) + bs(site, df=4) + (1 | subject)", "cannot be computed"),
    ],
)
def test_bad_formulas_name_the_part(formula, message):
    with pytest.raises(PPFLError, match=message) as raised:
        PopulationRegressor.from_formula(formula, make_nights(), **QUICK)
    assert "\n" not in str(raised.value)


def test_names_that_would_be_mistaken_are_refused():
    data = make_nights().assign(Intercept=1.0, log=2.0)
    with pytest.raises(DataError, match="called 'Intercept'"):
        design("reaction ~ Intercept + (1 | subject)", data)
    with pytest.raises(DataError, match="rename it"):
        design("reaction ~ log(log) + (1 | subject)", data)
    with pytest.raises(SettingError, match="offset is of type list; name a column"):
        PopulationRegressor.from_formula("reaction ~ days + (1 | subject)", data, offset=[1.0])


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


def test_settings_that_the_formula_has_are_refused():
    with pytest.raises(SettingError, match="shared is set"):
        PopulationRegressor.from_formula("reaction ~ days + (1 | subject)", make_nights(), shared=["days"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"site": "south"}, "'site' has the level 'south'.*'east', 'north', 'west'"),
        ({"days": "many"}, "'days' holds text \\('many'\\); the fit had numbers"),
        ({"days": np.nan}, "'days' has missing values"),
        ({"days": np.inf}, "'days' is inf in row"),
    ],
)
def test_tables_that_differ_from_the_fit_are_refused(change, message):
    model = PopulationRegressor.from_formula("reaction ~ days + site + (1 | subject)", make_nights(), **QUICK)
    with pytest.raises(DataError, match=message):
        model.predict(make_nights().assign(**change))
    with pytest.raises(DataError, match="'subject'"):
        model.predict(make_nights().drop(columns="subject"))


def test_levels_of_expressions_are_checked_too():
    with pytest.raises(DataError, match="south"):
        fitted().predict(make_nights().assign(site="south"))


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os').system('true')",
        "open('x')",
        "days.to_csv('x')",
        "np.load('x')",
        "(lambda: 1)()",
        "[x for x in days]",
        "9 ** 9 ** 9",
        "'a' * 1000000000",
        "scale(days, _state=days)",
        "days[0]",
        "C(days, **hours)",
    ],
)
def test_no_formula_runs_code(expression):
    with pytest.raises(SettingError):
        used_columns(expression)
    spec = prepare_formula("reaction ~ days + (1 | subject)", make_nights()).spec.to_json()
    for change in ({"terms": ["1", f"{{{expression}}}"]}, {"offsets": [expression]}, {"terms": [expression]}):
        with pytest.raises(PPFLError):
            FormulaSpec.from_json(spec | change)


def test_quotes_and_functions_may_contain_any_sign():
    parts = split_formula("log(`a ~ b`) ~ I(x | z) + C(s, Treatment('+ (|')) - 1 + (0 + x | `the | client`)")
    assert parts.response == "log(`a ~ b`)"
    assert parts.fixed == "I(x | z) + C(s, Treatment('+ (|')) - 1"
    assert (parts.varying, parts.client) == ("0 + x", "the | client")


def test_clients_that_share_an_intercept_agree_where_their_columns_are_zero():
    data = make_nights().assign(days=lambda t: t["days"] + 2)  # not centred
    data["reaction"] = np.where(data["subject"] < "s3", 2.0, -2.0) * data["days"] + 1
    data["reaction"] += np.random.default_rng(1).normal(size=96)
    model = PopulationRegressor.from_formula("reaction ~ days + (0 + days | subject)", data, **QUICK)
    assert np.ptp(model.canonical_intercept_) < 1e-9
    at_zero = model.predict(data.assign(days=0.0))
    assert_allclose(at_zero, at_zero[0])
    assert_allclose(at_zero, 1.0, atol=0.6)
