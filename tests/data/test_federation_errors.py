"""Wrong input to a federation gives an error message of one line."""

import numpy as np
import pytest
import torch

from ppfl.core.errors import DataError
from ppfl.data import Federation, Samples, Truth
from ppfl.data.limits import limited

X, Y, C = np.zeros((6, 2), np.float32), [0, 1, 0, 1, 0, 1], ["a", "a", "a", "b", "b", "b"]
OFFSETS = torch.tensor([0, 3, 6])


def samples(x=None, y=None, offsets=OFFSETS) -> Samples:
    return Samples(torch.zeros(6, 2) if x is None else x, torch.tensor(Y) if y is None else torch.as_tensor(y), offsets)


def federation(**changes) -> Federation:
    return Federation(**{"ids": ("a", "b"), "train": samples(), **changes})


def arrays(x=X, y=Y, clients=C, **changes) -> Federation:
    return Federation.from_arrays(x, y, clients, **changes)


def with_nan() -> np.ndarray:
    x = X.copy()
    x[4:, 1] = np.nan
    x[0, 0] = np.inf
    return x


CASES = {
    "no training sample": (lambda: federation(train=samples(offsets=torch.tensor([0, 6, 6]))), "'b'.*drop"),
    "only test rows": (lambda: arrays(is_test=[0, 0, 0, 1, 1, 1]), "'b' have no training sample"),
    "id without rows": (lambda: arrays(ids=["a", "b", "z"]), "'z' have no training sample"),
    "rows without id": (lambda: arrays(ids=["a"]), "'b' have rows but are not in ids"),
    "duplicate ids": (lambda: federation(ids=("a", "a")), "'a' occur twice"),
    "duplicate ids given": (lambda: arrays(ids=["a", "b", "a"]), "'a' occur twice"),
    "duplicate selection": (lambda: arrays().select(["a", "a"]), "'a' occur twice"),
    "ids that are not strings": (lambda: federation(ids=(1, 2)), "must be strings"),
    "too few ids": (lambda: federation(ids=("a",)), "2 clients but there are 1 ids"),
    "no clients": (lambda: arrays().select([]), "no client"),
    "no rows": (lambda: arrays(np.zeros((0, 2)), [], []), "no client"),
    "unknown client": (lambda: arrays().select(["c7"]), "no client 'c7' among the 2"),
    "NaN": (lambda: arrays(with_nan(), test_fraction=0), "train x has NaN.* 3 samples, 2 of them of client 'b'"),
    "NaN target": (lambda: arrays(y=[0.1, np.nan] * 3, test_fraction=0), "train y has NaN"),
    "negative label": (lambda: arrays(y=[-1, 0, 1] * 2), "label -1 of client 'a'.*number the classes"),
    "label beyond classes": (lambda: arrays(y=[0, 1, 2] * 2, classes=("n", "y")), r"outside 0\.\.1"),
    "fraction as label": (lambda: arrays(y=[0.5, 1, 0] * 2, task="classification"), "0.5, which is not a class"),
    "float labels": (lambda: federation(train=samples(y=torch.zeros(6)), classes=("n", "y")), "integers"),
    "unknown class": (lambda: arrays(y=list("nynynz"), classes=("n", "y")), "'z', not among the classes"),
    "one class": (lambda: arrays(y=[1] * 6), "every label is 1"),
    "text for regression": (lambda: arrays(y=list("nynyny"), task="regression"), "needs numbers"),
    "missing target": (lambda: arrays(y=["n", None] * 3), "y has 3 missing"),
    "y without values": (lambda: arrays(y=np.zeros((6, 0))), r"shape \(6, 0\).*several values per sample"),
    "label in a sequence": (lambda: arrays(y=[[0, -7], [1, -100]] * 3), "label -7 of client 'a'"),
    "y too short": (lambda: arrays(y=[0, 1, 0]), "x has 6 rows, y 3 and clients 6"),
    "unpaired samples": (lambda: samples(y=[0, 1]), "x has 6 samples but y has 2"),
    "double features": (lambda: samples(torch.zeros(6, 2, dtype=torch.float16)), "float16.*x.float"),
    "short labels": (lambda: samples(y=torch.zeros(6, dtype=torch.int32)), "int32.*y.long"),
    "y without columns": (lambda: samples(y=torch.zeros(6, 0)), "at least one value"),
    "test targets of another shape": (
        lambda: federation(train=samples(y=torch.zeros(6, 2)), test=samples(y=torch.zeros(6, 3))),
        r"targets \(3,\)",
    ),
    "decreasing offsets": (lambda: samples(offsets=torch.tensor([0, 4, 3, 6])), "never decrease"),
    "short offsets": (lambda: samples(offsets=torch.tensor([0, 3, 5])), "end at 6"),
    "float offsets": (lambda: samples(offsets=torch.tensor([0.0, 6.0])), "int64"),
    "missing client": (lambda: arrays(clients=["a", None, "b"] * 2), "clients has 2 missing"),
    "missing numeric client": (lambda: arrays(clients=[1.0, np.nan] * 3), "clients has 3 missing"),
    "fractional client": (lambda: arrays(clients=[1.5, 2.0] * 3), "fractions"),
    "client matrix": (lambda: arrays(clients=np.zeros((6, 2))), "one client id per sample"),
    "text features": (lambda: arrays(x=[["a", "b"]] * 6), "not numeric"),
    "one number": (lambda: arrays(x=1.0), r"shape \(\)"),
    "a row of numbers": (lambda: arrays(x=np.zeros(6)), r"use x.reshape\(-1, 1\)"),
    "float tokens": (lambda: arrays(tokens=True), "tokens are integers"),
    "zero weight": (lambda: arrays(weights={"a": 1, "b": 0}), "weight of client 'b' is 0.0"),
    "weights that sum to 2": (lambda: federation(weights=torch.ones(2)), "sum to 2, not 1"),
    "infinite weight": (lambda: federation(weights=torch.tensor([0.5, torch.inf])), "'b' is inf"),
    "one weight": (lambda: federation(weights=torch.ones(1)), r"expected float32 \(2,\)"),
    "weights of other clients": (lambda: arrays(weights={"a": 1, "c": 1}), "differ in 'b', 'c'"),
    "truth without ids": (lambda: arrays(truth=Truth(torch.eye(2))), "without ids"),
    "truth of other clients": (lambda: federation(truth=Truth(torch.eye(3))), "3 rows but there are 2 clients"),
    "truth off the simplex": (lambda: Truth(torch.ones(2, 2)), "simplex"),
    "truth as labels": (lambda: Truth(torch.tensor([0, 1])), r"\(clients, k\)"),
    "fraction of one": (lambda: arrays(test_fraction=1.0), "from 0 to below 1"),
    "negative fraction": (lambda: arrays(test_fraction=0).holdout(-0.1), "from 0 to below 1"),
    "no client can hold out": (lambda: arrays(test_fraction=0.1), "large enough.*largest has 3"),
    "second test": (lambda: arrays().holdout(0.2), "already has test"),
    "short mark": (lambda: arrays(is_test=[True]), "one value per sample"),
    "no test": (lambda: arrays(test_fraction=0).split("test"), "holdout"),
    "labels of targets": (lambda: arrays(y=[0.5] * 6, test_fraction=0).label_counts(), "float targets"),
    "splits of different shapes": (lambda: federation(test=samples(torch.zeros(6, 3))), "use one form"),
    "labels and targets": (lambda: federation(test=samples(y=torch.zeros(6))), "float targets.*labels"),
}


@pytest.mark.parametrize("case", CASES)
def test_wrong_input_gives_an_error_of_one_line(case):
    build, pattern = CASES[case]
    with pytest.raises(DataError, match=pattern) as caught:
        build()
    assert "\n" not in str(caught.value)


def test_a_client_of_one_class_is_fine():
    f = arrays(y=[0, 0, 0, 1, 1, 1], test_fraction=0)
    assert f.label_counts().tolist() == [[3, 0], [0, 3]]


def test_one_class_is_fine_if_the_classes_are_given():
    assert arrays(y=[1] * 6, classes=("n", "y")).n_classes == 2


@pytest.mark.parametrize(
    ("x", "y", "clients", "pattern"),
    [
        (torch.ones(4, 2, dtype=torch.complex64), [0, 1] * 2, [0, 1] * 2, "complex64"),
        (torch.ones(4, 2).to_sparse(), [0, 1] * 2, [0, 1] * 2, "sparse"),
        ([[1.0], [1.0, 2.0], [], []], [0, 1] * 2, [0, 1] * 2, "rows of different lengths.*whole numbers"),
        ([[10**400]] * 4, [0, 1] * 2, [0, 1] * 2, "x is not numeric"),
        (torch.ones(4, 2), [0, 1] * 2, ["a", "a\0"] * 2, "NUL"),
        (torch.ones(4, 2), [0, 1] * 2, ["a", "\ud800"] * 2, "surrogate"),
        (torch.ones(4, 2), [0, 1] * 2, ["a", "b" * 10_000] * 2, "10000 characters"),
        (torch.ones(4, 2), [0, 1e300] * 2, [0, 1] * 2, "NaN or infinity"),
        (torch.ones(4, 2), [0, 2**62] * 2, [0, 1] * 2, "classes.*regression"),
    ],
)
def test_what_cannot_be_a_sample_or_an_id_is_refused(x, y, clients, pattern):
    with pytest.raises(DataError, match=pattern):
        Federation.from_arrays(x, y, clients, test_fraction=0)


def test_counting_many_labels_of_many_clients_is_refused():
    f = Federation.from_arrays(torch.ones(40, 1), torch.arange(40), torch.arange(40), test_fraction=0)
    assert f.label_counts().sum() == 40
    with limited(bytes=1000), pytest.raises(DataError, match="40 clients in 40 classes"):
        f.label_counts()
