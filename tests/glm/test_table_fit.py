"""Fitting a table: columns, targets, held-out rows, and results that agree with the estimators."""

from functools import cache

import numpy as np
import pandas as pd
import pytest
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss, mean_gamma_deviance, mean_poisson_deviance, mean_squared_error

from ppfl.core.errors import DataError, PPFLError, SettingError
from ppfl.data.encoded_column import OTHER, EncodedColumn
from ppfl.glm import PopulationRegressor
from ppfl.glm.table.encoding import Encoding, choose_features
from ppfl.glm.table.fit_table import TableFit, fit_table
from ppfl.glm.table.local_models import MODELS, LocalModels
from ppfl.glm.table.number_cells import BadCells
from ppfl.glm.table.prepare import prepare_table
from ppfl.glm.table.table_settings import TableSettings
from ppfl.glm.table.target import FAMILIES, Target


def make_shops(seed: int = 0) -> pd.DataFrame:
    """Twelve shops of two kinds, with opposite effects of the price."""
    random = np.random.default_rng(seed)
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
SMALL = {"ks": (2,), "n_init": 2, "columns": ("price", "day")}


@cache
def fitted(family: str, **more: object) -> TableFit:
    return fit_table(make_shops(), TableSettings("shop", TARGETS[family], family, **{**SMALL, **more}))


# ---------------------------------------------------------------------- columns


def test_useless_columns_are_left_out_unless_they_are_named() -> None:
    shops = make_shops().assign(rownames=lambda t: t["row"] * 7 % 1000, one="x", name=[f"n{i}" for i in range(120)])
    found = choose_features(
        shops[["row", "rownames", "shop", "sold", "price", "day", "one", "name"]], ["shop", "sold"], None
    )
    assert found.names == ("price", "day")
    assert found.left_out == {"row": "row numbers", "rownames": "row numbers", "one": "one value", "name": "120 levels"}
    assert choose_features(shops, ["shop", "sold"], ["row", "one"]).names == ("row", "one")


def test_text_is_encoded_like_pandas_dummies() -> None:
    shops = make_shops()
    encoding = Encoding.of(shops, ["price", "day"])
    assert encoding.terms == ["price", "day = tu", "day = we"]
    wanted = pd.get_dummies(shops[["price", "day"]], drop_first=True, dtype=float)
    np.testing.assert_array_equal(encoding.encode(shops), wanted.to_numpy())


def test_rare_and_unseen_levels_are_merged() -> None:
    seen = pd.Series(["b"] * 9 + ["a"] * 9 + ["c", "d"])
    column = EncodedColumn.of("x", seen)
    assert column.levels == ("a", "b", OTHER)
    assert column.rare == ("c", "d")
    np.testing.assert_array_equal(column.encode(pd.Series(["a", "b", "c", "never"])), [[0, 0], [1, 0], [0, 1], [0, 1]])
    frequent = EncodedColumn.of("x", seen[:18])
    np.testing.assert_array_equal(frequent.encode(pd.Series(["b", "never"])), [[1], [0]])


def test_levels_are_kept_if_all_are_rare() -> None:
    assert EncodedColumn.of("x", pd.Series(["a", "b", "c"])).levels == ("a", "b", "c")


def test_a_shared_column_shares_all_its_levels() -> None:
    encoding = Encoding.of(make_shops(), ["price", "day"])
    assert encoding.shared(["day", "intercept"]) == [1, 2, "intercept"]
    assert encoding.shared(["all"]) == "all"
    assert encoding.shared([]) is None
    with pytest.raises(DataError, match="'colour'.*'price', 'day'"):
        encoding.shared(["colour"])


# ---------------------------------------------------------------------- target


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
def test_the_family_is_guessed_with_a_reason(values: object, family: str, classes: tuple[str, ...]) -> None:
    found = Target.of("y", pd.Series(values), None)
    assert (found.family, found.classes) == (family, classes)
    assert found.reason
    assert not Target.of("y", pd.Series(values), family).reason


@pytest.mark.parametrize("family", TARGETS)
def test_scores_agree_with_scikit_learn(family: str) -> None:
    target = Target.of("y", make_shops()[TARGETS[family]], family)
    rows = np.arange(120) % 3 == 0
    random, y = np.random.default_rng(0), target.values[np.arange(120) % 3 == 0]
    if target.classes:
        mean = random.dirichlet(np.ones(len(target.classes)), len(y))
        wanted = {"deviance": 2 * log_loss(y, mean), "accuracy": (mean.argmax(1) == y).mean()}
    else:
        mean = random.uniform(0.5, 2, len(y))
        of_family = {"gaussian": mean_squared_error, "gamma": mean_gamma_deviance}
        deviance = of_family.get(family.removeprefix("heteroscedastic "), mean_poisson_deviance)
        wanted = {"deviance": deviance(y, mean)}
        if family.endswith("gaussian"):
            wanted = {"rmse": wanted["deviance"] ** 0.5}
    assert target.figures(mean, rows) == pytest.approx(wanted)


# ---------------------------------------------------------------------- rows


def test_rows_are_held_out_of_every_client() -> None:
    table = prepare_table(make_shops(), TableSettings("shop", "sold"))
    assert pd.Series(table.is_test).groupby(table.clients).sum().tolist() == [2] * 12


def test_every_class_stays_in_the_training_rows() -> None:
    shops = make_shops()
    for alone in range(20):
        shops["kind"] = np.where(np.arange(120) == alone, "rare", shops["open"])
        table = prepare_table(shops, TableSettings("shop", "kind"))
        assert set(table.target.values[~table.is_test]) == {0, 1, 2}


def test_incomplete_rows_are_left_out_and_counted() -> None:
    shops = make_shops()
    shops.loc[3, "price"] = np.nan
    shops.loc[7, "day"] = None
    table = prepare_table(shops, TableSettings("shop", "sold", columns=("price", "day")))
    assert (len(table.frame), table.incomplete, table.lost) == (118, 2, ())


def test_a_client_without_a_complete_row_is_named() -> None:
    shops = make_shops()
    shops.loc[shops["shop"] == 4, "price"] = np.nan
    assert prepare_table(shops, TableSettings("shop", "sold")).lost == ("4",)
    assert prepare_table(shops, TableSettings(formula="sold ~ price + (1 | shop)")).lost == ("4",)


@pytest.mark.parametrize("column", ["price", "sold"])
def test_a_bad_cell_is_missing_and_its_column_stays_numeric(column: str) -> None:
    shops = make_shops()
    clean = shops.drop(index=16)
    shops[column] = shops[column].astype(str)
    shops.loc[16, column] = "n/a?"
    settings = TableSettings("shop", "sold", columns=("price", "day"))
    table = prepare_table(shops, settings)
    assert table.bad_cells == [BadCells(column, 1, "n/a?", 17)]
    assert table.incomplete == 1
    assert table.target.family == "gaussian"
    wanted = prepare_table(clean, settings)
    np.testing.assert_allclose(table.encoding.encode(table.frame), wanted.encoding.encode(wanted.frame))
    by_formula = prepare_table(shops, TableSettings(formula="sold ~ price + day + (1 | shop)"))
    assert by_formula.bad_cells == table.bad_cells


def test_text_with_some_numbers_stays_text() -> None:
    shops = make_shops().assign(code=["a1", "7", "8", "9"] * 30)
    assert not prepare_table(shops, TableSettings("shop", "sold", columns=("code",))).bad_cells


def test_numbers_with_decimal_commas_are_recognised() -> None:
    shops = make_shops()
    shops["price"] = [f"{price:.3f}".replace(".", ",") for price in shops["price"]]
    assert prepare_table(shops, TableSettings("shop", "sold")).left_out["price"] == "numbers with a decimal comma"


@pytest.mark.parametrize("family", [None, "gaussian", "poisson", "bernoulli"])
def test_a_constant_target_is_refused(family: str | None) -> None:
    with pytest.raises(DataError, match="target 'sold' is 2.5 in every row"):
        prepare_table(make_shops().assign(sold=2.5), TableSettings("shop", "sold", family))


# ---------------------------------------------------------------------- fits


@pytest.mark.parametrize("family", TARGETS)
def test_results_agree_with_the_estimator(family: str) -> None:
    found = fitted(family)
    shops = make_shops()
    x = Encoding.of(shops, ["price", "day"]).encode(shops)
    target = found.table.target
    assert found.ids == sorted(map(str, range(12)))
    np.testing.assert_allclose(found.memberships, np.asarray(found.model.memberships_))
    average = np.tile(x.mean(0), (1, 1))
    pooled = found.settings.pooled(target).fit(x, target.values)
    means = pooled.predict_proba(average)[0] if target.classes else pooled.predict(average)
    shown = means[1:] if family == "bernoulli" else means
    assert [term.pooled for term in found.terms.average] == pytest.approx(shown.tolist())
    if family != "multinomial":
        slopes = np.array([term.values for term in found.terms.coefficients])
        np.testing.assert_allclose(slopes[0], found.model.canonical_intercept_)
        np.testing.assert_allclose(slopes[1:].T, found.model.canonical_coef_)


def test_coefficients_of_classes_predict_like_the_model() -> None:
    found = fitted("multinomial", test_fraction=0.0)
    shops = make_shops()
    x = Encoding.of(shops, ["price", "day"]).encode(shops)
    lines = np.array([term.pooled for term in found.terms.coefficients]).reshape(3, -1)  # (classes, 1 + d)
    predictor = lines[:, 0] + x @ lines[:, 1:].T
    odds = np.exp(predictor) / np.exp(predictor).sum(1, keepdims=True)
    pooled = found.settings.pooled(found.table.target).fit(x, found.table.target.values)
    np.testing.assert_allclose(odds, pooled.predict_proba(x), atol=1e-8)


def test_two_kinds_of_shops_are_found_and_improve_predictions() -> None:
    found = fitted("gaussian", ks=(1, 2))
    assert found.best.k == 2
    kinds = np.array(found.memberships).argmax(1)
    assert len({(int(client) % 2, kind) for client, kind in zip(found.ids, kinds, strict=True)}) == 2
    ours, pooled, own = (score.figures["rmse"] for score in found.scores)
    assert ours < pooled
    assert own < pooled
    assert sum(found.clear) + found.mixed == 12


def test_one_canonical_model_is_one_model_for_all() -> None:
    found = fitted("bernoulli", ks=(1,))
    ours, pooled, _ = found.scores
    assert ours.figures["deviance"] == pytest.approx(pooled.figures["deviance"], rel=1e-4)
    for term in found.terms.coefficients:
        assert term.values[0] == pytest.approx(term.pooled, abs=1e-4)


def test_shared_columns_are_equal_in_all_canonical_models() -> None:
    for term in fitted("gaussian", shared=("day",)).terms.coefficients:
        assert term.is_shared == term.name.startswith("day")
        assert (np.ptp(term.values) == 0) == term.is_shared


def test_a_formula_gives_what_its_columns_give() -> None:
    columns = fitted("gaussian", shared=("day",))
    formula = fit_table(make_shops(), TableSettings(formula="sold ~ price + day + (price | shop)", ks=(2,), n_init=2))
    assert formula.encoding.terms == ["day[T.tu]", "day[T.we]", "price"] or formula.encoding.terms[0] == "price"
    by_name = {term.name: term for term in formula.terms.coefficients}
    for term in columns.terms.coefficients:
        same = by_name[term.name.replace(" = ", "[T.") + "]" if " = " in term.name else term.name]
        assert same.values == pytest.approx(term.values)
        assert same.is_shared == term.is_shared
    assert [score.figures for score in formula.scores] == [pytest.approx(score.figures) for score in columns.scores]


def test_an_offset_of_a_formula_reaches_all_models() -> None:
    shops = make_shops().assign(hours=lambda t: 1.0 + t["row"] % 7)
    settings = TableSettings(formula="count ~ price + offset(log(hours)) + (price | shop)", ks=(2,), n_init=2)
    found = fit_table(shops, settings)
    assert found.table.target.family == "poisson"
    same = PopulationRegressor(2, family="poisson", n_init=2, random_state=0)
    same.fit(shops[["price"]], shops["count"], clients=shops["shop"].astype(str), offset=np.log(shops["hours"]))
    np.testing.assert_allclose(found.model.canonical_coef_, same.canonical_coef_)
    assert [score.label for score in found.scores] == ["2 canonical models", "one model for all"]


@pytest.mark.parametrize(
    "settings", [{"columns": ()}, {"target": "", "client": "", "formula": "sold ~ 1 + (1 | shop)"}]
)
def test_clients_may_differ_in_their_intercepts_alone(settings: dict[str, object]) -> None:
    shops = make_shops().assign(sold=lambda t: t["sold"] + 20 * (t["shop"] % 2))
    found = fit_table(shops, TableSettings(**{"client": "shop", "target": "sold", "ks": (2,), "n_init": 2, **settings}))
    assert [term.name for term in found.terms.coefficients] == ["intercept"]
    ours, pooled, own = (score.figures["rmse"] for score in found.scores)
    assert ours < pooled
    assert own < pooled


def test_the_held_out_likelihood_and_the_bic_choose_k() -> None:
    for choose in ("held_out", "prediction", "bic"):
        found = fitted("gaussian", ks=(1, 2), choose=choose)
        best = max(found.candidates, key=lambda each: (-each.bic if choose == "bic" else each.held_out) or 0.0)
        assert found.best == best


def test_records_of_k_are_in_the_units_of_the_target() -> None:
    found = fitted("gaussian", ks=(1, 2), choose="bic")
    for name in ("log_likelihood", "aic", "bic"):
        assert getattr(found.best, name) == pytest.approx(getattr(found.model, f"{name}_"))
    plain = fitted("gaussian", ks=(1, 2))
    large = fit_table(make_shops().assign(sold=lambda t: 1000 * t["sold"]), TableSettings(**vars(plain.settings)))
    for before, after in zip(plain.candidates, large.candidates, strict=True):
        assert after.held_out == pytest.approx(before.held_out - np.log(1000), abs=1e-3)


def test_the_same_seed_gives_the_same_fit() -> None:
    settings = TableSettings("shop", "sold", **SMALL)
    first, again = (fit_table(make_shops(), settings) for _ in range(2))
    assert first.memberships == again.memberships
    assert first.terms == again.terms
    assert [score.figures for score in first.scores] == [score.figures for score in again.scores]


def test_steps_are_reported_when_they_begin() -> None:
    steps: list[tuple[str, int, int]] = []
    settings = TableSettings("shop", "sold", ks=(1,), columns=("price",))
    fit_table(make_shops(), settings, lambda *step: steps.append(step))
    names = ["k = 1", "one model for all", "held-out rows", "a model for each client"]
    assert steps == [(name, number, 4) for number, name in enumerate(names, 1)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"client": "who"}, "no column 'who'; the table has 'row', 'shop'"),
        ({"columns": ("price", "colour")}, "no column 'colour'"),
        ({"columns": ("price", "sold")}, "'sold' is the client or the target"),
        ({"client": "sold"}, "both client and target"),
        ({"family": "normal"}, "no family 'normal'"),
        ({"target": "day", "family": "gaussian"}, "holds text .*bernoulli or multinomial"),
        ({"target": "size", "family": "bernoulli"}, "3 classes .*multinomial"),
        ({"family": "poisson"}, "needs counts"),
        ({"ks": (99,)}, "k is 99 but there are 12 clients"),
        ({"affinity": "features"}, "penalty is 0"),
        ({"test_fraction": 1.5}, "fraction is 1.5"),
        ({"shared": ("colour",)}, "shared names 'colour'"),
        ({"mix": "outputs"}, "mix is 'outputs'"),
    ],
)
def test_bad_settings_say_what_to_do(settings: dict[str, object], message: str) -> None:
    wanted = {"client": "shop", "target": "sold", "ks": (1,), "columns": ("price",)}
    with pytest.raises(PPFLError, match=message):
        fit_table(make_shops(), TableSettings(**{**wanted, **settings}))


def test_infinite_values_and_empty_tables_are_refused() -> None:
    shops = make_shops()
    shops.loc[0, "price"] = np.inf
    with pytest.raises(DataError, match="'price' has infinite"):
        prepare_table(shops, TableSettings("shop", "sold"))
    with pytest.raises(DataError, match="none of 120 rows"):
        prepare_table(shops.assign(price=np.nan), TableSettings("shop", "sold", columns=("price",)))
    with pytest.raises(SettingError, match="no number of canonical models"):
        TableSettings("shop", "sold", ks=())


# ---------------------------------------------------------------------- a model for each client


@pytest.mark.parametrize("family", MODELS)
def test_every_client_has_a_finite_model(family: str) -> None:
    shops = make_shops()
    target = Target.of("y", shops[TARGETS[family]], family)
    alone = np.where(np.arange(120) < 1, "one row", shops["shop"].astype(str))
    y = target.values.copy()
    y[alone == "3"] = y[0] if family == "gamma" else 0  # only one class, or only zeros
    x = shops[["price"]].to_numpy()
    mean = LocalModels(family, x, y, alone, noise=1.0).predict(x, alone)
    figures = target._replace(values=y).figures(mean, np.arange(120))
    assert np.isfinite(list(figures.values())).all()
    if target.classes:
        np.testing.assert_allclose(mean.sum(1), 1)
        assert mean.min() > 0


def test_a_client_with_many_rows_is_hardly_regularized() -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(4000, 1))
    clients = np.repeat(["a", "b"], 2000)
    slope = np.where(clients == "a", 2.0, -2.0)
    y = (slope * x[:, 0] + random.logistic(size=4000) > 0).astype(int)
    found = LocalModels("bernoulli", x, y, clients, noise=1.0).predict(x, clients)
    for client in "ab":
        rows = clients == client
        alone = LogisticRegression(C=np.inf).fit(x[rows], y[rows]).predict_proba(x[rows])
        np.testing.assert_allclose(found[rows], alone, atol=0.01)
