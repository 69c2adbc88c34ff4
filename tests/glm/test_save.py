"""A saved model predicts and onboards as before; damaged and foreign files are refused; a run over sites is a fit."""

import copy
import pickle

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
from kit.tables import fitted, fitted_choice, make_choice_table, make_client_table, regressor
from ppfl.glm import NEW, estimator_from_run, load
from ppfl.runs import Experiment, load_experiment, run

TABLE = make_client_table()
pytestmark = pytest.mark.filterwarnings("ignore:the fit stopped")


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("gaussian", {"residual": "full"}),
        ("multinomial", {"mix": "predictions", "shared": ("x1",)}),
        ("poisson", {"residual": "intercept"}),
    ],
)
def test_a_loaded_model_is_the_saved_one(family, settings, tmp_path):
    model, y = fitted(family, **settings), TABLE.target(family)
    again = load(model.save(tmp_path / "model.safetensors"))
    assert again.get_params() == model.get_params()
    predict = "predict" if hasattr(model, "family") else "predict_proba"
    for ids in (TABLE.clients, NEW):
        found = [getattr(each, predict)(TABLE.x, ids) for each in (model, again)]
        np.testing.assert_allclose(*found, rtol=1e-6, atol=1e-6)
    pd.testing.assert_frame_equal(again.memberships_, model.memberships_, rtol=0, atol=1e-6)
    assert str(again.summary()) == str(model.summary())
    if family == "gaussian":  # which has intervals of everything
        pd.testing.assert_frame_equal(again.conf_int(), model.conf_int())
        np.testing.assert_allclose(again.membership_intervals(), model.membership_intervals(), atol=0.01)
        found = [each.predict(TABLE.x, TABLE.clients, interval=0.9) for each in (model, again)]
        np.testing.assert_allclose(*found, atol=0.05)
    model = copy.deepcopy(model)
    for each in (model, again):
        each.onboard(TABLE.x, y, TABLE.clients + 100)
    third = load(again.save(tmp_path / "again.safetensors"))
    np.testing.assert_allclose(third.memberships_, model.memberships_, atol=1e-6)


def test_choices_and_names_of_columns_and_clients_are_saved_too(tmp_path):
    x, _, *rest = make_choice_table()
    again = load(fitted_choice().save(tmp_path / "choice"))
    np.testing.assert_allclose(again.predict_proba(x, *rest), fitted_choice().predict_proba(x, *rest), atol=1e-6)
    frame, shops = pd.DataFrame({"price": TABLE.x[:, 0], "size": TABLE.x[:, 1]}), TABLE.clients.astype(str)
    model = regressor().fit(frame, TABLE.y, clients=shops)
    again = load(model.save(tmp_path / "model"))
    np.testing.assert_allclose(again.predict(frame, shops), model.predict(frame, shops), atol=1e-6)
    with pytest.raises(ValueError, match="feature names"):
        again.predict(frame.rename(columns={"price": "cost"}), shops)


def test_pickles_hold_no_rows_of_the_fit():
    small, large = (pickle.dumps(fitted(rows=rows)) for rows in (10, 400))
    assert len(large) < len(small) + 20_000
    assert_refused(pickle.loads(small).conf_int, SettingError, "rows of the fit", "save")


def test_what_a_file_cannot_hold_is_named(tmp_path):
    model = regressor(random_state=np.random.RandomState(0)).fit(TABLE.x, TABLE.y, clients=TABLE.clients)
    with pytest.warns(UserWarning, match="random_state is a RandomState, which the file does not hold"):
        again = load(model.save(tmp_path / "model"))
    assert again.random_state is None


def test_damaged_and_foreign_files_are_refused(tmp_path):
    path = fitted().save(tmp_path / "model")
    content = path.read_bytes()
    for at in (len(content) // 2, len(content) - 1):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        assert_refused(lambda: load(path), CheckpointError, "model", "damaged")
    for other in (content[: len(content) // 2], pickle.dumps(fitted())):
        path.write_bytes(other)
        assert_refused(lambda: load(path), CheckpointError, "model", "damaged")
    save_file({"x": torch.zeros(2)}, path)
    assert_refused(lambda: load(path), CheckpointError, "was not written by ppfl")
    assert_refused(lambda: load(tmp_path / "nothing"), CheckpointError, "there is no file")


DATA = {"name": "csv", "file": "table.csv", "client": "client", "target": "y", "test_fraction": 0.0}
CLASSES = {"regressor": {}, "classifier": {"classes": ["a", "b", "c"]}}  # no value of the data leaves a site
CASES = {"regressor": {"shared": ["ward = west"], "penalty": 0.01}, "classifier": {"mix": "predictions"}}


def make_frame(case):
    random, client = np.random.default_rng(3), np.arange(120) % 12
    frame = pd.DataFrame({"client": [f"c{i}" for i in client], "age": random.normal(50, 10, 120)})
    frame["ward"] = np.where(np.arange(120) % 5 % 2, "east", "west")
    eta = np.where(client % 2, 1.5, -1.5) * (frame.age - 50) / 10
    if case == "regressor":
        return frame.assign(y=2000 + 30 * (eta + random.normal(size=120)))
    scores = np.c_[eta, -eta, 0 * eta] + random.gumbel(size=(120, 3))
    return frame.assign(y=np.array(["a", "b", "c"])[scores.argmax(1)])


def make_experiment(case, **more):
    estimator = {"k": 2, "kind": case, **CASES[case], **more}
    asked = {"name": "glm", "rounds": 3, "seeds": [4], "data": DATA | CLASSES[case], "estimator": estimator}
    return Experiment.model_validate({**asked, "preparation": {"levels": {"ward": ["east", "west"]}}})


def encoded(frame):
    return frame[["age"]].assign(**{"ward = west": (frame.ward == "west").astype(float)})


def fit_in_one_process(case, frame, place):
    frame.to_csv(place / "table.csv", index=False)
    (record,) = run(make_experiment(case), place / "here", base=place)
    return estimator_from_run(record.folder)


@pytest.mark.parametrize("case", CASES)
def test_a_fit_over_three_sites_is_that_of_one_process(case, tmp_path):
    frame = make_frame(case)
    for name in SITES:
        (tmp_path / "sites" / name).mkdir(parents=True)
        frame.to_csv(tmp_path / "sites" / name / "table.csv", index=False)
    record = Sites(make_experiment(case), tmp_path).run()
    there, here = estimator_from_run(record.folder), fit_in_one_process(case, frame, tmp_path)
    largest = np.abs(here.canonical_coef_).max()
    np.testing.assert_allclose(there.canonical_coef_, here.canonical_coef_, rtol=0, atol=1e-5 * largest)
    np.testing.assert_allclose(there.memberships_.loc[here.clients_], here.memberships_, atol=1e-5)
    assert there.log_likelihood_ == pytest.approx(here.log_likelihood_, rel=1e-5)
    means = [getattr(m, "predict_proba", m.predict)(encoded(frame), clients=frame["client"]) for m in (there, here)]
    np.testing.assert_allclose(*means, rtol=1e-4, atol=1e-5)


def test_a_run_in_one_process_prints_its_estimator_and_saves_it(tmp_path, capsys):
    frame = make_frame("regressor")
    frame.to_csv(tmp_path / "table.csv", index=False)
    parts = {"rounds", "seeds", "data", "estimator", "preparation"}
    asked = make_experiment("regressor").model_dump(mode="json", include=parts, exclude_unset=True)
    (tmp_path / "glm.toml").write_text(tomli_w.dumps(asked))
    done = call_ppfl(capsys, "run", tmp_path / "glm.toml", "--out", tmp_path / "out")
    assert "Coefficients of the canonical models" in done.out + done.err, done.err
    here, (file,) = (
        fit_in_one_process("regressor", frame, tmp_path),
        (tmp_path / "out").rglob("estimator-seed-4.safetensors"),
    )
    mine, new = frame[frame.client == "c3"], frame.assign(client="new")
    onboarded = [model.onboard(encoded(new), new["y"], new["client"]) for model in (load(file), here)]
    np.testing.assert_allclose(*onboarded, atol=1e-4)
    (result,) = (folder for folder in (tmp_path / "out").rglob("seed-4") if folder.is_dir())
    predicted = ppfl.load(result).predict("c3", mine)
    np.testing.assert_allclose(predicted.ravel(), here.predict(encoded(mine), clients=mine.client), rtol=1e-5)


def test_an_estimator_that_does_not_suit_its_experiment_is_refused(tmp_path):
    make_frame("regressor").to_csv(tmp_path / "table.csv", index=False)
    wrong = make_experiment("regressor", kind="classifier", shared=[])
    assert_refused(lambda: run(wrong, tmp_path / "out", base=tmp_path), PPFLError, "targets are numbers", "kind")
    file = tmp_path / "wrong.toml"
    file.write_text('rounds = 2\n[data]\nname = "digits"\n[estimator]\nkind = "classifier"\n[model]\nname = "linear"\n')
    assert_refused(lambda: load_experiment(file), SettingError, "[estimator]", "[model]")
    network = {"name": "net", "model": {"name": "linear"}, "method": {"name": "fedavg", "lr": 0.1}}
    (record,) = run(Experiment.model_validate({"rounds": 1, "data": {"name": "digits"}, **network}), tmp_path / "net")
    assert_refused(lambda: estimator_from_run(record.folder), CheckpointError, "[estimator]", "ppfl.load")
