"""What cannot be a federation is refused in one line that names what was found."""

import builtins

import numpy as np
import pandas as pd
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import ppfl.data as data
from kit.refusals import DataError, SettingError, assert_refused
from ppfl.data import Federation, Samples, Truth, from_table, read_csv
from ppfl.data.limits import limited

X, Y, C = np.zeros((6, 2), np.float32), [0, 1, 0, 1, 0, 1], ["a", "a", "a", "b", "b", "b"]
OFFSETS = torch.tensor([0, 3, 6])
TABLE = pd.DataFrame(
    {"shop": C, "price": np.arange(6.0), "city": ["x", "y"] * 3, "sold": ["no", "yes"] * 3, "count": [-1, 1] * 3}
)
TEN, LABELS = torch.zeros(600, 1), np.arange(600) % 10


def samples(x=None, y=None, offsets=OFFSETS) -> Samples:
    return Samples(torch.zeros(6, 2) if x is None else x, torch.tensor(Y) if y is None else torch.as_tensor(y), offsets)


def federation(**changes) -> Federation:
    return Federation(**{"ids": ("a", "b"), "train": samples(), **changes})


def arrays(x=X, y=Y, clients=C, **changes) -> Federation:
    return Federation.from_arrays(x, y, clients, **changes)


def datasets(a, **settings) -> Federation:
    return Federation.from_datasets({"a": a}, **settings)


def table(**columns) -> Federation:
    asked = {"columns": ["price"]} | {key: columns.pop(key) for key in ("columns", "is_test") if key in columns}
    return from_table(TABLE.assign(**columns), "shop", "sold", **asked)


def with_nan() -> np.ndarray:
    x = X.copy()
    x[4:, 1] = np.nan
    x[0, 0] = np.inf
    return x


class Endless(Dataset):
    """No length and no end, as numpy would find out."""

    def __getitem__(self, at):
        return torch.zeros(2), 0


class Pairs(list, Dataset):
    pass


class Stream(IterableDataset):
    def __iter__(self):
        yield torch.zeros(2), 0


FEDERATIONS = {
    "no training sample": (lambda: federation(train=samples(offsets=torch.tensor([0, 6, 6]))), "'b'", "drop"),
    "only test rows": (lambda: arrays(is_test=[0, 0, 0, 1, 1, 1]), "'b' have no training sample"),
    "id without rows": (lambda: arrays(ids=["a", "b", "z"]), "'z' have no training sample"),
    "rows without id": (lambda: arrays(ids=["a"]), "'b' have rows but are not in ids"),
    "duplicate ids": (lambda: federation(ids=("a", "a")), "'a' occur twice"),
    "duplicate selection": (lambda: arrays().select(["a", "a"]), "'a' occur twice"),
    "ids that are not strings": (lambda: federation(ids=(1, 2)), "must be strings"),
    "too few ids": (lambda: federation(ids=("a",)), "2 clients but there are 1 ids"),
    "no clients": (lambda: arrays().select([]), "no client"),
    "no rows": (lambda: arrays(np.zeros((0, 2)), [], []), "no client"),
    "unknown client": (lambda: arrays().select(["c7"]), "no client 'c7' among the 2"),
    "missing client": (lambda: arrays(clients=["a", None, "b"] * 2), "clients has 2 missing"),
    "fractional client": (lambda: arrays(clients=[1.5, 2.0] * 3), "fractions"),
    "client matrix": (lambda: arrays(clients=np.zeros((6, 2))), "one client id per sample"),
    "NUL in a name": (lambda: arrays(clients=["a", "a\0"] * 3), "NUL"),
    "surrogate in a name": (lambda: arrays(clients=["a", "\ud800"] * 3), "surrogate"),
    "long name": (lambda: arrays(clients=["a", "b" * 10_000] * 3), "10000 characters"),
    "name that is no text": (lambda: arrays(clients=np.array([b"\xff", b"b"] * 3)), "not UTF-8"),
    "NaN": (lambda: arrays(with_nan(), test_fraction=0), "train x has NaN", "2 of them of client 'b'"),
    "text features": (lambda: arrays(x=[["a", "b"]] * 6), "not numeric"),
    "huge integers": (lambda: arrays(x=[[10**400]] * 6), "x is not numeric"),
    "complex features": (lambda: arrays(torch.ones(6, 2, dtype=torch.complex64)), "complex64"),
    "sparse features": (lambda: arrays(torch.ones(6, 2).to_sparse()), "sparse"),
    "one number": (lambda: arrays(x=1.0), "shape ()"),
    "a row of numbers": (lambda: arrays(x=np.zeros(6)), "use x.reshape(-1, 1)"),
    "rows of different lengths": (lambda: arrays([[1.0], [1.0, 2.0], [], [], [], []]), "whole numbers"),
    "rows of whole numbers and fractions": (lambda: arrays([[1, 2], [3.5]], [0, 1], ["a", "a"]), "row 1 is float64"),
    "float tokens": (lambda: arrays(tokens=True), "tokens are integers"),
    "half precision": (lambda: samples(torch.zeros(6, 2, dtype=torch.float16)), "float16", "x.float"),
    "one input in a dict": (lambda: arrays({"p": [1.0]}, [0], ["a"]), "1 inputs", "from_columns"),
    "NaN target": (lambda: arrays(y=[0.1, np.nan] * 3, test_fraction=0), "train y has NaN"),
    "target beyond floats": (lambda: arrays(y=[0, 1e300] * 3, test_fraction=0), "NaN or infinity"),
    "negative label": (lambda: arrays(y=[-1, 0, 1] * 2), "label -1 of client 'a'"),
    "label in a sequence": (lambda: arrays(y=[[0, -7], [1, -100]] * 3), "label -7 of client 'a'"),
    "label beyond classes": (lambda: arrays(y=[0, 1, 2] * 2, classes=("n", "y")), "outside 0..1"),
    "a class per integer": (lambda: arrays(y=[0, 2**62] * 3, test_fraction=0), "classes", "regression"),
    "fraction as label": (lambda: arrays(y=[0.5, 1, 0] * 2, task="classification"), "0.5, which is not a class"),
    "float labels": (lambda: federation(train=samples(y=torch.zeros(6)), classes=("n", "y")), "integers"),
    "short labels": (lambda: samples(y=torch.zeros(6, dtype=torch.int32)), "int32", "y.long"),
    "unknown class": (lambda: arrays(y=list("nynynz"), classes=("n", "y")), "'z', not among the classes"),
    "one class": (lambda: arrays(y=[1] * 6), "every label is 1"),
    "text for regression": (lambda: arrays(y=list("nynyny"), task="regression"), "needs numbers"),
    "missing target": (lambda: arrays(y=["n", None] * 3), "y has 3 missing"),
    "y without values": (lambda: arrays(y=np.zeros((6, 0))), "shape (6, 0)"),
    "y without columns": (lambda: samples(y=torch.zeros(6, 0)), "at least one value"),
    "y too short": (lambda: arrays(y=[0, 1, 0]), "x has 6 rows, y 3 and clients 6"),
    "unpaired samples": (lambda: samples(y=[0, 1]), "x has 6 samples but y has 2"),
    "labels of targets": (lambda: arrays(y=[0.5] * 6, test_fraction=0).label_counts(), "float targets"),
    "decreasing offsets": (lambda: samples(offsets=torch.tensor([0, 4, 3, 6])), "never decrease"),
    "short offsets": (lambda: samples(offsets=torch.tensor([0, 3, 5])), "end at 6"),
    "float offsets": (lambda: samples(offsets=torch.tensor([0.0, 6.0])), "int64"),
    "zero weight": (lambda: arrays(weights={"a": 1, "b": 0}), "weight of client 'b' is 0.0"),
    "weights that sum to 2": (lambda: federation(weights=torch.ones(2)), "sum to 2, not 1"),
    "infinite weight": (lambda: federation(weights=torch.tensor([0.5, torch.inf])), "'b' is inf"),
    "one weight": (lambda: federation(weights=torch.ones(1)), "expected float32 (2,)"),
    "weights of other clients": (lambda: arrays(weights={"a": 1, "c": 1}), "differ in 'b', 'c'"),
    "truth without ids": (lambda: arrays(truth=Truth(torch.eye(2))), "without ids"),
    "truth of other clients": (lambda: federation(truth=Truth(torch.eye(3))), "3 rows but there are 2 clients"),
    "truth off the simplex": (lambda: Truth(torch.ones(2, 2)), "simplex"),
    "truth as labels": (lambda: Truth(torch.tensor([0, 1])), "(clients, k)"),
    "fraction of one": (lambda: arrays(test_fraction=1.0), "from 0 to below 1"),
    "negative fraction": (lambda: arrays(test_fraction=0).holdout(-0.1), "from 0 to below 1"),
    "no client can hold out": (lambda: arrays(test_fraction=0.1), "large enough", "largest has 3"),
    "second test": (lambda: arrays().holdout(0.2), "already has test"),
    "short mark": (lambda: arrays(is_test=[True]), "one value per sample"),
    "no test": (lambda: arrays(test_fraction=0).split("test"), "holdout"),
    "splits of different shapes": (lambda: federation(test=samples(torch.zeros(6, 3))), "use one form"),
    "labels and targets": (lambda: federation(test=samples(y=torch.zeros(6))), "float targets", "labels"),
    "test targets of another shape": (
        lambda: federation(train=samples(y=torch.zeros(6, 2)), test=samples(y=torch.zeros(6, 3))), "targets (3,)",
    ),
}  # fmt: skip
SOURCES = {
    "array without end": (lambda: arrays(Endless(), [0, 1], ["a", "b"]), "Endless", "from_datasets"),
    "dataset as x": (lambda: arrays(TensorDataset(torch.zeros(6, 2))), "from_datasets"),
    "loader as y": (lambda: arrays(y=DataLoader(Pairs([1]))), "from_datasets"),
    "dataset without length": (lambda: datasets(Endless()), "Dataset with a length"),
    "stream": (lambda: datasets(Stream()), "IterableDataset", "islice"),
    "loader": (lambda: datasets(DataLoader(Pairs([1]))), "give its dataset"),
    "no pairs": (lambda: datasets(Pairs([{"x": 1}])), "'a' is a dict", "pair (x, y)"),
    "empty dataset": (lambda: datasets(Pairs([])), "is empty"),
    "no dataset": (lambda: Federation.from_datasets({}), "no dataset"),
    "one dataset": (lambda: Federation.from_datasets(TensorDataset(TEN)), "one dataset per client"),
    "pairs of two sizes": (lambda: datasets(Pairs([(np.zeros(2), 0), (np.zeros(3), 1)])), "x"),
    "dataset without targets": (lambda: datasets(TensorDataset(torch.zeros(2, 2))), "1 tensors"),
    "tests of another client": (lambda: datasets(Pairs([(1, 0)]), test={"b": Pairs([(1, 0)])}), "'b' have a dataset"),
    "no column y": (lambda: Federation.from_columns({"x": [1.0]}), "no column 'y'; the data have 'x'"),
    "text in columns": (lambda: Federation.from_columns({"x": ["a"], "y": [0], "client": ["c"]}, x=["x"]), "encode"),
    "text columns": (lambda: table(columns=None), "'city' are not numeric", "drop", "get_dummies"),
    "no such column": (lambda: from_table(TABLE, "store", "sold"), "no column 'store'; the table has 'shop'"),
    "no features": (lambda: from_table(TABLE[["shop", "sold"]], "shop", "sold"), "left for features"),
    "column twice": (lambda: table(columns=["price", "price"]), "twice"),
    "two columns of one name": (lambda: from_table(TABLE.set_axis(list("abcdd"), axis=1), "a", "d"), "two columns 'd'"),
    "complex column": (lambda: table(price=1 + 2j), "'price' are not numeric"),
    "gaps": (lambda: table(price=[1, np.nan] * 3), "'price' (3) have missing values"),
    "NUL in clients": (lambda: table(shop=["a", "a\0"] * 3), "'a\\x00', with a NUL"),
    "marks in words": (lambda: table(is_test="city"), "is_test contains", "convert it"),
    "label in two groups": (lambda: data.by_label_groups(TEN, LABELS, [[0, 1], [1]], 2), "must not overlap"),
    "label in no group": (lambda: data.by_label_groups(TEN, LABELS, [[0, 1], [2]], 2), "not in any group"),
    "empty group": (lambda: data.by_label_groups(TEN, LABELS, [list(range(10)), [11]], 2), "group [11]"),
    "many clients in a group": (lambda: data.by_label_groups(TEN, LABELS, data.MNIST_GROUPS, 400), "too few for 400"),
    "clients per group": (lambda: data.by_label_groups(TEN, LABELS, data.MNIST_GROUPS, (1, 2)), "2 numbers for 4"),
    "more clients than samples": (lambda: data.iid(TEN, LABELS, 601), "601 clients for 600"),
    "alpha of zero": (lambda: data.dirichlet_labels(TEN, LABELS, 3, 0.0), "alpha is 0"),
    "more clients than min_samples allow": (lambda: data.dirichlet_labels(TEN, LABELS, 100, 0.5), "at least 10 each"),
    "targets to part by label": (lambda: data.dirichlet_labels(TEN, LABELS + 0.5, 3, 1.0), "needs labels"),
    "unpaired pool": (lambda: data.iid(TEN[:-1], LABELS, 3), "pair row by row"),
    "no synthetic client": (lambda: data.synthetic_classification(0), "n_clients is 0"),
    "negative noise": (lambda: data.synthetic_classification(2, noise=-1), "noise >= 0"),
    "synthetic sizes": (lambda: data.synthetic_classification(2, min_size=10, max_size=5), "min <= max"),
    "too few dimensions": (lambda: data.synthetic_groups(groups=5, dim=3), "raise dim"),
    "no concentration": (lambda: data.logistic_population(2, alpha=0), "alpha > 0"),
    "no samples": (lambda: data.logistic_population(2, samples=0), "samples is 0"),
    "Bayes without sources": (lambda: data.bayes_accuracy(data.digits_federation()), "no true sources"),
    "Bayes without test": (lambda: data.bayes_accuracy(data.synthetic_groups(test_points=0)), "no test samples"),
    "no lazy client": (lambda: data.lazy_population(0), "n_clients is 0"),
    "lazy alpha": (lambda: data.lazy_population(alpha=0), "alpha 0"),
    "lazy in double precision": (lambda: data.lazy_population(3).to(dtype=torch.float64), "drawn as torch.float32"),
    "all lazy samples": (lambda: data.lazy_population(3).train.x.mean(), "drawn when a client takes part"),
}  # fmt: skip


@pytest.mark.parametrize("case", [*FEDERATIONS, *SOURCES])
def test_wrong_input_is_refused_in_one_line(case):
    call, *words = (FEDERATIONS | SOURCES)[case]
    assert_refused(call, DataError, *words)


@pytest.mark.parametrize(
    "draw", [data.synthetic_classification, data.synthetic_groups, data.synthetic_linear, data.logistic_population]
)
def test_more_than_memory_holds_is_refused_before_it_is_drawn(draw):
    for change in ({"n_clients": 10**12}, {"dim": 10**12}, {"test_points": 10**12}):
        assert_refused(lambda: draw(**change), DataError, "more than the limit")


def test_tables_of_counts_and_padding_are_bounded_before_memory_is_taken():
    f = Federation.from_arrays(torch.ones(40, 1), torch.arange(40), torch.arange(40), test_fraction=0)
    assert f.label_counts().sum() == 40
    with limited(bytes=1000):
        assert_refused(f.label_counts, DataError, "40 clients in 40 classes")
        assert_refused(lambda: arrays([[1] * 100, [1]], [0, 1], ["a", "a"]), DataError, "padded to 100 values")


def test_limits_come_from_the_environment(tmp_path, monkeypatch):
    path = tmp_path / "a.csv"
    TABLE.to_csv(path, index=False)
    read = lambda: read_csv(path, "shop", "sold", drop=["city"])  # noqa: E731
    found = {"features=2, classes=1e6": "limit of 2", "classes=1": "PPFL_LIMITS=classes=", "clients=1": "2 client ids"}
    for limit, words in found.items():
        monkeypatch.setenv("PPFL_LIMITS", limit)
        assert_refused(read, DataError, words, "PPFL_LIMITS=")
    for wrong in ("columns=3", "features=many", "features", "bytes=-1", "bytes=inf"):
        monkeypatch.setenv("PPFL_LIMITS", wrong)
        assert_refused(read, SettingError, "write whole numbers for some of bytes, classes, features, clients")
    monkeypatch.setenv("PPFL_LIMITS", "features=5")
    assert read().n_clients == 2


def test_without_pandas_the_error_names_the_extra(tmp_path, monkeypatch):
    real = builtins.__import__

    def without_pandas(name, *rest):
        if name == "pandas":
            raise ImportError("No module named 'pandas'", name="pandas")
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without_pandas)
    assert_refused(lambda: read_csv(tmp_path / "a.csv", "a", "b"), DataError, "need pandas", "ppfl[tables]")
