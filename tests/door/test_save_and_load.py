"""A fitted population that is saved and loaded: the same bits in another process, and clear errors."""

import copy
import functools
import pickle
import subprocess
import sys

import pytest
import torch
from lazy_population import lazy_population
from torch import nn

from kit.fits import built_again, change_saved
from kit.problems import make_federation, make_net, power
from kit.refusals import CheckpointError, ModelError, SettingError, assert_refused
from ppfl import PPFL, FedAvg, Federation, Fitted, Population, fit, load
from ppfl.algorithms import Ditto, FineTune

FEDERATION = make_federation((17, 12, 30, 9), test_fraction=0.3)
NUMBERS = Federation.from_arrays(FEDERATION.train.x, FEDERATION.train.x[:, :3] ** 2, ["a"] * 20 + ["b"] * 27)
X = FEDERATION.train.x[:5]


def with_constants() -> nn.Module:
    """With everything that a network can have beside trained weights: dropout, frozen layers, buffers, a mode."""
    last = nn.Sequential(nn.Linear(6, 3))
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6).eval(), nn.Tanh(), nn.Dropout(0.3), last)
    net[0].requires_grad_(False)
    net[1].running_mean += torch.arange(6) / 7
    return net


class Own(nn.Module):
    """With a frozen layer, and a buffer that is not in its state_dict."""

    def __init__(self, hidden=5):
        super().__init__()
        self.first, self.last = nn.Linear(4, hidden).requires_grad_(False), nn.Linear(hidden, 3)
        self.register_buffer("memberships", torch.tensor([-torch.inf, 0.0, 0.0]), persistent=False)

    def forward(self, x):
        return self.last(self.first(x).relu()) + self.memberships.clamp_min(-5)


class MyFedAvg(FedAvg):
    name = "my-fedavg"
    mine: float = 1.0


class Renamed(FedAvg):
    name = "my-fedavg"


CASES = {  # other methods are saved and loaded in the tests of clients that come later
    "private": (PPFL(lr=0.3, share_memberships=False), {"k": 2}),
    "fedavg": (FedAvg(lr=0.3), {"k": 1}),
    "ditto": (Ditto(lr=0.3), {"k": 1}),
    "finetune": (FineTune(method=PPFL(lr=0.3)), {"k": 2, "mix": "weights"}),
    "constants": (PPFL(lr=0.3), {"net": with_constants, "k": 3, "mix": "weights", "canonical": "4"}),
    "own network": (PPFL(lr=0.3), {"net": Own, "k": 3}),
    "own loss": (PPFL(lr=0.1), {"k": 2, "loss": power}),
    "own method": (MyFedAvg(lr=0.1, mine=2.0), {"k": 1}),
}
OWN_LOSS = Population(make_net(), k=1, loss=power).loss  # a function is not enough to load a fit
PASSED = {"own network": {"net": Own()}, "own loss": {"loss": OWN_LOSS}, "own method": {"method": MyFedAvg}}


@functools.cache
def fitted_by(name: str) -> Fitted:
    method, settings = CASES[name]
    settings = {"net": make_net, **settings}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        net = settings.pop("net")()
    return fit(Population(net, **settings), NUMBERS if name == "own loss" else FEDERATION, method, rounds=3)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Every case, saved."""
    folder = tmp_path_factory.mktemp("fits")
    return {name: fitted_by(name).save(folder / name) for name in CASES}


def assert_same_fit(one, other, folder):
    """Saved again they are the same bytes, so that nothing differs that a file has."""
    assert one.ids == other.ids and one.history == other.history and one.method == other.method
    for client in one.ids:
        assert torch.equal(one.predict(client, X), other.predict(client, X))
    assert one.save(folder / "one").read_bytes() == other.save(folder / "other").read_bytes()


@pytest.mark.parametrize("name", CASES)
def test_everything_comes_back(name, files, tmp_path):
    fitted, again = fitted_by(name), load(files[name], **PASSED.get(name, {}))
    for other in (again, copy.deepcopy(fitted), pickle.loads(pickle.dumps(fitted)) if name not in PASSED else again):
        assert_same_fit(fitted, other, tmp_path)
    ours, theirs = fitted.population.architecture, again.population.architecture
    assert [m.training for m in ours.modules()] == [m.training for m in theirs.modules()]
    assert [p.requires_grad for p in ours.parameters()] == [p.requires_grad for p in theirs.parameters()]


PREDICT = """
import sys, torch, ppfl
for path in sys.argv[1:]:
    fitted = ppfl.load(path)
    torch.save({client: fitted.predict(client, torch.eye(4)) for client in fitted.ids}, path + ".y")
"""


@pytest.mark.processes
def test_predictions_in_another_process_have_the_same_bits(files):
    paths = {name: str(path) for name, path in files.items() if name not in PASSED}
    subprocess.run([sys.executable, "-W", "error", "-c", PREDICT, *paths.values()], check=True)
    for name, path in paths.items():
        there = torch.load(f"{path}.y", weights_only=True)
        for client in fitted_by(name).ids:
            assert torch.equal(there[client], fitted_by(name).predict(client, torch.eye(4))), name


def test_chains_of_torchs_layers_are_built_again_and_what_they_do_not_say_is_not_guessed():
    chains = [
        ([nn.Conv2d(1, 4, 3, padding=1, stride=2), nn.GroupNorm(2, 4), nn.GELU("tanh"), nn.Flatten()], (1, 8, 8)),
        ([nn.Conv2d(2, 4, (1, 3), padding="same", groups=2), nn.MaxPool2d((2, 1)), nn.Flatten(1, 2)], (2, 8, 8)),
        ([nn.Sequential(nn.Linear(4, 4, bias=False), nn.PReLU(4)), nn.Softplus(2.0), nn.Dropout(0.4)], (4,)),
        ([nn.Embedding(7, 3, padding_idx=2), nn.Flatten(), nn.BatchNorm1d(6), nn.Linear(6, 2)], (2,)),
        ([nn.Conv2d(1, 4, 3), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d((1, None)), nn.Flatten()], (1, 8, 8)),
    ]
    for layers, shape in chains:
        net = nn.Sequential(*layers)
        again = built_again(net)
        assert str(again) == str(net)
        x = torch.arange(3 * torch.Size(shape).numel()).reshape(3, *shape) % 7
        x = x if "Embedding" in str(net) else x / 7
        assert torch.equal(again.eval()(x), net.eval()(x))
    hooked, patched, tied = nn.Linear(4, 3), nn.Linear(4, 3), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    hooked.register_forward_hook(lambda _m, _x, out: out * 2)
    patched.forward = lambda x: x
    tied[1].weight = tied[0].weight
    parametrised = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    for net in (nn.Sequential(Own()), hooked, patched, tied, parametrised, nn.TransformerEncoderLayer(4, 2)):
        assert built_again(net) is None


REFUSED = {
    "own network": ({}, ModelError, "ppfl.load(path, net=net)"),
    "own network, wider": ({"net": Own(hidden=7)}, ModelError, "'first.weight'", "(7, 4)", "(5, 4)"),
    "own network, other layers": ({"net": make_net()}, ModelError, "'0.bias'", "the file has not"),
    "own loss": ({}, ModelError, "'power'", "loss="),
    "own loss, another": ({"loss": Population(make_net(), k=1).loss}, ModelError, "'power'", "'cross_entropy'"),
    "own method": ({}, SettingError, "'my-fedavg'", "method="),
    "own method, another": ({"method": FedAvg}, SettingError, "'my-fedavg'", "'fedavg'"),
    "own method, without its settings": ({"method": Renamed}, CheckpointError, "'my-fedavg' does not take"),
}


def test_a_fit_over_numbered_clients_comes_back(tmp_path):
    federation = lazy_population(6, dim=3, k=2)
    fitted = fit(Population(nn.Linear(3, 2), k=2), federation, PPFL(lr=0.1), rounds=1)
    again = load(fitted.save(tmp_path / "fit"))
    assert again.ids == fitted.ids == federation.ids
    assert torch.equal(again.predict(federation.ids[5], torch.eye(3)), fitted.predict("c5", torch.eye(3)))


@pytest.mark.parametrize("name", REFUSED)
def test_classes_of_ones_own_are_asked_for(name, files):
    passed, *expected = REFUSED[name]
    assert_refused(lambda: load(files[name.split(",")[0]], **passed), *expected)
    mine = MyFedAvg(lr=0.2)
    assert load(files["own method"], method=mine).method is mine


def test_a_damaged_file_and_one_of_other_content_is_refused(files, tmp_path):
    path, whole = tmp_path / "fit", files["fedavg"].read_bytes()
    for at in range(100, len(whole), len(whole) // 60):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert_refused(lambda: load(path), CheckpointError)
    path.write_bytes(whole[: len(whole) // 2])
    assert_refused(lambda: load(path), CheckpointError, "damaged")
    assert_refused(lambda: load(tmp_path / "nowhere"), CheckpointError, "nowhere")
    assert_refused(lambda: fitted_by("fedavg").save(tmp_path), CheckpointError, "is a folder")
    assert_refused(lambda: fitted_by("fedavg").save(tmp_path / "no" / "fit"), CheckpointError, "there is no folder")
    networks = (("Module", {"x": 1}), ("functional", {}), ("Linear", [10**15] * 2))
    populations = ({"network": {"type": kind, "arguments": arguments}} for kind, arguments in networks)
    changes = [({}, {"problem": None}), *((population, {}) for population in populations)]
    for population, others in changes:
        path.write_bytes(whole)
        change_saved(path, population, **others)
        assert_refused(lambda: load(path), (CheckpointError, ModelError))
