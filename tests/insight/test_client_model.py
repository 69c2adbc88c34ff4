"""One client's model as a plain module: the same predictions as `predict`, wherever it runs."""

import copy
import functools
from pathlib import Path

import pytest
import torch
from torch import nn

from kit.networks import make_net, with_seed
from kit.problems import make_federation
from kit.refusals import ModelError, SettingError, WriteError, assert_refused
from ppfl import PPFL, FedAvg, Fitted, Population, fit
from ppfl.algorithms import Ditto, FedEM, FineTune
from ppfl.insight import export_onnx
from ppfl.insight import onnx_export as exporter

FEDERATION = make_federation((17, 12, 30, 9), test_fraction=0.3)
X = FEDERATION.train.x[:7]


def bends() -> nn.Module:
    """A network with a nonlinear part in its middle, a frozen layer and dropout."""
    middle = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 5))
    net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), middle, nn.GroupNorm(1, 5), nn.Linear(5, 3))
    net[0].requires_grad_(False)
    return net


CASES = {
    "weights": (PPFL(lr=0.3), make_net, {"k": 3, "mix": "weights"}),
    "weights of a part": (PPFL(lr=0.3), bends, {"k": 3, "mix": "weights", "canonical": ["2", "4"]}),
    "outputs": (PPFL(lr=0.3), make_net, {"k": 3, "mix": "outputs"}),
    "outputs of a linear part": (PPFL(lr=0.3), bends, {"k": 3, "mix": "outputs", "canonical": "4"}),
    "outputs in the middle": (PPFL(lr=0.3), bends, {"k": 3, "mix": "outputs", "canonical": "2"}),
    "predictions": (PPFL(lr=0.3), bends, {"k": 3, "mix": "predictions"}),
    "predictions of a part": (PPFL(lr=0.3), bends, {"k": 3, "mix": "predictions", "canonical": "2"}),
    "fedavg": (FedAvg(lr=0.3), bends, {"k": 1}),
    "ditto": (Ditto(lr=0.3), make_net, {"k": 1}),
    "finetune": (FineTune(method=PPFL(lr=0.3)), make_net, {"k": 2, "mix": "weights"}),
    "fedem": (FedEM(lr=0.3), make_net, {"k": 2, "mix": "predictions"}),
}


@functools.cache
def fitted_by(name: str) -> Fitted:
    method, make, settings = CASES[name]
    net = with_seed(make, dtype=torch.float32)
    return fit(Population(net, **settings), FEDERATION, method, rounds=3)


@pytest.mark.parametrize("name", CASES)
@torch.no_grad()
def test_a_module_predicts_as_the_fit_does(name: str) -> None:
    """Outputs are before the link unless predictions are mixed."""
    fitted, close = fitted_by(name), {"rtol": 1e-5, "atol": 1e-6}
    for client in fitted.ids:
        expected = fitted.predict(client, X)
        torch.testing.assert_close(fitted.model(client, predictions=True)(X), expected, **close)
        outputs = fitted.model(client)(X)
        mixes_predictions = name.startswith(("predictions", "fedem"))
        torch.testing.assert_close(outputs if mixes_predictions else outputs.softmax(1), expected, **close)
    hard = fitted.model("client-1", predictions=True, hard=True)
    torch.testing.assert_close(hard(X), fitted.predict("client-1", X, hard=True), **close)


@torch.no_grad()
def test_mixed_outputs_are_those_of_the_canonical_models() -> None:
    models, c = fitted_by("outputs").models(["client-1"]).models, fitted_by("outputs").membership("client-1")
    nets = [torch.func.functional_call(make_net(), {n: v[k] for n, v in models.items()}, (X,)) for k in range(3)]
    torch.testing.assert_close(
        fitted_by("outputs").model("client-1")(X), torch.einsum("k,kno->no", c, torch.stack(nets))
    )


@pytest.mark.parametrize("name", CASES)
def test_a_module_is_a_plain_network_with_memory_of_its_own(name: str) -> None:
    fitted = fitted_by(name)
    one, other, given = fitted.model("client-0"), fitted.model("client-2"), fitted.population.architecture
    assert not any(module.training for module in one.modules())
    program = torch.export.export(one, (X,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    with torch.no_grad():
        other.load_state_dict(one.state_dict())
        assert torch.equal(one(X), other(X))
        for batch in (X, X[:3]):
            torch.testing.assert_close(program.module()(batch), one(batch))
    one_network = not name.startswith(("predictions", "fedem")) and name not in ("outputs", "outputs in the middle")
    assert (str(one) == str(given)) == one_network
    if one_network:  # then it is the network as it was given
        frozen = {name for name, p in given.named_parameters() if not p.requires_grad}
        assert {name for name, p in one.named_parameters() if not p.requires_grad} == frozen
        assert all(torch.equal(one.state_dict()[name], given.state_dict()[name]) for name in frozen)
    before, changed = fitted.predict("client-0", X), copy.deepcopy(fitted)
    with torch.no_grad():
        for p in changed.model("client-0").parameters():
            p.zero_()
    changed.population.load({name: torch.zeros_like(p) for name, p in changed.population.initial_network().items()})
    assert torch.equal(before, changed.predict("client-0", X))


@pytest.mark.parametrize("name", ["weights", "outputs in the middle", "predictions of a part"])
def test_onnxruntime_gives_the_same_predictions(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    path = fitted_by(name).export_onnx("client-1", tmp_path / "model.onnx")
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for batch in (X, X[:1], X[:4]):
        (found,) = session.run(None, {"x": batch.numpy()})
        expected = fitted_by(name).predict("client-1", batch)
        torch.testing.assert_close(torch.from_numpy(found), expected, rtol=0, atol=1e-6)


class BranchesOnValues(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) if float(x.sum()) > 0 else super().forward(-x)


def test_what_cannot_be_exported_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("onnxscript")
    path, net = tmp_path / "model.onnx", nn.Linear(4, 3)
    assert_refused(lambda: export_onnx(BranchesOnValues(4, 3), path, X), ModelError, "ONNX")
    assert_refused(lambda: export_onnx(net, tmp_path / "a" / "model.onnx", X), WriteError, "no folder")
    monkeypatch.setattr(exporter, "find_spec", lambda _: None)
    assert_refused(lambda: export_onnx(net, path, X), SettingError, "onnx", "pip install 'ppfl[export]'")
    assert not list(tmp_path.iterdir())
