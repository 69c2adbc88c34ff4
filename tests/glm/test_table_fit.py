"""Fitting a table: columns, targets, held-out rows, and results that agree with the estimators."""

from functools import cache

import numpy as np
import pandas as pd
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, mean_gamma_deviance, mean_poisson_deviance, mean_squared_error

from kit.refusals import DataError, PPFLError, SettingError, assert_refused
from kit.tables import HETEROSCEDASTIC, make_estimator
from ppfl.glm.table import TableSettings, fit_table
from ppfl.glm.table.encoding import Encoding, choose_features
from ppfl.glm.table.fit_table import TableFit
from ppfl.glm.table.local_models import MODELS, LocalModels
from ppfl.glm.table.number_cells import BadCells
from ppfl.glm.table.prepare import prepare_table
from ppfl.glm.table.target import FAMILIES, Target


def make_shops() -> pd.DataFrame:
    """Twelve shops of two kinds, with opposite effects of the price."""
    random = np.random.default_rng(0)
    shop = np.repeat(np.arange(12), 10)
    table = pd.DataFrame({"row": np.arange(1, 121), "shop": shop, "price": random.normal(size=120)})
    table["day"] = random.choice(["mo", "tu", "we"], 120)
    predictor = np.where(shop % 2, 2.0, -2.0) * table["price"] + (table["day"] == "tu")
    table["sold"] = predictor + random.normal(size=120)
    table["count"] = random.poisson(np.exp(predictor.clip(-2, 2)))
    table["amount"] = np.exp(predictor) * random.gamma(3, size=120)
    table["open"] = np.where(predictor + random.logistic(size=120) > 0, "yes", "no")
    table["size"] = np.digitize(predictor + random.logistic(size=120), [-1, 1])
    return table


TARGETS = dict.fromkeys(FAMILIES, "count")  # all other families have counts
TARGETS |= {"gaussian": "sold", "gamma": "amount", "bernoulli": "open", "multinomial": "size"}
SMALL = {"ks": (2,), "n_init": 1, "columns": ("price", "day")}
SOLD = TableSettings("shop", "sold")


@cache
def fitted(family: str, **more: object) -> TableFit:
    return fit_table(make_shops(), TableSettings("shop", TARGETS[family], family, **{**SMALL, **more}))


# ---------------------------------------------------------------------- columns and target


def test_useless_columns_are_left_out_unless_they_are_named():
    shops = make_shops().assign(rownames=lambda t: t["row"] * 7 % 1000, one="x", name=[f"n{i}" for i in range(120)])
    few = shops[["row", "rownames", "shop", "sold", "price", "day", "one", "name"]]
    found = choose_features(few, ["shop", "sold"], None)
    assert found.names == ("price", "day")
    assert found.left_out == {"row": "row numbers", "rownames": "row numbers", "one": "one value", "name": "120 levels"}
    assert choose_features(shops, ["shop", "sold"], ["row", "one"]).names == ("row", "one")
    commas = make_shops()["price"].map(lambda price: f"{price:.3f}".replace(".", ","))
    assert prepare_table(make_shops().assign(price=commas), SOLD).left_out["price"] == "numbers with a decimal comma"


def test_text_is_encoded_like_pandas_dummies_and_shared_as_a_whole():
    shops = make_shops()
    encoding = Encoding.of(shops, ["price", "day"])
    assert encoding.terms == ["price", "day = tu", "day = we"]
    wanted = pd.get_dummies(shops[["price", "day"]], drop_first=True, dtype=float)
    np.testing.assert_array_equal(encoding.encode(shops), wanted.to_numpy())
    assert encoding.shared(["day", "intercept"]) == [1, 2, "intercept"]
    assert (encoding.shared(["all"]), encoding.shared([])) == ("all", None)


def test_rare_and_unseen_levels_are_merged():
    def encode(seen: list[str], new: list[str]):
        encoding = Encoding.of(pd.DataFrame({"x": seen}), ["x"])
        return len(encoding.terms) + 1, encoding.encode(pd.DataFrame({"x": new})).tolist()

    common = ["b"] * 9 + ["a"] * 9
    assert encode([*common, "c", "d"], ["a", "b", "c", "never"]) == (3, [[0, 0], [1, 0], [0, 1], [0, 1]])
    assert encode(common, ["b", "never"]) == (2, [[1], [0]])
    assert encode(["a", "b", "c"], ["c"]) == (3, [[0, 1]])  # all are rare, so all are kept


@pytest.mark.parametrize(
    ("values", "family", "classes"),
    [
        (["no", "yes", "no"], "bernoulli", ("no", "yes")),
        (["a", "b", "c"], "multinomial", ("a", "b", "c")),
        ([True, False, True], "bernoulli", ("False", "True")),
        ([0, 1, 1], "bernoulli", ("0", "1")),
        ([10, 2, 3], "multinomial", ("2", "3", "10")),
        ([0.5, 1.0, 2.0], "gaussian", ()),
        (range(9), "poisson", ()),
        ([0, 1, 3, 0, 2, 1], "poisson", ()),
        ([0, 300, 20, 40, 60, 80], "gaussian", ()),
        ([0, 1, -1], "multinomial", ("-1", "0", "1")),
    ],
)
def test_the_family_is_guessed_with_a_reason(values, family, classes):
    found = Target.of("y", pd.Series(values), None)
    assert (found.family, found.classes) == (family, classes)
    assert found.reason and not Target.of("y", pd.Series(values), family).reason


@pytest.mark.parametrize("family", TARGETS)
def test_scores_agree_with_scikit_learn(family):
    target, rows = Target.of("y", make_shops()[TARGETS[family]], family), np.arange(120) % 3 == 0
    random, y = np.random.default_rng(0), target.values[rows]
    mean = random.uniform(0.5, 2, len(y))
    if target.classes:
        mean = random.dirichlet(np.ones(len(target.classes)), len(y))
        wanted = {"deviance": 2 * log_loss(y, mean), "accuracy": (mean.argmax(1) == y).mean()}
    elif family in ("gaussian", HETEROSCEDASTIC):
        wanted = {"rmse": mean_squared_error(y, mean) ** 0.5}
    else:
        wanted = {"deviance": (mean_gamma_deviance if family == "gamma" else mean_poisson_deviance)(y, mean)}
    assert target.figures(mean, rows) == pytest.approx(wanted)


# ---------------------------------------------------------------------- rows


def test_rows_are_held_out_of_every_client_and_every_class_stays():
    table = prepare_table(make_shops(), SOLD)
    assert pd.Series(table.is_test).groupby(table.clients).sum().tolist() == [2] * 12
    shops = make_shops()
    for alone in range(20):
        shops["kind"] = np.where(np.arange(120) == alone, "rare", shops["open"])
        table = prepare_table(shops, TableSettings("shop", "kind"))
        assert set(table.target.values[~table.is_test]) == {0, 1, 2}


def test_incomplete_rows_are_left_out_and_counted():
    shops = make_shops()
    shops.loc[3, "price"] = np.nan
    shops.loc[7, "day"] = None
    table = prepare_table(shops, TableSettings("shop", "sold", columns=("price", "day")))
    assert (len(table.frame), table.incomplete, table.lost) == (118, 2, ())
    shops.loc[shops["shop"] == 4, "price"] = np.nan
    for settings in (SOLD, TableSettings(formula="sold ~ price + (1 | shop)")):
        assert prepare_table(shops, settings).lost == ("4",)


@pytest.mark.parametrize("column", ["price", "sold"])
def test_a_bad_cell_is_missing_and_its_column_stays_numeric(column):
    shops, settings = make_shops(), TableSettings("shop", "sold", columns=("price", "day"))
    wanted = prepare_table(shops.drop(index=16), settings)
    shops[column] = shops[column].astype(str)
    shops.loc[16, column] = "n/a?"
    table = prepare_table(shops, settings)
    assert table.bad_cells == [BadCells(column, 1, "n/a?", 17)]
    assert (table.incomplete, table.target.family) == (1, "gaussian")
    np.testing.assert_allclose(table.encoding.encode(table.frame), wanted.encoding.encode(wanted.frame))
    by_formula = prepare_table(shops, TableSettings(formula="sold ~ price + day + (1 | shop)"))
    assert by_formula.bad_cells == table.bad_cells
    codes = make_shops().assign(code=["a1", "7", "8", "9"] * 30)  # text with some numbers stays text
    assert not prepare_table(codes, TableSettings("shop", "sold", columns=("code",))).bad_cells


# ---------------------------------------------------------------------- fits


@pytest.mark.parametrize("family", ["gaussian", HETEROSCEDASTIC, "quasipoisson", "gamma", "bernoulli", "multinomial"])
def test_results_agree_with_the_estimator(family):
    found, shops = fitted(family, test_fraction=0.0), make_shops()
    x, target = Encoding.of(shops, ["price", "day"]).encode(shops), found.table.target
    assert found.ids == sorted(map(str, range(12)))
    np.testing.assert_allclose(found.memberships, np.asarray(found.model.memberships_))
    pooled = found.settings.pooled(target).fit(x, target.values)
    means = (pooled.predict_proba if target.classes else pooled.predict)(x.mean(0, keepdims=True)).ravel()
    shown = means[1:] if family == "bernoulli" else means
    assert [term.pooled for term in found.terms.average] == pytest.approx(shown.tolist())
    if family == "multinomial":
        lines = np.array([term.pooled for term in found.terms.coefficients]).reshape(3, -1)  # (classes, 1 + d)
        odds = np.exp(lines[:, 0] + x @ lines[:, 1:].T)
        np.testing.assert_allclose(odds / odds.sum(1, keepdims=True), pooled.predict_proba(x), atol=1e-8)
    else:
        slopes = np.array([term.values for term in found.terms.coefficients])
        np.testing.assert_allclose(slopes[0], found.model.canonical_intercept_)
        np.testing.assert_allclose(slopes[1:].T, found.model.canonical_coef_)


def test_two_kinds_of_shops_are_found_and_improve_predictions():
    found = fitted("gaussian", ks=(1, 2))
    assert found.best.k == 2
    kinds = np.array(found.memberships).argmax(1)
    assert len({(int(client) % 2, kind) for client, kind in zip(found.ids, kinds, strict=True)}) == 2
    ours, pooled, own = (score.figures["rmse"] for score in found.scores)
    assert ours < pooled and own < pooled
    assert sum(found.clear) + found.mixed == 12


def test_a_formula_gives_what_its_columns_give():
    columns = fitted("gaussian", shared=("day",))
    formula = fit_table(make_shops(), TableSettings(formula="sold ~ price + day + (price | shop)", ks=(2,), n_init=1))
    by_name = {term.name: term for term in formula.terms.coefficients}
    for term in columns.terms.coefficients:
        same = by_name[term.name.replace(" = ", "[T.") + "]" * (" = " in term.name)]
        assert same.values == pytest.approx(term.values)
        assert same.is_shared == term.is_shared == term.name.startswith("day") == (np.ptp(term.values) == 0)
    assert [score.figures for score in formula.scores] == [pytest.approx(score.figures) for score in columns.scores]


def test_an_offset_of_a_formula_reaches_all_models():
    shops = make_shops().assign(hours=lambda t: 1.0 + t["row"] % 7)
    settings = TableSettings(formula="count ~ price + offset(log(hours)) + (price | shop)", ks=(2,), n_init=2)
    found = fit_table(shops, settings)
    assert found.table.target.family == "poisson"
    same = make_estimator("poisson")
    same.fit(shops[["price"]], shops["count"], clients=shops["shop"].astype(str), offset=np.log(shops["hours"]))
    np.testing.assert_allclose(found.model.canonical_coef_, same.canonical_coef_)
    assert [score.label for score in found.scores] == ["2 canonical models", "one model for all"]


def test_clients_may_differ_in_their_intercepts_alone():
    shops = make_shops().assign(sold=lambda t: t["sold"] + 20 * (t["shop"] % 2))
    by_columns = TableSettings("shop", "sold", ks=(2,), columns=())
    for settings in (by_columns, TableSettings(formula="sold ~ 1 + (1 | shop)", ks=(2,))):
        found = fit_table(shops, settings)
        assert [term.name for term in found.terms.coefficients] == ["intercept"]
        ours, pooled, own = (score.figures["rmse"] for score in found.scores)
        assert ours < pooled and own < pooled


def test_the_held_out_likelihood_and_the_bic_choose_k_in_the_units_of_the_target():
    for choose in ("held_out", "prediction", "bic"):
        found = fitted("gaussian", ks=(1, 2), choose=choose)
        best = max(found.candidates, key=lambda each: (-each.bic if choose == "bic" else each.held_out) or 0.0)
        assert found.best == best
    for name in ("log_likelihood", "aic", "bic"):
        assert getattr(found.best, name) == pytest.approx(getattr(found.model, f"{name}_"))
    plain = fitted("gaussian", ks=(1, 2))
    large = fit_table(make_shops().assign(sold=lambda t: 1000 * t["sold"]), TableSettings(**vars(plain.settings)))
    for before, after in zip(plain.candidates, large.candidates, strict=True):
        assert after.held_out == pytest.approx(before.held_out - np.log(1000), abs=1e-3)


def test_the_same_seed_gives_the_same_fit_and_steps_are_reported_when_they_begin():
    steps, first = [], fitted("gaussian")
    again = fit_table(make_shops(), first.settings, lambda *step: steps.append(step))
    assert first.memberships == again.memberships and first.terms == again.terms
    assert [score.figures for score in first.scores] == [score.figures for score in again.scores]
    names = ["k = 2", "one model for all", "held-out rows", "a model for each client"]
    assert steps == [(name, number, 4) for number, name in enumerate(names, 1)]


# ---------------------------------------------------------------------- refusals


def fit_shops(shops: pd.DataFrame | None = None, **settings):
    wanted = {"client": "shop", "target": "sold", "ks": (1,), "columns": ("price",), **settings}
    return fit_table(make_shops() if shops is None else shops, TableSettings(**wanted))


REFUSED = {
    "no such client": (lambda: fit_shops(client="who"), PPFLError, "'who'", "'shop'"),
    "no such column": (lambda: fit_shops(columns=("price", "colour")), PPFLError, "'colour'"),
    "target as column": (lambda: fit_shops(columns=("price", "sold")), PPFLError, "'sold'", "target"),
    "client as target": (lambda: fit_shops(client="sold"), PPFLError, "both client and target"),
    "family": (lambda: fit_shops(family="normal"), PPFLError, "'normal'"),
    "text": (lambda: fit_shops(target="day", family="gaussian"), PPFLError, "text", "multinomial"),
    "three classes": (lambda: fit_shops(target="size", family="bernoulli"), PPFLError, "3 classes", "multinomial"),
    "no counts": (lambda: fit_shops(family="poisson"), PPFLError, "counts"),
    "k": (lambda: fit_shops(ks=(99,)), PPFLError, "99", "12 clients"),
    "no k": (lambda: fit_shops(ks=()), SettingError, "canonical models"),
    "affinity": (lambda: fit_shops(affinity="features"), PPFLError, "penalty is 0"),
    "fraction": (lambda: fit_shops(test_fraction=1.5), PPFLError, "1.5"),
    "shared": (lambda: fit_shops(shared=("colour",)), PPFLError, "'colour'", "'price'"),
    "mix": (lambda: fit_shops(mix="outputs"), PPFLError, "'outputs'"),
    "infinite": (
        lambda: fit_shops(make_shops().replace({"price": {make_shops().price[0]: np.inf}})),
        DataError,
        "'price'",
    ),
    "empty": (lambda: fit_shops(make_shops().assign(price=np.nan)), DataError, "none of 120 rows"),
    "constant": (lambda: fit_shops(make_shops().assign(sold=2.5)), DataError, "'sold'", "2.5 in every row"),
    "constant class": (lambda: fit_shops(make_shops().assign(sold=2), family="bernoulli"), DataError, "2 in every row"),
    "constant count": (lambda: fit_shops(make_shops().assign(sold=0), family="poisson"), DataError, "0 in every row"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_bad_settings_and_tables_say_what_to_do(name):
    call, error, *words = REFUSED[name]
    assert_refused(call, error, *words)


# ---------------------------------------------------------------------- a model for each client


@pytest.mark.parametrize("family", MODELS)
def test_every_client_has_a_finite_model(family):
    shops = make_shops()
    target, x = Target.of("y", shops[TARGETS[family]], family), shops[["price"]].to_numpy()
    alone = np.where(np.arange(120) < 1, "one row", shops["shop"].astype(str))
    y = target.values.copy()
    y[alone == "3"] = y[0] if family == "gamma" else 0  # only one class, or only zeros
    mean = LocalModels(family, x, y, alone, noise=1.0).predict(x, alone)
    figures = target._replace(values=y).figures(mean, np.arange(120))
    assert np.isfinite(list(figures.values())).all()
    if target.classes:
        np.testing.assert_allclose(mean.sum(1), 1)
        assert mean.min() > 0


def test_a_client_with_many_rows_is_hardly_regularized():
    random = np.random.default_rng(0)
    x, clients = random.normal(size=(4000, 1)), np.repeat(["a", "b"], 2000)
    y = (np.where(clients == "a", 2.0, -2.0) * x[:, 0] + random.logistic(size=4000) > 0).astype(int)
    found = LocalModels("bernoulli", x, y, clients, noise=1.0).predict(x, clients)
    for rows in (clients == "a", clients == "b"):
        alone = LogisticRegression(C=np.inf).fit(x[rows], y[rows]).predict_proba(x[rows])
        np.testing.assert_allclose(found[rows], alone, atol=0.01)
