"""Fitting a table: columns, targets, held-out rows, and results that agree with the estimators."""

from functools import cache

import numpy as np
import pandas as pd
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, mean_gamma_deviance, mean_poisson_deviance, mean_squared_error

from kit.refusals import PPFLError, assert_refused
from kit.tables import make_client_table, make_estimator
from ppfl.data import DataTable
from ppfl.glm.local_models import MODELS, LocalModels
from ppfl.glm.table import TableSettings, fit_table
from ppfl.glm.table_data import FAMILIES, Encoding, Target, prepare_table

RANDOM = np.random.default_rng(0)
SHOPS = pd.DataFrame({"row": np.arange(1, 121), "shop": np.repeat(np.arange(12), 10), "price": RANDOM.normal(size=120)})
SHOPS["day"] = RANDOM.choice(["mo", "tu", "we"], 120)
PREDICTOR = np.where(SHOPS["shop"] % 2, 2.0, -2.0) * SHOPS["price"] + (SHOPS["day"] == "tu")  # two kinds of shops
SHOPS["sold"] = PREDICTOR + RANDOM.normal(size=120)
SHOPS["count"] = RANDOM.poisson(np.exp(PREDICTOR.clip(-2, 2)))
SHOPS["amount"] = np.exp(PREDICTOR) * RANDOM.gamma(3, size=120)
SHOPS["open"] = np.where(PREDICTOR + RANDOM.logistic(size=120) > 0, "yes", "no")
SHOPS["size"] = np.digitize(PREDICTOR + RANDOM.logistic(size=120), [-1, 1])
TARGETS = dict.fromkeys(FAMILIES, "count")  # all other families have counts
TARGETS |= {"gaussian": "sold", "gamma": "amount", "bernoulli": "open", "multinomial": "size"}
BY_COLUMNS = TableSettings("shop", "sold", columns=("price", "day"))
BY_FORMULA = TableSettings(formula="sold ~ price + day + (price | shop)", ks=(2,), n_init=1)


def encoding_of(frame, columns):
    """The encoding of these columns, and the rows as it encodes them."""
    table = DataTable.of(frame, "shop", "sold", columns=columns)
    encoding = Encoding.of(table, np.ones(len(table), dtype=bool))
    return encoding, encoding.encode(table.features)


@cache
def fitted(family, **more):
    settings = {"ks": (2,), "n_init": 1, "columns": ("price", "day"), **more}
    return fit_table(SHOPS, TableSettings("shop", TARGETS[family], family, **settings))


def test_text_is_encoded_like_pandas_dummies_and_rare_levels_are_merged():
    encoding, everything = encoding_of(SHOPS, ["price", "day"])
    assert encoding.terms == ["price", "day = tu", "day = we"]
    wanted = pd.get_dummies(SHOPS[["price", "day"]], drop_first=True, dtype=float)
    np.testing.assert_array_equal(everything, wanted.to_numpy())
    rare, _ = encoding_of(pd.DataFrame({"x": ["b"] * 9 + ["a"] * 9 + ["c", "d"], "shop": 1, "sold": 1.5}), ["x"])
    np.testing.assert_array_equal(rare.encode(pd.DataFrame({"x": ["a", "b", "c", "never"]}))[:, 1], [0, 0, 1, 1])


@pytest.mark.parametrize(
    ("values", "family", "classes"),
    [
        (["no", "yes", "no"], "bernoulli", ("no", "yes")),
        ([10, 2, 3], "multinomial", ("2", "3", "10")),
        ([0.5, 1.0, 2.0], "gaussian", ()),
        ([0, 1, 3, 0, 2, 1], "poisson", ()),
        ([0, 300, 20, 40, 60, 80], "gaussian", ()),
    ],
)
def test_the_family_is_guessed_with_a_reason(values, family, classes):
    found = Target.of("y", pd.Series(values), None)
    assert (found.family, found.classes, bool(found.reason)) == (family, classes, True)


@pytest.mark.parametrize(
    ("family", "wanted"),
    [
        ("gaussian", lambda y, mean: {"rmse": mean_squared_error(y, mean) ** 0.5}),
        ("poisson", lambda y, mean: {"deviance": mean_poisson_deviance(y, mean)}),
        ("gamma", lambda y, mean: {"deviance": mean_gamma_deviance(y, mean)}),
        ("multinomial", lambda y, mean: {"deviance": 2 * log_loss(y, mean), "accuracy": (mean.argmax(1) == y).mean()}),
    ],
)
def test_scores_agree_with_scikit_learn(family, wanted):
    target, random = Target.of("y", SHOPS[TARGETS[family]], family), np.random.default_rng(0)
    mean = random.dirichlet(np.ones(3), 40) if target.classes else random.uniform(0.5, 2, 40)
    assert target.figures(mean, np.arange(40)) == pytest.approx(wanted(target.values[:40], mean))


def test_rows_are_held_out_of_every_client_and_every_class_stays():
    table = prepare_table(SHOPS, BY_COLUMNS)
    assert pd.Series(table.is_test).groupby(table.clients).sum().tolist() == [2] * 12
    for alone in range(20):
        shops = SHOPS.assign(kind=np.where(np.arange(120) == alone, "rare", SHOPS["open"]))
        table = prepare_table(shops, TableSettings("shop", "kind"))
        assert set(table.target.values[~table.is_test]) == {0, 1, 2}


@pytest.mark.parametrize("settings", [BY_COLUMNS, BY_FORMULA])
def test_incomplete_rows_are_counted_and_a_bad_cell_is_a_missing_number(settings):
    missing = SHOPS["price"].mask((SHOPS["shop"] == 4) | (SHOPS["row"] == 1))
    table = prepare_table(SHOPS.assign(price=missing), settings)
    assert (len(table.frame), table.incomplete, table.lost) == (109, 11, ("4",))
    for column in ("price", "sold"):
        shops = SHOPS.astype({column: str})
        shops.loc[16, column] = "n/a?"
        table = prepare_table(shops, settings)
        assert table.bad_cells == [(column, 1, "n/a?", 17)]
        assert (table.incomplete, table.target.family) == (1, "gaussian")
        found = table.frame["price"] if column == "price" else table.target.values
        np.testing.assert_allclose(found, SHOPS[column].drop(index=16))


@pytest.mark.parametrize("family", ["gaussian", "poisson", "bernoulli", "multinomial"])
def test_results_agree_with_the_estimator(family):
    found = fitted(family, test_fraction=0.0)
    (_, x), target = encoding_of(SHOPS, ["price", "day"]), found.table.target
    np.testing.assert_allclose(found.memberships, np.asarray(found.model.memberships_))
    pooled = found.settings.pooled(target).fit(x, target.values)
    if family == "multinomial":
        lines = np.array([term.pooled for term in found.terms.coefficients]).reshape(3, -1)  # (classes, 1 + d)
        odds = np.exp(lines[:, 0] + x @ lines[:, 1:].T)
        np.testing.assert_allclose(odds / odds.sum(1, keepdims=True), pooled.predict_proba(x), atol=1e-8)
        return
    slopes = np.array([term.values for term in found.terms.coefficients])
    np.testing.assert_allclose(slopes.T, np.c_[found.model.canonical_intercept_, found.model.canonical_coef_])


def test_two_kinds_of_shops_are_found_improve_predictions_and_are_found_again():
    found = fitted("gaussian", ks=(1, 2))
    assert found.best.k == 2
    kinds = np.array(found.memberships).argmax(1)
    assert len({(int(client) % 2, kind) for client, kind in zip(found.ids, kinds, strict=True)}) == 2
    ours, pooled, own = (score.figures["rmse"] for score in found.scores)
    assert ours < pooled and own < pooled
    again = fit_table(SHOPS, found.settings)
    assert found.memberships == again.memberships and found.terms == again.terms


def test_one_canonical_model_is_one_model_for_all():
    found = fitted("bernoulli", ks=(1,))
    ours, pooled, _ = (score.figures["deviance"] for score in found.scores)
    assert ours == pytest.approx(pooled, rel=1e-4)
    for term in found.terms.coefficients:
        assert term.values[0] == pytest.approx(term.pooled, abs=1e-4)


def test_a_formula_gives_what_its_columns_give_and_may_have_an_offset():
    columns, formula = fitted("gaussian", shared=("day",)), fit_table(SHOPS, BY_FORMULA)
    by_name = {term.name: term for term in formula.terms.coefficients}
    for term in columns.terms.coefficients:
        same = by_name[term.name.replace(" = ", "[T.") + "]" * (" = " in term.name)]
        assert same.values == pytest.approx(term.values)
        assert same.is_shared == term.is_shared == term.name.startswith("day") == (np.ptp(term.values) == 0)
    assert [score.figures for score in formula.scores] == [pytest.approx(score.figures) for score in columns.scores]
    with_offset = TableSettings(formula="count ~ price + offset(log(row)) + (price | shop)", ks=(2,), n_init=2)
    same = make_estimator("poisson")
    same.fit(SHOPS[["price"]], SHOPS["count"], clients=SHOPS["shop"].astype(str), offset=np.log(SHOPS["row"]))
    np.testing.assert_allclose(fit_table(SHOPS, with_offset).model.canonical_coef_, same.canonical_coef_)


def test_the_held_out_likelihood_and_the_bic_choose_k_in_the_units_of_the_target():
    for choose in ("held_out", "prediction", "bic"):
        found = fitted("gaussian", ks=(1, 2), choose=choose)
        if choose == "bic":
            assert found.best == min(found.candidates, key=lambda each: each.bic)
            continue
        best = max(found.candidates, key=lambda each: each.held_out or -np.inf)
        assert choose == "held_out" or found.best == best
        assert best.held_out - found.best.held_out <= found.best.held_out_error + 1e-12
    assert found.best.bic == pytest.approx(found.model.bic_)
    plain = fitted("gaussian", ks=(1, 2))
    large = fit_table(SHOPS.assign(sold=1000 * SHOPS["sold"]), plain.settings)
    for before, after in zip(plain.candidates, large.candidates, strict=True):
        assert after.held_out == pytest.approx(before.held_out - np.log(1000), abs=1e-3)


REFUSED = {
    "no such client": ({"client": "who"}, "'who'", "'shop'"),
    "no such column": ({"columns": ("price", "colour")}, "'colour'"),
    "text": ({"target": "day", "family": "gaussian"}, "text", "multinomial"),
    "no counts": ({"family": "poisson"}, "counts"),
    "k": ({"ks": (99,)}, "99", "12 clients"),
    "shared": ({"shared": ("colour",)}, "'colour'", "'price'"),
    "infinite": ({"columns": ("infinite",)}, "'infinite'"),
    "empty": ({"columns": ("empty",)}, "none of 120 rows"),
    "constant": ({"target": "one", "family": "gaussian"}, "'one'", "2.5 in every row"),
    "huge": ({"target": "huge", "family": "gaussian"}, "'huge'", "unit"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_settings_and_tables_say_what_to_do(name):
    change, *words = REFUSED[name]
    shops = SHOPS.assign(empty=np.nan, one=2.5, huge=1e300 * SHOPS["sold"], infinite=1 / (SHOPS["row"] - 1))
    settings = TableSettings(**{"client": "shop", "target": "sold", "ks": (1,), "columns": ("price",), **change})
    assert_refused(lambda: fit_table(shops, settings), PPFLError, *words)


@pytest.mark.parametrize("family", MODELS)
def test_every_client_has_a_finite_model(family):
    target, x = Target.of("y", SHOPS[TARGETS[family]], family), SHOPS[["price"]].to_numpy()
    alone = np.where(np.arange(120) < 1, "one row", SHOPS["shop"].astype(str))
    y = np.where(alone == "3", target.values[0] if family == "gamma" else 0, target.values)  # the same, or zeros
    mean = LocalModels(family, x, y, alone, noise=1.0).predict(x, alone)
    figures = target._replace(values=y).figures(mean, np.arange(120))
    assert np.isfinite(list(figures.values())).all()


def test_a_client_with_many_rows_is_hardly_regularized():
    table = make_client_table(clients=2, rows=2000)
    x, y, clients = table.x, table.labels, table.clients.astype(str)
    found = LocalModels("bernoulli", x, y, clients, noise=1.0).predict(x, clients)
    for rows in (clients == "0", clients == "1"):
        alone = LogisticRegression(C=np.inf).fit(x[rows], y[rows]).predict_proba(x[rows])
        np.testing.assert_allclose(found[rows], alone, atol=0.01)
