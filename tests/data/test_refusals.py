"""What cannot be a federation is refused in one line that names what was found."""

import numpy as np
import pandas as pd
import pytest
import torch
from lazy_population import lazy_population
from torch.utils.data import ChainDataset, DataLoader, Dataset, TensorDataset

import ppfl.data as data
from kit.files import limited
from kit.refusals import DataError, SettingError, assert_refused
from ppfl.data import DataTable, Federation, Samples, Truth, read_table

X, Y, C = np.zeros((6, 2), np.float32), [0, 1, 0, 1, 0, 1], ["a", "a", "a", "b", "b", "b"]
TABLE = pd.DataFrame({"shop": C, "price": np.arange(6.0), "city": ["x", "y"] * 3, "sold": ["no", "yes"] * 3})
GAPS = TABLE.drop(columns="city").assign(price=[1, None, 3, None, 7, None])
TEN, LABELS = torch.zeros(600, 1), np.arange(600) % 10


def table(frame=TABLE):
    return DataTable.of(frame, "shop", "sold")


def samples(width=2, x=None, y=Y, offsets=(0, 3, 6)):
    return Samples(torch.zeros(6, width) if x is None else x, torch.as_tensor(y), torch.tensor(offsets))


def arrays(x=X, y=Y, clients=C, **changes):
    return Federation.from_arrays(x, y, clients, **changes)


def datasets(a, **more):
    return Federation.from_datasets({"a": a}, **more)


class Endless(Dataset):
    """No length and no end, as numpy would find out."""

    def __getitem__(self, at):
        return torch.zeros(2), 0


REFUSED = {
    "only test rows": (lambda: arrays(is_test=[0, 0, 0, 1, 1, 1]), "'b' have no training sample"),
    "duplicate ids": (lambda: Federation(("a", "a"), samples()), "'a' is listed more than once"),
    "one id for two clients": (lambda: Federation(("a",), samples()), "2 clients", "1 ids"),
    "no rows": (lambda: arrays(np.zeros((0, 2)), [], []), "no client"),
    "unknown client": (lambda: arrays().select(["c7"]), "no client 'c7' among the 2"),
    "a client that is not listed": (lambda: arrays(ids=["a"]), "'b' have rows"),
    "clients in two columns": (lambda: arrays(clients=np.zeros((6, 2), int)), "(6, 2)"),
    "missing client": (lambda: arrays(clients=["a", None, "b"] * 2), "clients has 2 missing"),
    "fractional client": (lambda: arrays(clients=[1.5, 2.0] * 3), "fractions"),
    "NUL in a name": (lambda: arrays(clients=["a", "a\0"] * 3), "NUL"),
    "surrogate in a name": (lambda: arrays(clients=["a", "\ud800"] * 3), "surrogate"),
    "long name": (lambda: arrays(clients=["a", "b" * 10_000] * 3), "10000 characters"),
    "sparse features": (lambda: arrays(torch.ones(6, 2).to_sparse()), "sparse"),
    "a row of numbers": (lambda: arrays(x=np.zeros(6)), "use x.reshape(-1, 1)"),
    "rows without features": (lambda: arrays(np.zeros((6, 0))), "(6, 0)", "check the columns"),
    "tokens with a fraction": (lambda: arrays(tokens=True), "float32", "tokens=False"),
    "a frame with text": (lambda: arrays(TABLE[["price", "city"]]), "x is not numeric", "encode"),
    "rows of different lengths": (lambda: arrays([[1.0], [1.0, 2.0], [], [], [], []]), "whole numbers"),
    "a dict": (lambda: arrays({"p": [1.0] * 6, "q": [2.0] * 6}), "x is a dict", "side by side", "DataTable"),
    "features without targets": (lambda: samples(y=[0, 1]), "x has 6 samples but y has 2"),
    "half precision": (lambda: samples(x=torch.zeros(6, 2).half()), "float16", "x.float()"),
    "labels of 32 bits": (lambda: samples(y=torch.tensor(Y).int()), "int32", "y.long()"),
    "samples without targets": (lambda: samples(y=torch.zeros(6, 0)), "(6, 0)"),
    "offsets that are no integers": (lambda: samples(offsets=(0.0, 6.0)), "float32"),
    "offsets beyond the samples": (lambda: samples(offsets=(0, 3, 7)), "from 0 to 7 for 6"),
    "rows without targets": (lambda: arrays(y=np.zeros((6, 0))), "y has shape (6, 0)"),
    "text to predict": (lambda: arrays(y=[*"nynyny"], task="regression"), "'n'", "regression needs numbers"),
    "half a label": (lambda: arrays(y=[0.5, 1.0] * 3, task="classification"), "0.5", "use integers"),
    "a label of 70 bits": (lambda: arrays(y=[2.0**70, 1] * 3, task="classification"), "too large for an integer"),
    "numbers as classes": (lambda: Federation(("a", "b"), samples(y=[0.0] * 6), classes=["n"]), "y.long()"),
    "NaN target": (lambda: arrays(y=[0.1, np.nan] * 3, test_fraction=0), "train y has NaN"),
    "negative label": (lambda: arrays(y=[-1, 0, 1] * 2), "label -1 of client 'a'"),
    "label beyond classes": (lambda: arrays(y=[0, 1, 2] * 2, classes=("n", "y")), "outside 0..1"),
    "padded label beyond classes": (lambda: arrays(y=[[0, -100], [2, 0]] * 3, classes=("n", "y")), "label 2"),
    "a class per integer": (lambda: arrays(y=[0, 2**62] * 3, test_fraction=0), "classes", "regression"),
    "unknown class": (lambda: arrays(y=list("nynynz"), classes=("n", "y")), "'z', not among the classes"),
    "one class": (lambda: arrays(y=[1] * 6), "every label is 1"),
    "missing target": (lambda: arrays(y=["n", None] * 3), "y has 3 missing"),
    "zero weight": (lambda: arrays(weights={"a": 1, "b": 0}), "weight of client 'b' is 0.0"),
    "weights of others": (lambda: arrays(weights={"a": 1, "c": 1}), "differ in 'b', 'c'"),
    "whole weights": (lambda: Federation(("a", "b"), samples(), weights=torch.tensor([1, 1])), "torch.int64"),
    "weights of a sum of 2": (lambda: Federation(("a", "b"), samples(), weights=torch.ones(2)), "sum to 2"),
    "truth without ids": (lambda: arrays(truth=Truth(torch.eye(2))), "ids"),
    "truth of three": (lambda: Federation(("a", "b"), samples(), truth=Truth(torch.eye(3))), "3 rows", "2 clients"),
    "whole truth": (lambda: Truth(torch.eye(2).long()), "torch.int64"),
    "truth off the simplex": (lambda: Truth(torch.ones(2, 2)), "simplex"),
    "no client can hold out": (lambda: arrays(test_fraction=0.1), "large enough", "largest has 3"),
    "marks of two rows": (lambda: arrays(is_test=[0, 1]), "(2,)", "(6,)"),
    "marks that are text": (lambda: arrays(is_test=["no", "yes"] * 3), "'no'"),
    "held out twice": (lambda: arrays().holdout(0.3), "already has test", "the other split"),
    "means of tokens": (lambda: arrays(X.astype(int), tokens=True).feature_means(), "label_counts"),
    "labels of numbers": (lambda: arrays(y=np.arange(6.0)).label_counts(), "feature_means"),
    "no test": (lambda: arrays(test_fraction=0).split("test"), "holdout"),
    "splits of different shapes": (lambda: Federation(("a", "b"), samples(), samples(3)), "use one form"),
    "array without end": (lambda: arrays(Endless(), [0, 1], ["a", "b"]), "Endless", "from_datasets"),
    "dataset without length": (lambda: datasets(Endless()), "Dataset with a length"),
    "stream": (lambda: datasets(ChainDataset([])), "IterableDataset", "islice"),
    "loader": (lambda: datasets(DataLoader([1])), "give its dataset"),
    "no pairs": (lambda: datasets([{"x": 1}]), "'a' is a dict", "pair (x, y)"),
    "no dataset": (lambda: Federation.from_datasets({}), "one for each client"),
    "the name of datasets": (lambda: Federation.from_datasets("mnist"), "is a str", "a dict"),
    "a test set alone": (lambda: datasets([(X[0], 0)], test={"b": [(X[0], 0)]}), "'b'", "none for training"),
    "three tensors": (lambda: datasets(TensorDataset(TEN, TEN, TEN)), "3 tensors", "expected two"),
    "an empty dataset": (lambda: datasets([]), "is empty"),
    "text columns": (table().federation, "'city' are not numeric", "drop", "get_dummies"),
    "no such column": (lambda: DataTable.of(TABLE, "store", "sold"), "no column 'store'; the table has 'shop'"),
    "two columns of one name": (lambda: table(TABLE.rename(columns={"city": "price"})), "two columns 'price'"),
    "a table without features": (DataTable.of(TABLE, "shop", "sold", columns=[]).federation, "no column is left"),
    "gaps": (table(GAPS).federation, "'price' (3) have missing values"),
    "label in two groups": (lambda: data.label_groups(LABELS, [[0, 1], [1]], 2), "must not overlap"),
    "more clients than samples": (lambda: data.iid(LABELS, 601), "601 clients for 600"),
    "a label in no group": (lambda: data.label_groups(LABELS, [[0, 1], [2]], 2), "not in any group"),
    "a group without samples": (lambda: data.label_groups(LABELS, [range(10), [10]], 2), "[10]"),
    "a number too few": (lambda: data.label_groups(LABELS, [range(5), range(5, 10)], (2,)), "1 numbers for 2 groups"),
    "a group too small": (lambda: data.label_groups(LABELS, [range(9), [9]], 61), "60 samples", "61 clients"),
    "no alpha": (lambda: data.dirichlet_labels(LABELS, 3, 0.0), "alpha is 0.0"),
    "many samples for each": (lambda: data.dirichlet_labels(LABELS, 3, 1.0, min_samples=300), "300 each"),
    "targets to part by label": (lambda: data.dirichlet_labels(LABELS + 0.5, 3, 1.0), "needs labels"),
    "no synthetic client": (lambda: data.synthetic_classification(0), "n_clients is 0"),
    "noise below 0": (lambda: data.synthetic_classification(2, noise=-1.0), "noise -1.0"),
    "more groups than dimensions": (lambda: data.synthetic_groups(dim=2, groups=3), "raise dim"),
    "lazy samples of another type": (lambda: lazy_population(3).train.to(dtype=torch.float64), "leave the dtype"),
    "all lazy samples": (lambda: lazy_population(3).train.x.mean(), "drawn when a client takes part"),
    "rows of lazy samples": (lambda: lazy_population(3).train.x[:2], "drawn when a client takes part"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_wrong_input_is_refused_in_one_line(case):
    call, *words = REFUSED[case]
    assert_refused(call, DataError, *words)


def test_more_than_memory_holds_is_refused_before_memory_is_taken():
    for draw in (data.synthetic_classification, data.synthetic_groups, data.synthetic_linear):
        for change in ({"n_clients": 10**12}, {"dim": 10**12}, {"test_points": 10**12}):
            assert_refused(lambda: draw(**change), DataError, "more than the limit")
    f = Federation.from_arrays(torch.ones(40, 1), torch.arange(40), torch.arange(40), test_fraction=0)
    with limited(bytes=1000):
        assert_refused(f.label_counts, DataError, "40 clients in 40 classes")
        assert_refused(lambda: arrays([[1] * 100, [1]], [0, 1], ["a", "a"]), DataError, "padded to 100 values")


def test_limits_come_from_the_environment(tmp_path, monkeypatch):
    TABLE.to_csv(tmp_path / "a.csv", index=False)

    def read():
        table = DataTable.of(read_table(tmp_path / "a.csv", client="shop"), "shop", "sold", columns=["price"])
        return table.federation()

    for limit in ("features=2", "classes=1", "clients=1"):
        monkeypatch.setenv("PPFL_LIMITS", limit)
        assert_refused(read, DataError, f"PPFL_LIMITS={limit.split('=')[0]}=")
    for wrong in ("columns=3", "features=many", "bytes=-1"):
        monkeypatch.setenv("PPFL_LIMITS", wrong)
        assert_refused(read, SettingError, "write whole numbers for some of bytes, classes, features, clients")
    monkeypatch.setenv("PPFL_LIMITS", "features=5")
    assert read().n_clients == 2
