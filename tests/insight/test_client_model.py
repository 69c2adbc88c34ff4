"""One client's model as a plain module: the same predictions as `predict`, wherever it runs."""

from pathlib import Path

import pytest
import torch
from torch import nn

from kit.problems import make_federation, make_net
from ppfl import PPFL, FedAvg, Population, fit
from ppfl.algorithms import Ditto, FedEM, FineTune
from ppfl.core.errors import ModelError, SettingError, WriteError
from ppfl.insight import client_model, export_onnx
from ppfl.insight import onnx_export as exporter

FEDERATION = make_federation((17, 12, 30, 9), test_fraction=0.3)
X = FEDERATION.train.x[:7]


def bends() -> nn.Module:
    """A network with a nonlinear part in its middle, a frozen layer and dropout."""
    net = nn.Sequential(
        nn.Linear(4, 6),
        nn.Tanh(),
        nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Dropout(0.5), nn.Linear(5, 5)),
        nn.GroupNorm(1, 5),
        nn.Linear(5, 3),
    )
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


@pytest.fixture(scope="module", params=CASES)
def case(request):
    method, make, settings = CASES[request.param]
    return request.param, fit(Population(make(), **settings), FEDERATION, method, rounds=3)


def test_a_module_predicts_as_the_fit_does(case) -> None:
    _, fitted = case
    for client in fitted.ids:
        with torch.no_grad():
            found = fitted.model(client, predictions=True)(X)
        torch.testing.assert_close(found, fitted.predict(client, X), rtol=1e-5, atol=1e-6)


def test_outputs_are_before_the_link_unless_predictions_are_mixed(case) -> None:
    name, fitted = case
    with torch.no_grad():
        outputs = fitted.model("client-1")(X)
    predictions = outputs if name.startswith(("predictions", "fedem")) else outputs.softmax(1)
    torch.testing.assert_close(predictions, fitted.predict("client-1", X), rtol=1e-5, atol=1e-6)


def test_a_module_is_in_evaluation_mode_and_its_state_can_be_loaded(case) -> None:
    _, fitted = case
    one, other = fitted.model("client-0"), fitted.model("client-2")
    assert not any(module.training for module in one.modules())
    other.load_state_dict(one.state_dict())
    with torch.no_grad():
        assert torch.equal(one(X), other(X))


def test_one_set_of_weights_is_the_network_as_it_was_given(case) -> None:
    name, fitted = case
    module, given = fitted.model("client-0"), fitted.population.architecture
    one_network = not name.startswith(("predictions", "fedem")) and name not in ("outputs", "outputs in the middle")
    assert (str(module) == str(given)) == one_network
    if one_network:
        frozen = {name for name, p in given.named_parameters() if not p.requires_grad}
        assert {name for name, p in module.named_parameters() if not p.requires_grad} == frozen
        assert all(torch.equal(module.state_dict()[name], given.state_dict()[name]) for name in frozen)


def test_a_module_has_memory_of_its_own(case) -> None:
    _, fitted = case
    before = fitted.predict("client-0", X)
    with torch.no_grad():
        for p in fitted.model("client-0").parameters():
            p.zero_()
    fitted.population.load({name: torch.zeros_like(p) for name, p in fitted.population.initial_network().items()})
    assert torch.equal(before, fitted.predict("client-0", X))


def test_a_module_can_be_exported_by_torch(case) -> None:
    _, fitted = case
    module = fitted.model("client-1")
    program = torch.export.export(module, (X,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    with torch.no_grad():
        for batch in (X, X[:3]):
            torch.testing.assert_close(program.module()(batch), module(batch))


def test_the_max_rule() -> None:
    method, make, settings = CASES["outputs"]
    fitted = fit(Population(make(), **settings), FEDERATION, method, rounds=3)
    with torch.no_grad():
        found = fitted.model("client-1", predictions=True, hard=True)(X)
    torch.testing.assert_close(found, fitted.predict("client-1", X, hard=True))


# ---------------------------------------------------------------------- ONNX


@pytest.mark.parametrize("name", ["weights", "outputs in the middle", "predictions of a part"])
def test_onnxruntime_gives_the_same_predictions(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    method, make, settings = CASES[name]
    fitted = fit(Population(make(), **settings), FEDERATION, method, rounds=2)
    path = fitted.export_onnx("client-1", tmp_path / "model.onnx")
    assert [file.name for file in tmp_path.iterdir()] == ["model.onnx"]
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    for batch in (X, X[:1], X[:4]):
        (found,) = session.run(None, {"x": batch.numpy()})
        torch.testing.assert_close(torch.from_numpy(found), fitted.predict("client-1", batch), rtol=0, atol=1e-6)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporter, "find_spec", lambda _: None)
    with pytest.raises(SettingError, match=r"needs the package onnx; .*pip install 'ppfl\[export\]'"):
        export_onnx(nn.Linear(4, 3), tmp_path / "model.onnx", X)


def test_what_cannot_be_exported_is_said_in_one_line(tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")

    class Branches(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if float(x.sum()) > 0 else super().forward(-x)

    with pytest.raises(ModelError, match="cannot be written as ONNX") as found:
        export_onnx(Branches(4, 3), tmp_path / "model.onnx", X)
    assert "\n" not in str(found.value) and not list(tmp_path.iterdir())
    with pytest.raises(WriteError, match="there is no folder"):
        export_onnx(nn.Linear(4, 3), tmp_path / "a" / "model.onnx", X)


def test_models_of_a_population_can_be_built_by_hand() -> None:
    from ppfl.core.models import Mixture

    population = Population(make_net(), k=2, mix="outputs")
    models, c = population.initial_models(0, distinct=True), torch.tensor([[0.25, 0.75]])
    nets = [torch.func.functional_call(make_net(), {n: v[k] for n, v in models.items()}, (X,)) for k in range(2)]
    expected = 0.25 * nets[0] + 0.75 * nets[1]
    torch.testing.assert_close(client_model(population, Mixture(models, c))(X), expected)
