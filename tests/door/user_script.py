"""A script as a user would write it, with every public feature. mypy --strict must accept it, and it must run.

`assert_type` says what a name must be, so that none of our types is `Any` by accident.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, assert_type

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import ppfl
from ppfl import PPFL, FedAvg, Federation, Fitted, Local, Population, PPFLError, Watch, affinity, fit
from ppfl.algorithms import METHODS, Ditto, FineTune, Method
from ppfl.callbacks import CSVLog, EarlyStopping, FitSetting
from ppfl.core import Loss, Params
from ppfl.data import Samples, digits_federation, iid
from ppfl.errors import SettingError
from ppfl.glm import MixedModel, PopulationClassifier, PopulationRegressor, mixed_model
from ppfl.server import Evaluation, Record


def make_federations() -> Federation:
    x, y, ids = torch.randn(60, 4), torch.arange(60) % 3, [f"client-{i % 5}" for i in range(60)]
    assert_type(Federation.from_arrays(x.numpy(), y.tolist(), clients=np.array(ids)), Federation)
    assert_type(digits_federation(), Federation)
    assert_type(Federation.from_arrays(x, y, iid(y, clients=5)).label_counts(), Tensor)
    federation = Federation.from_arrays(x, y, clients=ids, test_fraction=0.2, validation_fraction=0.2)
    assert_type(federation.client(federation.ids[0])["train"], Samples)
    assert_type(federation.select(["client-1", "client-0"]).to("cpu"), Federation)
    return federation


def train(federation: Federation) -> Fitted:
    population = Population(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 3)), canonical="1", k=2, mix="weights")
    assert_type(population.initial_network(), Params)
    assert_type(METHODS["fedavg"], type[Method])
    graph = affinity.from_graph([("client-0", "client-1"), ("client-1", "client-2", 0.5)], federation.ids)
    for method in (PPFL(lr=0.1, penalty=0.1, local_epochs=2, schedule="cosine"), FineTune(method=PPFL(lr=0.1))):
        assert_type(fit(population, federation, method, rounds=2, affinity=graph, seed=1), Fitted)
    for simple in (FedAvg(lr=0.1), Local(lr=0.1), Ditto(lr=0.1)):
        fit(Population(nn.Linear(4, 3), k=1), federation, simple, rounds=1, engine="loop")
    neighbours = affinity.from_labels(federation.label_counts(), federation.ids)
    watch = Watch(every=2, output="best", objective=True)
    return fit(population, federation, PPFL(lr=0.1), rounds=4, affinity=neighbours, watch=watch, progress=False)


def use(fitted: Fitted, federation: Federation) -> None:
    assert_type(fitted.memberships, Tensor)
    assert_type(fitted.predict("client-0", torch.randn(2, 4), hard=True), Tensor)
    assert_type(fitted.predict("client-0", np.zeros((2, 4))), NDArray[Any])
    assert_type(fitted.model("client-0"), nn.Module)
    assert_type(fitted.evaluate(federation, "validation").pooled, float)
    assert_type(fitted.history, list[Record])
    assert_type(fitted.update(federation), Fitted)
    newcomer = Federation.from_arrays(torch.randn(6, 4), [0, 1, 2] * 2, clients=["new"] * 6, classes=federation.classes)
    assert_type(fitted.onboard(newcomer), Fitted)
    with TemporaryDirectory() as folder:
        assert_type(fitted.save(Path(folder) / "fit.safetensors"), Path)
        assert_type(ppfl.load(Path(folder) / "fit.safetensors"), Fitted)
    assert_type(fit(fitted.population, federation, rounds=1, start=fitted), Fitted)


class Printer:
    def begin(self, setting: FitSetting) -> None:
        print(setting.problem.n_clients, "clients")

    def __call__(self, record: Record) -> bool:
        return float(record["loss"]) < 1e-3


class Huber(Loss):
    name, metric_name = "huber", "mae"

    def per_sample(self, output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.huber_loss(output.reshape(target.shape), target, reduction="none")

    def inverse_link(self, output: Tensor) -> Tensor:
        return output

    def mixed(self, outputs: Tensor, c: Tensor, target: Tensor) -> Tensor:
        return self.per_sample(torch.tensordot(c, outputs, dims=1), target)

    def score(self, prediction: Tensor, target: Tensor) -> Tensor:
        return (prediction.reshape(target.shape) - target).abs()


def share_right(prediction: Tensor, target: Tensor) -> float:
    return float((prediction.argmax(-1) == target).float().mean())


def use_own_parts(population: Population, federation: Federation) -> None:
    fit(population, federation, "ppfl", rounds=2, on_round=lambda record: print(record["loss"]))
    with TemporaryDirectory() as folder:
        stopping = EarlyStopping(patience=2, metric="validation_loss", min_delta=1e-3)
        fit(population, federation, rounds=2, on_round=[stopping, CSVLog(Path(folder) / "rounds.csv"), Printer()])
        assert_type(stopping.best_round, int | None)
    fitted = fit(population, federation, PPFL(lr=0.1), rounds=1, watch=Watch(metrics={"right": share_right}))
    assert_type(fitted.evaluate(federation, metrics=[share_right]), Evaluation)
    fit(Population(nn.Linear(4, 3), k=2, loss=nn.CrossEntropyLoss(label_smoothing=0.1)), federation, rounds=1)
    shops = Federation.from_arrays(torch.randn(40, 3), torch.randn(40), clients=[i % 4 for i in range(40)])
    fit(Population(nn.Linear(3, 1), k=2, loss=Huber()), shops, PPFL(lr=0.1), rounds=1)


def fit_tables() -> None:
    x, y, clients = np.random.default_rng(0).normal(size=(90, 2)), np.sin(np.arange(90)), [i % 6 for i in range(90)]
    regressor = PopulationRegressor(k=2, random_state=0).fit(x, y, clients=clients)
    assert_type(regressor, PopulationRegressor)
    assert_type(regressor.score(x, y, clients=clients), float)
    classifier = PopulationClassifier(k=2, random_state=0).fit(x, y > 0, clients=clients)
    print(classifier.predict_proba(x, clients=clients).shape)
    assert_type(mixed_model(np.eye(2), np.full((4, 2), 0.5)), MixedModel)


if __name__ == "__main__":
    federation = make_federations()
    fitted = train(federation)
    use(fitted, federation)
    use_own_parts(fitted.population, federation)
    fit_tables()
    try:
        fit(fitted.population, federation, rounds=0)
    except SettingError as error:
        print(error, isinstance(error, PPFLError))
