"""A fitted population that is saved and loaded: the same bits in another process, and clear errors."""

import copy
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from kit.problems import make_federation, make_net
from ppfl import PPFL, FedAvg, Fitted, Local, Population, fit
from ppfl.algorithms import CFL, IFCA, Ditto, FedEM, FineTune
from ppfl.core import Loss
from ppfl.core.errors import CheckpointError, ModelError, SettingError
from ppfl.core.losses import squared
from ppfl.core.trees import named_leaves
from ppfl.fitted import load
from ppfl.runs.network_description import build_network, describe_network

FEDERATION = make_federation((17, 12, 30, 9), test_fraction=0.3)
X = FEDERATION.train.x[:5]
CASES = {
    "outputs": (PPFL(lr=0.3), 3, "outputs"),
    "predictions": (PPFL(lr=0.3), 3, "predictions"),
    "weights": (PPFL(lr=0.3), 3, "weights"),
    "private": (PPFL(lr=0.3, share_memberships=False), 2, "outputs"),
    "fedavg": (FedAvg(lr=0.3), 1, "outputs"),
    "local": (Local(lr=0.3), 1, "outputs"),
    "ditto": (Ditto(lr=0.3), 1, "outputs"),
    "finetune": (FineTune(method=PPFL(lr=0.3)), 2, "weights"),
    "fedem": (FedEM(lr=0.3), 2, "predictions"),
    "ifca": (IFCA(lr=0.3), 2, "outputs"),
    "cfl": (CFL(lr=0.3), 2, "outputs"),
}
PREDICT = """
import sys, torch
from ppfl.fitted import load
for path in sys.argv[1:]:
    fitted = load(path)
    x = torch.load(path + ".x", weights_only=True)
    torch.save({client: fitted.predict(client, x) for client in fitted.ids}, path + ".y")
"""


def with_dropout() -> nn.Module:
    """With everything that a network can have beside trained weights: dropout, frozen layers, buffers, a mode."""
    net = nn.Sequential(
        nn.Linear(4, 6), nn.BatchNorm1d(6).eval(), nn.Tanh(), nn.Dropout(0.3), nn.Sequential(nn.Linear(6, 3))
    )
    net[0].requires_grad_(False)
    net[1].running_mean.normal_(generator=torch.Generator().manual_seed(3))
    return net


def fitted_by(name: str, net: nn.Module | None = None, **settings) -> Fitted:
    method, k, mix = CASES[name]
    population = Population(make_net() if net is None else net, k=k, mix=mix, **settings)
    return fit(population, FEDERATION, method, rounds=3)


def assert_same_fit(one: Fitted, other: Fitted) -> None:
    assert one.ids == other.ids and one.history == other.history and one.method == other.method
    for client in one.ids:
        assert torch.equal(one.predict(client, X), other.predict(client, X))
    for a, b in ((one.state.server, other.state.server), (one.clients.values, other.clients.values)):
        a, b = named_leaves(a), named_leaves(b)
        assert a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def test_predictions_in_another_process_have_the_same_bits(tmp_path: Path) -> None:
    fits = {name: fitted_by(name) for name in CASES}
    fits["constants"] = fitted_by("weights", with_dropout(), canonical="4")
    for name, fitted in fits.items():
        fitted.save(tmp_path / name)
        torch.save(X, tmp_path / f"{name}.x")
    subprocess.run([sys.executable, "-W", "error", "-c", PREDICT, *(str(tmp_path / name) for name in fits)], check=True)
    for name, fitted in fits.items():
        there = torch.load(tmp_path / f"{name}.y", weights_only=True)
        assert set(there) == set(fitted.ids)
        for client, found in there.items():
            assert torch.equal(found, fitted.predict(client, X)), name


@pytest.mark.parametrize("name", CASES)
def test_everything_comes_back(name: str, tmp_path: Path) -> None:
    fitted = fitted_by(name)
    again = load(fitted.save(tmp_path / "fitted.safetensors"))
    assert_same_fit(fitted, again)
    assert torch.equal(fitted.memberships, again.memberships)
    one, other = fitted.evaluate(FEDERATION), again.evaluate(FEDERATION)
    assert torch.equal(one.loss, other.loss) and torch.equal(one.score, other.score)
    again.save(tmp_path / "again.safetensors")
    assert (tmp_path / "fitted.safetensors").read_bytes() == (tmp_path / "again.safetensors").read_bytes()


def test_constants_and_modes_come_back(tmp_path: Path) -> None:
    fitted = fitted_by("weights", with_dropout(), canonical="4")
    again = load(fitted.save(tmp_path / "fitted"))
    ours, theirs = fitted.population.architecture, again.population.architecture
    assert str(ours) == str(theirs)
    assert [m.training for m in ours.modules()] == [m.training for m in theirs.modules()]
    for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        assert torch.equal(a, b)
    frozen = [name for name, p in theirs.named_parameters() if not p.requires_grad]
    assert frozen == ["0.weight", "0.bias"]
    assert again.population.mask_keys == fitted.population.mask_keys == ("3.key",)


def test_buffers_may_hold_anything(tmp_path: Path) -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(4, 3)
            self.register_buffer("memberships", torch.tensor([-torch.inf, 0.0, 0.0]), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(x) + self.memberships.clamp_min(-5)

    fitted = fitted_by("weights", Masked())
    fitted.save(tmp_path / "fitted")
    assert_same_fit(fitted, load(tmp_path / "fitted", net=Masked()))


# ---------------------------------------------------------------------- networks, losses and methods of one's own


class Own(nn.Module):
    def __init__(self, hidden: int = 5) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, hidden), nn.Linear(hidden, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).relu())


def test_a_network_with_code_of_its_own_is_passed_again(tmp_path: Path) -> None:
    net = Own()
    net.first.requires_grad_(False)
    fitted = fitted_by("outputs", net)
    path = fitted.save(tmp_path / "fitted")
    with pytest.raises(ModelError, match=r"code of its own.*ppfl\.load\(path, net=net\)"):
        load(path)
    again = load(path, net=Own())  # fresh: other values, nothing frozen
    assert_same_fit(fitted, again)
    assert not again.population.architecture.first.weight.requires_grad
    with pytest.raises(ModelError, match=r"'first.weight' has shape \(7, 4\), in the file \(5, 4\)"):
        load(path, net=Own(hidden=7))
    with pytest.raises(ModelError, match=r"has '0.bias', .* has not"):
        load(path, net=make_net())


class Absolute(Loss):
    name, metric_name = "absolute", "mae"

    def per_sample(self, output, target):
        return (output.reshape(target.shape) - target).abs()

    def inverse_link(self, output):
        return output

    def mixed(self, outputs, c, target):
        return self.per_sample(torch.tensordot(c, outputs, dims=1), target)

    def score(self, prediction, target):
        return self.per_sample(prediction, target)


def test_a_loss_of_ones_own_is_passed_again(tmp_path: Path) -> None:
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    from ppfl import Federation

    federation = Federation.from_arrays(x, x.sum(1), ["a", "b"] * 20)
    fitted = fit(Population(nn.Linear(2, 1), k=2, loss=Absolute()), federation, PPFL(lr=0.1), rounds=2)
    path = fitted.save(tmp_path / "fitted")
    with pytest.raises(ModelError, match=r"loss of your own, 'absolute'.*loss="):
        load(path)
    with pytest.raises(ModelError, match="fitted with the loss 'absolute', and loss is 'squared'"):
        load(path, loss=squared)
    assert torch.equal(load(path, loss=Absolute()).predict("a", x), fitted.predict("a", x))


class MyFedAvg(FedAvg):
    name = "my-fedavg"
    mine: float = 1.0


def test_a_method_of_ones_own_is_passed_again(tmp_path: Path) -> None:
    fitted = fit(Population(make_net(), k=1), FEDERATION, MyFedAvg(lr=0.1, mine=2.0), rounds=2)
    path = fitted.save(tmp_path / "fitted")
    with pytest.raises(SettingError, match=r"method of your own, 'my-fedavg'.*method="):
        load(path)
    with pytest.raises(SettingError, match="fitted by 'my-fedavg', and method is 'fedavg'"):
        load(path, method=FedAvg)
    assert load(path, method=MyFedAvg).method.mine == 2.0
    assert_same_fit(fitted, load(path, method=MyFedAvg(lr=0.1, mine=2.0)))


# ---------------------------------------------------------------------- descriptions of networks


@pytest.mark.parametrize(
    ("net", "shape"),
    [
        (nn.Linear(4, 3, bias=False), (4,)),
        (
            nn.Sequential(nn.Conv2d(1, 4, 3, padding=1, stride=2), nn.GroupNorm(2, 4), nn.GELU("tanh"), nn.Flatten()),
            (1, 8, 8),
        ),
        (
            nn.Sequential(nn.Conv2d(2, 4, (1, 3), padding="same", groups=2), nn.MaxPool2d((2, 1)), nn.Flatten(1, 2)),
            (2, 8, 8),
        ),
        (nn.Sequential(nn.LayerNorm((4, 2), eps=1e-3), nn.Unflatten(1, (2, 2)), nn.LeakyReLU(0.3)), (4, 2)),
        (nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.PReLU(4)), nn.Softplus(2.0), nn.Dropout(0.4)), (4,)),
        (
            nn.Sequential(
                nn.ConvTranspose1d(2, 3, 4, output_padding=1, stride=2), nn.AdaptiveAvgPool1d(3), nn.BatchNorm1d(3)
            ),
            (2, 6),
        ),
    ],
)
def test_chains_of_torchs_layers_are_built_again(net: nn.Module, shape: tuple[int, ...]) -> None:
    again = build_network(describe_network(net))
    again.load_state_dict(net.state_dict())
    assert str(again) == str(net)
    x = torch.randn(3, *shape)
    assert torch.equal(again.eval()(x), net.eval()(x))


def test_embeddings_are_built_again() -> None:
    net = nn.Sequential(nn.Embedding(7, 3, padding_idx=2), nn.Flatten(), nn.Linear(6, 2))
    again = build_network(describe_network(net))
    again.load_state_dict(net.state_dict())
    x = torch.randint(7, (5, 2))
    assert torch.equal(again(x), net(x))


def hooked() -> nn.Module:
    net = nn.Linear(4, 3)
    net.register_forward_hook(lambda _m, _x, out: out * 2)
    return net


def tied() -> nn.Module:
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    net[1].weight = net[0].weight
    return net


def patched() -> nn.Module:
    net = nn.Linear(4, 3)
    net.forward = lambda x: x
    return net


@pytest.mark.parametrize(
    "net",
    [
        Own(),
        nn.Sequential(Own()),
        hooked(),
        tied(),
        patched(),
        nn.Sequential(*[nn.Linear(4, 4)] * 2),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
        nn.TransformerEncoderLayer(4, 2),
    ],
)
def test_what_torchs_layers_do_not_say_is_not_guessed(net: nn.Module) -> None:
    assert describe_network(net) is None


# ---------------------------------------------------------------------- damage


def test_files_that_are_no_fits_are_refused_in_one_line(tmp_path: Path) -> None:
    path = fitted_by("fedavg").save(tmp_path / "fitted")
    whole = path.read_bytes()
    for at in range(100, len(whole), len(whole) // 60):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(CheckpointError) as found:
            load(path)
        assert "\n" not in str(found.value)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="damaged"):
        load(path)
    with pytest.raises(CheckpointError, match="there is no .*nowhere"):
        load(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="no run in"):
        load(tmp_path)
    with pytest.raises(CheckpointError, match="is a folder"):
        fitted_by("fedavg").save(tmp_path)
    with pytest.raises(CheckpointError, match="there is no folder"):
        fitted_by("fedavg").save(tmp_path / "a" / "b")


def test_another_version_or_content_is_refused(tmp_path: Path) -> None:
    from ppfl.runs.storage import read_tensors, save_tree

    path = fitted_by("fedavg").save(tmp_path / "fitted")
    tensors, about = read_tensors(path)
    save_tree(path, tensors, about | {"version": 99})
    with pytest.raises(CheckpointError, match="version 99"):
        load(path)
    save_tree(path, tensors, {"anything": 1})
    with pytest.raises(CheckpointError, match="no fitted population"):
        load(path)
    for change in (
        {"population": {**about["population"], "network": {"type": "Module", "arguments": {"x": 1}}}},
        {"population": {**about["population"], "network": {"type": "functional", "arguments": {}}}},
        {"population": {**about["population"], "network": {"type": "Linear", "arguments": [10**15] * 2}}},
        {"population": {**about["population"], "k": "many"}},
        {"data": {}},
        {"problem": None},
        {"method": {**about["method"], "settings": {"lr": "fast"}}},
    ):
        save_tree(path, tensors, about | change)
        with pytest.raises((CheckpointError, ModelError)) as found:
            load(path)
        assert "\n" not in str(found.value)


# ---------------------------------------------------------------------- what users' tools do


@pytest.mark.parametrize("name", ["outputs", "ditto", "finetune"])
def test_fits_can_be_copied_and_pickled(name: str) -> None:
    fitted = fitted_by(name, with_dropout() if name == "outputs" else None)
    fitted.predict("client-0", X)
    for again in (copy.deepcopy(fitted), pickle.loads(pickle.dumps(fitted))):
        assert_same_fit(fitted, again)


def test_populations_can_be_copied_and_pickled() -> None:
    population = Population(with_dropout(), k=2)
    for again in (copy.deepcopy(population), pickle.loads(pickle.dumps(population))):
        one, other = (fit(p, FEDERATION, PPFL(lr=0.1), rounds=2) for p in (population, again))
        assert torch.equal(one.predict("client-0", X), other.predict("client-0", X))
