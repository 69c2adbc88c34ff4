"""What is shipped is what was fitted: a client's predictions, its module and its ONNX file agree on raw rows."""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from kit.experiments import small_experiment
from kit.files import make_table, with_gaps
from kit.networks import Words, with_seed
from ppfl import PPFL, Population, fit
from ppfl.data import Federation

CLIENTS = np.arange(24) // 8
NUMBERS = np.random.default_rng(0).normal(size=(24, 3)).astype(np.float32)
LABELS = np.arange(24) % 3


def of_table(folder: Path, **preparation: Any) -> Federation:
    with_gaps(make_table()).assign(y=lambda table: 100 + 20 * table.y).to_csv(folder / "table.csv", index=False)
    data = {"name": "csv", "file": "table.csv", "client": "client", "target": "y"}
    asked = small_experiment(data=data, preparation={"missing": "fill", "text": ["code"], **preparation})
    return asked.build_data(folder)


def floats(folder: Path) -> tuple[Federation, Any]:
    return Federation.from_arrays(NUMBERS, LABELS, CLIENTS), NUMBERS


def images(folder: Path) -> tuple[Federation, Any]:
    pixels = np.random.default_rng(0).integers(0, 256, (24, 1, 2, 2), dtype=np.uint8)
    return Federation.from_arrays(pixels, LABELS, CLIENTS), pixels


def table(folder: Path) -> tuple[Federation, Any]:
    return of_table(folder), with_gaps(make_table()).iloc[:, ::-1]


def target(folder: Path) -> tuple[Federation, Any]:
    return of_table(folder, standardise_target=True), with_gaps(make_table())


def tokens(folder: Path) -> tuple[Federation, Any]:
    x = np.random.default_rng(0).integers(0, 7, (24, 5))
    y, classes = np.roll(x, -1, 1), [*map(str, range(7))]
    return Federation.from_arrays(x, y, CLIENTS, tokens=True, classes=classes), x


def mapped(folder: Path) -> tuple[Federation, Any]:
    np.save(folder / "x.npy", NUMBERS)
    rows = np.load(folder / "x.npy", mmap_mode="r")
    return Federation.from_arrays(rows, LABELS, CLIENTS), rows


def make_network(federation: Federation) -> nn.Module:
    if not federation.train.x.is_floating_point() and federation.train.x.dtype != torch.uint8:
        return Words()
    width = federation.train.x.shape[1:].numel()
    return nn.Sequential(nn.Flatten(), nn.Linear(width, 4), nn.Tanh(), nn.Linear(4, federation.n_classes or 1))


@pytest.mark.parametrize("kind", [floats, images, table, target, tokens, mapped])
def test_predictions_module_and_onnx_agree_on_raw_rows(kind, tmp_path):
    runtime = pytest.importorskip("onnxruntime")
    federation, raw = kind(tmp_path)
    net = with_seed(lambda: make_network(federation), dtype=torch.float32)
    loss = "cross_entropy" if federation.n_classes else "squared"
    mix = "weights" if kind in (images, target) else "outputs"
    fitted = fit(Population(net, k=2, mix=mix, loss=loss), federation, PPFL(lr=0.05), rounds=2, progress=False)
    client, spec = fitted.ids[1], fitted.spec
    encoded = spec.preparation.encode(raw) if isinstance(raw, pd.DataFrame) else np.array(raw)
    expected = fitted.predict(client, raw)
    close = {"rtol": 1e-5, "atol": 1e-5}
    np.testing.assert_allclose(fitted.predict(client, encoded), expected, **close)
    module, x = fitted.model(client, predictions=True), torch.from_numpy(encoded)
    with torch.no_grad():
        np.testing.assert_allclose(module(x).numpy(), expected, **close)
        assert torch.equal(spec.wrap(net)(x), spec.restore(net(spec.batch(x))))
    session = runtime.InferenceSession(fitted.export_onnx(client, tmp_path / "model.onnx"))
    for rows in (encoded, encoded[:1]):
        (found,) = session.run(None, {"x": rows})
        np.testing.assert_allclose(found, expected[: len(rows)], **close)
    if kind is target:  # in the units of y, which are far from 0
        assert abs(expected.mean() - 100) < 20
