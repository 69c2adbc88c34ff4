"""Raw rows become what a network takes, by `batch` and by the layers of `wrap`; what would lose digits is refused."""

import numpy as np
import pandas as pd
import pytest
import torch
from pydantic import ValidationError
from torch import nn

from kit.refusals import DataError, assert_refused
from ppfl.data.preparation import Preparation, PreparedColumn
from ppfl.data.sample_spec import SampleSpec

PREPARED = Preparation(
    columns=(
        PreparedColumn(name="age", mean=(40.0,), scale=(10.0,), fill=40.0, missing=1),
        PreparedColumn(name="ward", levels=("east", "west"), mean=(0.25,), scale=(0.5,)),
        PreparedColumn(name="same", mean=(7.0,), scale=(0.0,)),
    ),
    rows=7,
    target=(100.0, 20.0),
)
TABLE = pd.DataFrame({"note": ["a", "b"], "same": [7.0, 7.0], "ward": ["west", "east"], "age": [60.0, None]})
FLOATS = SampleSpec(shape=(3,), dtype=torch.float32, target_dtype=torch.float32)
NAMED = FLOATS.model_copy(update={"features": ("a", "b", "c")})
BYTES = SampleSpec(shape=(1, 2, 2), dtype=torch.uint8, target_dtype=torch.int64, classes=("no", "yes"))
TOKENS = SampleSpec(shape=(4,), dtype=torch.int64, target_dtype=torch.int64, target_shape=(4,), classes=("a", "b"))
PIXELS = np.arange(0, 8, dtype=np.uint8).reshape(2, 1, 2, 2) * 30


def test_a_table_and_an_array_of_its_encoded_columns_are_prepared_alike():
    spec = FLOATS.prepared_by(PREPARED)
    assert spec.features == ("age", "ward = west", "same") and spec.shape == (3,)
    expected = torch.tensor([[2.0, 1.5, 0.0], [0.0, -0.5, 0.0]])
    encoded = PREPARED.encode(TABLE)
    assert encoded.tolist() == [[60, 1, 7], [40, 0, 7]]
    for raw in (TABLE, TABLE.iloc[:, ::-1], encoded, encoded.tolist(), torch.from_numpy(encoded)):
        assert torch.equal(spec.batch(raw), expected)
    net = nn.Linear(3, 1)
    assert torch.equal(spec.wrap(net)(torch.from_numpy(encoded)), spec.restore(net(expected)))
    assert torch.equal(spec.restore(net(expected)), 100 + 20 * net(expected))
    assert SampleSpec.model_validate(spec.model_dump(mode="json")) == spec


def test_columns_are_taken_by_name():
    frame = pd.DataFrame({"c": [3, 6], "other": ["x", "y"], "a": [1, 4], "b": [2, 5]})
    for raw in (frame, frame[["b", "a", "c"]], [[1, 2, 3], [4, 5, 6]]):
        assert NAMED.batch(raw).tolist() == [[1, 2, 3], [4, 5, 6]]


def test_bytes_are_scaled_and_what_needs_no_step_gets_none():
    for raw in (PIXELS, torch.from_numpy(PIXELS), PIXELS.astype(np.int32), PIXELS.tolist()):
        assert torch.equal(BYTES.batch(raw), torch.from_numpy(PIXELS) / 255)
    net = nn.Flatten()
    assert torch.equal(BYTES.wrap(net)(torch.from_numpy(PIXELS)), (torch.from_numpy(PIXELS) / 255).flatten(1))
    assert FLOATS.wrap(net) is TOKENS.wrap(net) is net


REFUSED = {
    "floats for bytes": (BYTES, PIXELS / 255, "values from 0 to 1", "torch.uint8"),
    "whole floats for bytes": (BYTES, PIXELS.astype(float), "float64"),
    "more than a byte": (BYTES, PIXELS.astype(int) * 2, "from 0 to 420", "0 to 255"),
    "less than a byte": (BYTES, -PIXELS.astype(int), "-210"),
    "parts of a token": (TOKENS, [[0.5, 1, 0, 1]], "without loss"),
    "a column that is missing": (NAMED, pd.DataFrame({"a": [1], "b": [2]}), "no column 'c'", "'a', 'b'"),
    "text in a column of numbers": (NAMED, pd.DataFrame({"a": ["x"], "b": [2], "c": [3]}), "'a' has text"),
    "a gap": (NAMED, pd.DataFrame({"a": [1, 4], "b": [2, 5], "c": [3, None]}), "'c' has a missing value in row 1"),
    "too few columns": (FLOATS, [[1.0, 2.0]], "(1, 2)", "(B, 3)"),
    "one sample": (FLOATS, [1.0, 2.0, 3.0], "x[None]"),
    "complex numbers": (FLOATS, [[1j, 2, 3]], "real numbers"),
    "text": (FLOATS, [["a", "b", "c"]], "cannot be read as numbers"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_cut_wrapped_or_taken_by_position_is_refused(name):
    spec, raw, *words = REFUSED[name]
    assert_refused(lambda: spec.batch(raw), DataError, *words)


def test_a_spec_from_elsewhere_is_checked():
    said = BYTES.model_dump(mode="json")
    for damage in ({"dtype": "object"}, {"shape": [-1]}, {"shape": [2**20, 2**20]}, {"classes": 3}, {"more": 1}):
        with pytest.raises(ValidationError):
            SampleSpec.model_validate(said | damage)
