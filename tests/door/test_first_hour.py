"""The mistakes of a first hour: each ends in one line that says what was found, what was expected and what to do."""

import functools

import numpy as np
import pytest
import torch
from scipy.sparse import csr_matrix
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from kit.refusals import AffinityError, CheckpointError, DataError, ModelError, SettingError, assert_refused
from ppfl import PPFL, FedAvg, Federation, Population, Watch, fit, load
from ppfl.data import DataTable, PreparationSettings
from ppfl.runs import load_experiment, run

X, LABELS, IDS = torch.arange(96.0).reshape(24, 4) / 96, torch.arange(24) % 3, [f"shop-{i % 4}" for i in range(24)]
PHOTOS = torch.zeros(24, 8, 8, dtype=torch.uint8)
SGD = torch.optim.SGD(nn.Linear(4, 3).parameters(), lr=0.1)
WITH_NAN = torch.where(X[5, 1] == X, torch.nan, X)


def shops(x=X, y=LABELS, clients=IDS, **settings):
    return Federation.from_arrays(x, y, clients, **settings)


def train(federation=None, net=None, method=None, *, k=2, loss="cross_entropy", rounds=1, **settings):
    population = Population(net or nn.Linear(4, 3), k=k, loss=loss)
    return fit(population, federation or shops(), method or PPFL(lr=0.1), rounds=rounds, **settings)


@functools.cache
def fitted():
    return train()


def watched(metric):
    return train(watch=Watch(metrics={"right": metric}))


def sales(clients=IDS, **columns):
    table = {"shop": clients, "price": [3, 8, 2, 7] * 6, "size": [5, 1, 4] * 8, "sold": [*"ab"] * 12}
    return DataTable.of(table | columns, "shop", "sold")


@functools.cache
def fitted_to_sales():
    federation = sales().federation(prepared=PreparationSettings())
    return train(federation, nn.Linear(2, 2))


def sales_by_size(clients):
    return DataTable.of(
        {"size": [5, 1, 4] * 8, "price": [3, 8] * 12, "shop": clients, "sold": [*"ab"] * 12}, "shop", "sold"
    )


def new_shop(**columns):
    return sales(["shop-9"] * 24, **columns)


def photo_network():
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(2 * 36, 3))


MISTAKES = {
    # the call and its settings
    "a negative lr": (lambda: PPFL(lr=-1), SettingError, "PPFL: lr is -1", "greater than 0"),
    "another name for lr": (lambda: PPFL(learning_rate=0.1), SettingError, "'learning_rate'", "did you mean 'lr'"),
    "a misspelled setting": (lambda: FedAvg(lr=0.1, batchsize=8), SettingError, "did you mean 'batch_size'"),
    "a setting by position": (lambda: PPFL(0.1), SettingError, "PPFL(lr=0.1)"),
    "an optimizer as a setting": (lambda: PPFL(optimizer=SGD), SettingError, "'optimizer'", "lr, momentum"),
    "an optimizer as the method": (lambda: train(method=SGD), SettingError, "method is SGD", "PPFL(lr=0.1"),
    "a misspelled method": (lambda: train(method="fedavgg"), SettingError, "'fedavgg'", "did you mean 'fedavg'"),
    "a network for the population": (lambda: fit(nn.Linear(4, 3), shops()), ModelError, "Linear", "Population(net"),
    "swapped arguments": (lambda: fit(shops(), Population(nn.Linear(4, 3), k=2)), SettingError, "swapped"),
    "a loader for the federation": (
        lambda: fit(Population(nn.Linear(4, 3), k=2), DataLoader(TensorDataset(X, LABELS))),
        DataError,
        "DataLoader",
        "from_arrays",
    ),
    "no rounds": (lambda: train(rounds=0), SettingError, "rounds is 0", "at least one"),
    "a seed that is none": (lambda: train(seed=None), SettingError, "seed is None", "seed=0"),
    "a matrix for the affinity": (lambda: train(affinity=torch.eye(4)), AffinityError, "Tensor", "from_matrix"),
    "a path for the start": (lambda: train(start="a.safetensors"), SettingError, "start is a str", "ppfl.load"),
    "a dict for what is watched": (lambda: train(watch={"every": 2}), SettingError, "dict", "Watch(every="),
    "a penalty between clients that nobody relates": (
        lambda: train(method=PPFL(lr=0.1, penalty=0.1)),
        SettingError,
        "penalty",
        "affinity=",
        "penalty=0",
    ),
    "text for a callback": (lambda: train(on_round="stop"), SettingError, "'stop'", "functions"),
    "a metric with a value for each sample": (
        lambda: watched(lambda prediction, target: prediction.argmax(1) == target),
        ModelError,
        "'right'",
        "one number",
    ),
    "a metric of one argument": (lambda: watched(lambda prediction: 1), ModelError, "'right'", "(prediction, target)"),
    # the population
    "k to be found": (lambda: Population(nn.Linear(4, 3), k="auto"), ModelError, "k is 'auto'", "k=4"),
    "more models than clients": (lambda: train(k=9), SettingError, "k is 9", "4 clients", "k <= 4"),
    "a class for the network": (lambda: Population(nn.Linear, k=2), ModelError, "the class Linear", "an object"),
    "an unknown mix": (lambda: Population(nn.Linear(4, 3), k=2, mix="output"), ModelError, "mean 'outputs'"),
    "a misspelled loss": (lambda: train(loss="crossentropy"), ModelError, "'crossentropy'", "mean 'cross_entropy'"),
    "a loss by its name elsewhere": (lambda: train(loss="mse"), ModelError, "'mse'", "mean 'squared'"),
    "a softmax before the loss": (
        lambda: train(net=nn.Sequential(nn.Linear(4, 3), nn.Softmax(1))),
        ModelError,
        "Softmax",
        "leave it out",
    ),
    "a part that does not exist": (
        lambda: Population(nn.Sequential(nn.Linear(4, 3)), k=2, canonical="head"),
        ModelError,
        "'head'",
        "'0'",
    ),
    "a part of a network without parts": (
        lambda: Population(nn.Linear(4, 3), k=2, canonical="head"),
        ModelError,
        "'head'",
        "must be 'all', as",
    ),
    "two models with FedAvg": (lambda: train(method=FedAvg(lr=0.1)), SettingError, "k = 2", "set k = 1"),
    # targets, and networks that do not fit them
    "real targets and the default loss": (lambda: train(shops(y=X[:, 0])), DataError, "float32", "loss='squared'"),
    "labels that are floats": (lambda: train(shops(y=LABELS.float())), DataError, "as integers or text"),
    "one-hot labels": (lambda: train(shops(y=nn.functional.one_hot(LABELS).float())), DataError, "y.argmax(1)"),
    "text and a loss for numbers": (
        lambda: train(shops(y=[*"abc"] * 8), nn.Linear(4, 1), loss="squared"),
        ModelError,
        "'a', 'b', 'c'",
        "cross_entropy",
    ),
    "too few outputs": (lambda: train(net=nn.Linear(4, 2)), ModelError, "2 outputs", "give its last layer 3"),
    "two outputs for the logistic loss": (
        lambda: train(shops(y=LABELS % 2), nn.Linear(4, 2), loss="logistic"),
        ModelError,
        "one output per sample",
        "cross_entropy",
    ),
    "other inputs": (lambda: train(net=nn.Linear(5, 3)), ModelError, "samples of shape (4,)", "4 and 5x3"),
    "images without channels": (lambda: train(shops(PHOTOS), photo_network()), ModelError, "(8, 8)", "x[:, None]"),
    "channels last": (
        lambda: train(shops(PHOTOS[..., None]), photo_network()),
        ModelError,
        "(8, 8, 1)",
        "movedim(-1, 1)",
    ),
    # data
    "y of another length": (lambda: shops(y=LABELS[1:]), DataError, "24 rows, y 23", "row by row"),
    "ids of another length": (lambda: shops(clients=IDS[1:]), DataError, "clients 23", "row by row"),
    "one id for all": (lambda: shops(clients="shop"), DataError, "one client id per sample"),
    "a gap in x": (lambda: shops(WITH_NAN), DataError, "NaN", "'shop-1'", "drop or fill"),
    "text in x": (lambda: shops(np.array([["red"] * 4] * 24)), DataError, "'red'", "encode"),
    "numbers as text in y": (lambda: shops(y=["0.5", "1", "2.25"] * 8), DataError, "'0.5'", "convert"),
    "x and y swapped": (lambda: shops(LABELS, X), DataError, "(24,)", "swapped"),
    "a sparse matrix": (lambda: shops(csr_matrix(X)), DataError, "csr_matrix", "toarray()"),
    "a pair of arrays for a dataset": (
        lambda: Federation.from_datasets({"shop-0": (X, LABELS)}),
        DataError,
        "'shop-0'",
        "TensorDataset(x, y)",
    ),
    "a table with text": (lambda: sales(size=[*"abc"] * 8).federation(), DataError, "'size'", "prepared=Preparation"),
    "a table with gaps": (
        lambda: sales(size=[1.5, None, 2.5] * 8).federation(),
        DataError,
        "'size' (8)",
        "missing='fill'",
    ),
    "one column for client and target": (
        lambda: DataTable.of({"shop": IDS, "price": [*range(24)]}, "shop", "shop"),
        DataError,
        "'shop'",
        "client and target are one",
    ),
    "a share in per cent": (lambda: shops(test_fraction=20), DataError, "is 20", "0.2"),
    # what was fitted
    "an unknown client": (lambda: fitted().predict("shop-9", X), DataError, "'shop-9'", "onboard("),
    "a gap in samples to predict": (lambda: fitted().predict("shop-0", WITH_NAN), DataError, "1 of 24", "fill"),
    "client and samples swapped": (lambda: fitted().predict(X, "shop-0"), DataError, "Tensor", "id of one client"),
    "other features": (lambda: fitted().evaluate(shops(X[:, :3])), DataError, "(3,)", "trained on (4,)"),
    "columns in another order": (
        lambda: train(sales().federation(), nn.Linear(2, 2)).onboard(sales_by_size(["shop-9"] * 24).federation()),
        DataError,
        "'size', 'price'",
        "'price', 'size'",
    ),
    "a new client's table that is prepared by itself": (
        lambda: fitted_to_sales().onboard(new_shop().federation(prepared=PreparationSettings())),
        DataError,
        "prepared",
        "fitted.spec.preparation",
    ),
    "a new client's table that is not prepared": (
        lambda: fitted_to_sales().onboard(new_shop().federation()),
        DataError,
        "prepared",
        "fitted.spec.preparation",
    ),
    "arrays for a federation": (lambda: fitted().evaluate(X), DataError, "Tensor", "from_arrays"),
    "a split that does not exist": (lambda: fitted().evaluate(shops(), "validation"), DataError, "holdout("),
    "a misspelled split": (lambda: fitted().evaluate(shops(), "tests"), DataError, "'tests'", "'train', 'test' or"),
    "a file that does not exist": (lambda: load("nowhere.safetensors"), CheckpointError, "nowhere", "fitted.save"),
    "weights of torch.save": (lambda: load("a.pt"), CheckpointError, "torch.save", "load_state_dict"),
    "another file than that of a fit": (lambda: load("a.toml"), CheckpointError, "a.toml", "fitted.save"),
    "a note for a fit": (lambda: load("note.txt"), CheckpointError, "note.txt", "fitted.save"),
    "text and a loss for numbers, in a file": (lambda: run(load_experiment("b.toml"), "out"), ModelError, "'a', 'b'"),
    "a penalty between clients that nobody relates, in a file": (
        lambda: run(load_experiment("b.toml", ["data.target='price'", "method.penalty=1"]), "out"),
        SettingError,
        "penalty",
        "[affinity]",
    ),
    "pooled samples without a partition": (
        lambda: run(load_experiment("b.toml", ['data={name="npz", file="d.npz"}']), "out"),
        DataError,
        "no clients",
        "partition = {",
    ),
    "a value without quotes": (lambda: load_experiment("c.toml"), SettingError, "line 2", "quotes"),
    "a key with another name": (lambda: load_experiment("a.toml"), SettingError, "'round'", "did you mean 'rounds'"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_answered_in_one_line_with_a_remedy(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(nn.Linear(4, 3).state_dict(), "a.pt")
    (tmp_path / "a.toml").write_text(
        'round = 3\ndata = {name = "digits"}\nmodel = {name = "linear"}\nmethod = {name = "ppfl"}\n'
    )
    rows = "".join(f"shop-{at % 4},{at % 7},{at / 8},{'ab'[at % 2]}\n" for at in range(40))
    (tmp_path / "b.csv").write_text(f"shop,size,price,sold\n{rows}")
    (tmp_path / "b.toml").write_text(
        'rounds = 1\ndata = {name = "csv", file = "b.csv", client = "shop", target = "sold", columns = ["size"]}\n'
        'model = {name = "linear"}\npopulation = {k = 2, loss = "squared"}\nmethod = {name = "ppfl", lr = 0.1}\n'
    )
    (tmp_path / "note.txt").write_text("hello")
    np.savez("d.npz", x=X, y=LABELS)
    (tmp_path / "c.toml").write_text("rounds = 3\nname = sales\n")
    call, error, *words = MISTAKES[name]
    assert_refused(call, error, *words)
