"""A population GLM over sites is the fit of the federated solver in one process."""

import re
import tomllib
import warnings
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from federation.test_federated_run import SITES
from kit.sites import FakeCarrier, FakeClock, make_services
from ppfl import load as load_run_folder
from ppfl.cli.estimator_output import show_estimators
from ppfl.core.errors import CheckpointError, SettingError
from ppfl.federation.federated_run import run_federated
from ppfl.glm import PopulationClassifier, PopulationRegressor, estimator_from_run, load
from ppfl.runs import load_experiment, run
from ppfl.runs.experiment import Experiment

ROUNDS = 5
DATA = {"name": "csv", "file": "table.csv", "client": "client", "target": "y", "test_fraction": 0.0}


def make_frame(kind: str) -> pd.DataFrame:
    """Clients of two kinds, in columns of different units."""
    random = np.random.default_rng(3)
    rows = 240
    client = np.arange(rows) % 12
    frame = pd.DataFrame({"client": [f"c{i}" for i in client], "age": random.normal(50, 10, rows),
                          "dose": random.normal(0.2, 0.05, rows)})  # fmt: skip
    slope = np.where(client % 2, 1.5, -1.5)
    eta = slope * (frame.age - 50) / 10 + 0.5 * (frame.dose - 0.2) / 0.05
    if kind == "gaussian":
        frame["y"] = 2000 + 30 * (eta + random.normal(size=rows))
    elif kind == "poisson":
        frame["y"] = random.poisson(np.exp(0.3 * eta)).astype(float)
    elif kind == "two classes":
        frame["y"] = np.where(eta + random.logistic(size=rows) > 0, "yes", "no")
    else:
        frame["y"] = np.array(["a", "b", "c"])[np.argmax(np.c_[eta, -eta, 0 * eta] + random.gumbel(size=(rows, 3)), 1)]
    return frame


CASES = {
    "gaussian": {"kind": "regressor"},
    "gaussian, shared and penalised": {"kind": "regressor", "shared": ["dose"], "penalty": 0.01},
    "poisson": {"kind": "regressor", "family": "poisson", "mix": "predictions"},
    "two classes": {"kind": "classifier"},
    "three classes": {"kind": "classifier", "mix": "predictions"},
}


def make_experiment(case: str, **more) -> Experiment:
    task = {"task": "regression"} if case == "poisson" else {}
    return Experiment.model_validate(
        {"name": "glm", "rounds": ROUNDS, "seeds": [4], "data": {**DATA, **task},
         "estimator": {**CASES[case], "k": 2}, **more}
    )  # fmt: skip


def fit_in_one_process(case: str, frame: pd.DataFrame):
    settings = {name: value for name, value in CASES[case].items() if name != "kind"}
    make = PopulationClassifier if CASES[case]["kind"] == "classifier" else PopulationRegressor
    model = make(k=2, solver="federated", max_iter=ROUNDS, random_state=4, **settings)
    return model.fit(frame[["age", "dose"]], frame["y"], clients=frame["client"])


def fit_over_sites(experiment: Experiment, folder, frame: pd.DataFrame):
    for name in SITES:
        (folder / "sites" / name).mkdir(parents=True)
        frame.to_csv(folder / "sites" / name / "table.csv", index=False)
    clock = FakeClock()
    carrier = FakeCarrier(make_services(folder / "sites", SITES, experiment.model_dump(mode="json")["data"]), clock)
    options = {"sites": SITES, "now": clock.now, "sleep": clock.sleep}
    (record,) = run_federated(experiment, folder / "out", carrier, **options)
    return record


@pytest.fixture(autouse=True)
def without_convergence_warnings():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="the fit stopped")
        yield


@pytest.mark.parametrize("case", CASES)
def test_a_fit_over_three_sites_is_that_of_the_federated_solver(case, tmp_path):
    frame = make_frame(case.split(",")[0])
    record = fit_over_sites(make_experiment(case), tmp_path, frame)
    there, here = estimator_from_run(record.folder), fit_in_one_process(case, frame)
    scale = np.abs(here.canonical_coef_).max()
    np.testing.assert_allclose(there.canonical_coef_ / scale, here.canonical_coef_ / scale, atol=1e-5)
    np.testing.assert_allclose(there.canonical_intercept_, here.canonical_intercept_, rtol=1e-5, atol=1e-5)
    memberships = there.memberships_.loc[here.clients_]
    np.testing.assert_allclose(memberships, here.memberships_, atol=1e-5)
    assert there.log_likelihood_ == pytest.approx(here.log_likelihood_, rel=1e-5)
    assert (there.aic_, there.bic_) == pytest.approx((here.aic_, here.bic_), rel=1e-5)
    assert str(there.summary()) == str(here.summary())
    x = frame[["age", "dose"]]
    np.testing.assert_allclose(
        *(getattr(model, "predict_proba", model.predict)(x, clients=frame["client"]) for model in (there, here)),
        rtol=1e-4, atol=1e-5,
    )  # fmt: skip


def test_an_experiment_in_one_process_gives_the_same_estimator_and_it_can_be_saved(tmp_path, capsys):
    frame = make_frame("gaussian")
    frame.to_csv(tmp_path / "table.csv", index=False)
    (record,) = run(make_experiment("gaussian"), tmp_path / "out", base=tmp_path)
    here, again = fit_in_one_process("gaussian", frame), estimator_from_run(record.folder)
    assert str(again.summary()) == str(here.summary())
    mine = frame[frame.client == "c3"]
    predicted = load_run_folder(record.folder).predict("c3", mine)
    np.testing.assert_allclose(predicted.ravel(), here.predict(mine[["age", "dose"]], clients=mine.client), rtol=1e-5)
    show_estimators([record], tmp_path, quiet=False)
    assert "Coefficients of the canonical models\n" in capsys.readouterr().out
    loaded = load(tmp_path / "estimator-seed-4.safetensors")
    new = frame.assign(client="new")
    onboarded = [model.onboard(new[["age", "dose"]], new["y"], new["client"]) for model in (loaded, here)]
    np.testing.assert_allclose(*onboarded, atol=1e-4)


def test_text_columns_are_encoded_and_can_be_shared(tmp_path):
    frame = make_frame("gaussian").assign(ward=lambda f: np.where(np.arange(len(f)) % 3, "east", "west"))
    experiment = make_experiment("gaussian", estimator={"kind": "regressor", "k": 2, "shared": ["ward = west"]})
    there = estimator_from_run(fit_over_sites(experiment, tmp_path, frame).folder)
    here = PopulationRegressor(k=2, solver="federated", max_iter=ROUNDS, random_state=4, shared=["ward = west"])
    coded = frame[["age", "dose"]].assign(**{"ward = west": (frame.ward == "west").astype(float)})
    here.fit(coded, frame["y"], clients=frame["client"])
    assert str(there.summary()) == str(here.summary())


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        ({"kind": "classifier"}, "is a classifier and the targets are numbers; change kind"),
        ({"kind": "regressor", "shared": ["weight"]}, "shared names 'weight', which is no prepared column"),
        ({"kind": "regressor", "shared": ["intercept"]}, "intercept varies"),
        ({"kind": "classifier", "family": "poisson"}, "leave family out"),
    ],
)
def test_what_does_not_fit_is_refused(estimator, message, tmp_path):
    make_frame("gaussian").to_csv(tmp_path / "table.csv", index=False)
    with pytest.raises(ValueError, match=message):
        run(make_experiment("gaussian", estimator=estimator), tmp_path / "out", base=tmp_path)


def test_a_file_has_an_estimator_or_a_model(tmp_path):
    file = tmp_path / "both.toml"
    file.write_text('rounds = 2\n[data]\nname = "digits"\n[estimator]\nkind = "classifier"\n[model]\nname = "linear"\n')
    with pytest.raises(SettingError, match=r"\[estimator\] and \[model\]"):
        load_experiment(file)


@pytest.mark.parametrize(
    ("line", "message"), [("k = 2", "estimator.kind"), ('kind = "regressor"\nks = 2', "estimator.ks")]
)
def test_a_wrong_key_is_named_in_its_table(line, message, tmp_path):
    file = tmp_path / "wrong.toml"
    file.write_text(f'rounds = 2\n[data]\nname = "digits"\n[estimator]\n{line}\n')
    with pytest.raises(SettingError, match=message):
        load_experiment(file)


def test_the_example_of_the_guide_is_an_experiment():
    text = (Path(__file__).parents[2] / "docs" / "federation.md").read_text()
    (example,) = [block for block in re.findall(r"```toml\n(.*?)```", text, flags=re.DOTALL) if "[estimator]" in block]
    experiment = Experiment.model_validate(tomllib.loads(example))
    assert experiment.estimator is not None and experiment.preparation.missing == "drop"


def test_a_run_without_an_estimator_says_so(tmp_path):
    experiment = {"name": "net", "rounds": 1, "data": {"name": "digits"}, "model": {"name": "linear"},
                  "algorithm": {"name": "fedavg", "lr": 0.1}}  # fmt: skip
    (record,) = run(Experiment.model_validate(experiment), tmp_path)
    with pytest.raises(CheckpointError, match=r"no \[estimator\].*ppfl.load"):
        estimator_from_run(record.folder)
