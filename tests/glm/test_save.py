"""A saved model predicts and onboards as before; damaged and foreign files are refused; a run over sites is a fit."""

import copy
import json
import pickle
import re
import tomllib
import warnings
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import tomli_w
import torch
from safetensors.torch import save_file

import ppfl
from kit.experiments import call_ppfl
from kit.refusals import CheckpointError, PPFLError, SettingError, assert_refused
from kit.sites import SITES, Sites
from kit.tables import HETEROSCEDASTIC, fitted, fitted_choice, make_choice_table, make_client_table, regressor
from ppfl.glm import NEW, PopulationClassifier, PopulationRegressor, estimator_from_run, load
from ppfl.glm.inference.compact_weights import compress, expand
from ppfl.glm.inference.data_trees import TreeReader
from ppfl.runs import Experiment, load_experiment, run

TABLE = make_client_table()
GIVEN = {"clients": TABLE.clients}


# ---------------------------------------------------------------------- saved models


MODELS = {
    "heteroscedastic": (HETEROSCEDASTIC, {}),
    "shared": ("poisson", {"shared": ("x1",)}),
    "predictions": ("gamma", {"mix": "predictions"}),
    "three classes": ("multinomial", {}),
    "points": ("gaussian", {"solver": "profile"}),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_loaded_model_is_the_saved_one(name, tmp_path):
    family, settings = MODELS[name]
    model, y = fitted(family, **settings), TABLE.target(family)
    again = load(model.save(tmp_path / "model.safetensors"))
    assert again.get_params() == model.get_params()
    predict = "predict" if hasattr(model, "family") else "predict_proba"
    for ids in (TABLE.clients, NEW):
        found = [getattr(each, predict)(TABLE.x, ids) for each in (model, again)]
        np.testing.assert_allclose(*found, rtol=1e-6, atol=1e-6)
    pd.testing.assert_frame_equal(again.memberships_, model.memberships_, atol=1e-7)
    assert str(again.summary()) == str(model.summary())
    assert again.score(TABLE.x, y, **GIVEN) == pytest.approx(model.score(TABLE.x, y, **GIVEN))
    model = copy.deepcopy(model)
    for each in (model, again):
        each.onboard(TABLE.x, y, TABLE.clients + 100)
    np.testing.assert_allclose(again.memberships_, model.memberships_, atol=1e-6)
    if family == HETEROSCEDASTIC:
        np.testing.assert_allclose(again.client_dispersion_, model.client_dispersion_, rtol=1e-5)
    third = load(again.save(tmp_path / "again.safetensors"))
    np.testing.assert_allclose(third.memberships_, model.memberships_, atol=1e-6)


def test_intervals_survive(tmp_path):
    model, again = fitted(), load(fitted().save(tmp_path / "model.safetensors"))
    pd.testing.assert_frame_equal(again.conf_int(), model.conf_int())
    np.testing.assert_allclose(again.membership_intervals(), model.membership_intervals(), atol=0.01)
    frames = [m.predict(TABLE.x, TABLE.clients, interval=0.9) for m in (model, again)]
    np.testing.assert_allclose(*frames, atol=0.05)


def test_choices_and_names_of_columns_and_clients_are_saved_too(tmp_path):
    x, y, *rest = make_choice_table()
    situations, clients = rest
    again = load(fitted_choice().save(tmp_path / "choice"))
    np.testing.assert_allclose(again.predict_proba(x, *rest), fitted_choice().predict_proba(x, *rest), atol=1e-6)
    new = again.onboard(x, y, situations, clients + 100)  # with the data of known clients
    np.testing.assert_allclose(new, again.memberships_.loc[:11], atol=1e-3)
    frame, shops = pd.DataFrame({"price": TABLE.x[:, 0], "size": TABLE.x[:, 1], "one": 1.0}), TABLE.clients.astype(str)
    model = regressor().fit(frame, TABLE.y, clients=shops)
    again = load(model.save(tmp_path / "model"))
    np.testing.assert_allclose(again.predict(frame, shops), model.predict(frame, shops))
    with pytest.raises(ValueError, match="feature names"):
        again.predict(frame.rename(columns={"price": "cost"}), shops)


def test_weights_take_less_than_three_bytes_and_keep_their_moments():
    """Against weights that cover many orders of magnitude, as those of clients with many rows do."""
    memberships = fitted("gaussian", 40, 5, k=3)._result.memberships
    compact = compress(memberships)
    found = expand(compact, memberships)
    assert compact.content.numel() < 3 * found.numel()
    large = memberships.weights > 1e-6
    np.testing.assert_allclose(found[large], memberships.weights[large], rtol=1e-4)
    points = memberships.points(torch.arange(40)).mT
    for power in (1, 2):
        before, after = ((points**power * each[:, None]).sum(2) for each in (memberships.weights, found))
        np.testing.assert_allclose(after, before, atol=1e-12)


def test_pickles_hold_no_rows_of_the_fit():
    small, large = (pickle.dumps(fitted(rows=rows)) for rows in (10, 400))
    assert len(large) < len(small) + 20_000
    assert_refused(pickle.loads(small).conf_int, SettingError, "rows of the fit", "save")


def test_settings_that_a_file_cannot_hold_are_named(tmp_path):
    affinity = pd.DataFrame(np.ones((12, 12)))
    model = regressor(solver="profile", penalty=0.01, affinity=affinity, random_state=np.random.RandomState(0))
    model.fit(TABLE.x, TABLE.y, **GIVEN)
    with pytest.warns(UserWarning, match="random_state is a RandomState, which the file does not hold"):
        again = load(model.save(tmp_path / "model"))
    pd.testing.assert_frame_equal(again.affinity, affinity)
    assert again.random_state is None


def test_damaged_and_foreign_files_are_refused(tmp_path):
    path = fitted().save(tmp_path / "model")
    content = path.read_bytes()
    for at in (len(content) // 2, len(content) - 1):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        assert_refused(lambda: load(path), CheckpointError, "model", "damaged")
    path.write_bytes(content[: len(content) // 2])
    assert_refused(lambda: load(path), CheckpointError, "cannot be read")
    path.write_bytes(pickle.dumps(fitted()))
    assert_refused(lambda: load(path), CheckpointError, "cannot be read")
    save_file({"x": torch.zeros(2)}, path, {"ppfl": f"00000000 {json.dumps({'format': 'ppfl fitted population'})}"})
    assert_refused(lambda: load(path), CheckpointError, "'ppfl fitted population'", "no population GLM")
    assert_refused(lambda: load(tmp_path / "nothing"), CheckpointError, "there is no file")
    assert_refused(lambda: fitted().save(tmp_path / "nowhere" / "model"), CheckpointError, "no folder")
    assert_refused(lambda: fitted().save(tmp_path), CheckpointError, "is a folder")


def test_a_file_cannot_name_other_classes():
    for name in ("os.system", "inference.data_trees.sys", "estimator.BaseEstimator"):
        with pytest.raises(KeyError):
            TreeReader({}).read({"class": name, "fields": {}})


# ---------------------------------------------------------------------- estimators of runs


DATA = {"name": "csv", "file": "table.csv", "client": "client", "target": "y", "test_fraction": 0.0}
CASES = {
    "gaussian": {"kind": "regressor", "shared": ["ward = west"], "penalty": 0.01},
    "poisson": {"kind": "regressor", "family": "poisson", "mix": "predictions"},
    "two classes": {"kind": "classifier"},
    "three classes": {"kind": "classifier", "mix": "predictions"},
}


def make_frame(case: str) -> pd.DataFrame:
    """Clients of two kinds, in columns of different units."""
    random, rows = np.random.default_rng(3), 120
    client = np.arange(rows) % 12
    frame = pd.DataFrame({"client": [f"c{i}" for i in client], "age": random.normal(50, 10, rows)})
    frame["dose"] = random.normal(0.2, 0.05, rows)
    eta = np.where(client % 2, 1.5, -1.5) * (frame.age - 50) / 10 + 0.5 * (frame.dose - 0.2) / 0.05
    if case == "gaussian":
        frame["ward"] = np.where(np.arange(rows) % 3, "east", "west")
        frame["y"] = 2000 + 30 * (eta + random.normal(size=rows))
    elif case == "poisson":
        frame["y"] = random.poisson(np.exp(0.3 * eta)).astype(float)
    else:
        noise = random.gumbel(size=(rows, 3))
        scores = np.c_[eta, -eta, 0 * eta if case == "three classes" else 0 * eta - 99] + noise
        frame["y"] = np.array(["a", "b", "c"])[scores.argmax(1)]
    return frame


def make_experiment(case: str, **more) -> Experiment:
    task = {"task": "regression"} if case == "poisson" else {}
    estimator = {"k": 2, **CASES[case], **more}
    values = {"name": "glm", "rounds": 3, "seeds": [4], "data": {**DATA, **task}, "estimator": estimator}
    return Experiment.model_validate(values)


def encoded(frame: pd.DataFrame) -> pd.DataFrame:
    """The columns that a run prepares."""
    x = frame[["age", "dose"]]
    return x.assign(**{"ward = west": (frame.ward == "west").astype(float)}) if "ward" in frame else x


def fit_in_one_process(case: str, frame: pd.DataFrame):
    settings = {**CASES[case]}
    make = PopulationClassifier if settings.pop("kind") == "classifier" else PopulationRegressor
    model = make(k=2, solver="federated", max_iter=3, random_state=4, **settings)
    return model.fit(encoded(frame), frame["y"], clients=frame["client"])


@pytest.fixture(autouse=True)
def without_convergence_warnings():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the fit stopped")
        yield


@pytest.mark.parametrize("case", CASES)
def test_a_fit_over_three_sites_is_that_of_the_federated_solver(case, tmp_path):
    frame = make_frame(case)
    for name in SITES:
        (tmp_path / "sites" / name).mkdir(parents=True)
        frame.to_csv(tmp_path / "sites" / name / "table.csv", index=False)
    record = Sites(make_experiment(case), tmp_path).run()
    there, here = estimator_from_run(record.folder), fit_in_one_process(case, frame)
    scale = np.abs(here.canonical_coef_).max()
    np.testing.assert_allclose(there.canonical_coef_ / scale, here.canonical_coef_ / scale, atol=1e-5)
    np.testing.assert_allclose(there.canonical_intercept_, here.canonical_intercept_, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(there.memberships_.loc[here.clients_], here.memberships_, atol=1e-5)
    figures = [(each.log_likelihood_, each.aic_, each.bic_) for each in (there, here)]
    assert figures[0] == pytest.approx(figures[1], rel=1e-5)
    assert str(there.summary()) == str(here.summary())
    means = [getattr(m, "predict_proba", m.predict)(encoded(frame), clients=frame["client"]) for m in (there, here)]
    np.testing.assert_allclose(*means, rtol=1e-4, atol=1e-5)


def test_a_run_in_one_process_prints_its_estimator_and_saves_it(tmp_path, capsys):
    frame = make_frame("gaussian")
    frame.to_csv(tmp_path / "table.csv", index=False)
    parts = {"rounds", "seeds", "data", "estimator"}
    asked = make_experiment("gaussian").model_dump(mode="json", include=parts, exclude_unset=True)
    (tmp_path / "glm.toml").write_text(tomli_w.dumps(asked))
    done = call_ppfl(capsys, "run", tmp_path / "glm.toml", "--out", tmp_path / "out")
    assert done.code == 0, done.err
    here, (file,) = fit_in_one_process("gaussian", frame), (tmp_path / "out").rglob("estimator-seed-4.safetensors")
    assert "Coefficients of the canonical models" in done.out + done.err
    loaded, mine, new = load(file), frame[frame.client == "c3"], frame.assign(client="new")
    onboarded = [model.onboard(encoded(new), new["y"], new["client"]) for model in (loaded, here)]
    np.testing.assert_allclose(*onboarded, atol=1e-4)
    (result,) = (folder for folder in (tmp_path / "out").rglob("seed-4") if folder.is_dir())
    predicted = ppfl.load(result).predict("c3", mine)
    np.testing.assert_allclose(predicted.ravel(), here.predict(encoded(mine), clients=mine.client), rtol=1e-5)


def test_an_estimator_that_does_not_suit_the_data_is_refused(tmp_path):
    make_frame("gaussian").to_csv(tmp_path / "table.csv", index=False)
    for changes, *words in (
        ({"kind": "classifier", "shared": []}, "targets are numbers", "kind"),
        ({"shared": ["weight"]}, "'weight'"),
    ):
        experiment = make_experiment("gaussian", **changes)
        call = partial(run, experiment, tmp_path / "out", base=tmp_path)
        assert_refused(call, PPFLError, *words)


def test_a_wrong_estimator_of_a_file_is_named(tmp_path):
    file = tmp_path / "wrong.toml"
    for lines, *words in (
        ('kind = "classifier"\n[model]\nname = "linear"', "[estimator]", "[model]"),
        ("k = 2", "estimator.kind"),
        ('kind = "regressor"\nks = 2', "estimator.ks"),
        ('kind = "classifier"\nfamily = "poisson"', "leave family out"),
        ('kind = "regressor"\nshared = ["intercept"]', "intercept varies"),
    ):
        file.write_text(f'rounds = 2\n[data]\nname = "digits"\n[estimator]\n{lines}\n')
        assert_refused(lambda: load_experiment(file), SettingError, *words)


def test_the_example_of_the_guide_is_an_experiment():
    text = (Path(__file__).parents[2] / "docs" / "federation.md").read_text()
    (example,) = [block for block in re.findall(r"```toml\n(.*?)```", text, flags=re.DOTALL) if "[estimator]" in block]
    experiment = Experiment.model_validate(tomllib.loads(example))
    assert experiment.estimator is not None and experiment.preparation.missing == "drop"


def test_a_run_without_an_estimator_says_so(tmp_path):
    experiment = {"name": "net", "rounds": 1, "data": {"name": "digits"}, "model": {"name": "linear"},
                  "algorithm": {"name": "fedavg", "lr": 0.1}}  # fmt: skip
    (record,) = run(Experiment.model_validate(experiment), tmp_path)
    assert_refused(lambda: estimator_from_run(record.folder), CheckpointError, "[estimator]", "ppfl.load")
