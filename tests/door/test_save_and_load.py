"""A fitted population that is saved and loaded: the same bits in another process, and clear errors."""

import copy
import functools
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from kit.problems import make_federation, make_net, power
from kit.refusals import CheckpointError, ModelError, SettingError, assert_refused
from kit.saved_fits import built_again, read_saved, rewrite_saved
from ppfl import PPFL, FedAvg, Federation, Fitted, Local, Population, fit, load
from ppfl.algorithms import CFL, IFCA, Ditto, FedEM, FineTune
from ppfl.core import LOSSES

FEDERATION = make_federation((17, 12, 30, 9), test_fraction=0.3)
NUMBERS = Federation.from_arrays(FEDERATION.train.x, FEDERATION.train.x[:, :3] ** 2, ["a"] * 20 + ["b"] * 27)
X = FEDERATION.train.x[:5]


def with_constants() -> nn.Module:
    """With everything that a network can have beside trained weights: dropout, frozen layers, buffers, a mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        last = nn.Sequential(nn.Linear(6, 3))
        net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6).eval(), nn.Tanh(), nn.Dropout(0.3), last)
        net[0].requires_grad_(False)
        net[1].running_mean.normal_()
    return net


class Own(nn.Module):
    """With code of its own, and a buffer that is not in its state_dict."""

    def __init__(self, hidden: int = 5) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, hidden), nn.Linear(hidden, 3)
        self.register_buffer("memberships", torch.tensor([-torch.inf, 0.0, 0.0]), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).relu()) + self.memberships.clamp_min(-5)


def own_frozen() -> nn.Module:
    net = Own()
    net.first.requires_grad_(False)
    return net


class MyFedAvg(FedAvg):
    name = "my-fedavg"
    mine: float = 1.0


CASES = {
    "outputs": (PPFL(lr=0.3), {"k": 3}),
    "predictions": (PPFL(lr=0.3), {"k": 3, "mix": "predictions"}),
    "weights": (PPFL(lr=0.3), {"k": 3, "mix": "weights"}),
    "private": (PPFL(lr=0.3, share_memberships=False), {"k": 2}),
    "fedavg": (FedAvg(lr=0.3), {"k": 1}),
    "local": (Local(lr=0.3), {"k": 1}),
    "ditto": (Ditto(lr=0.3), {"k": 1}),
    "finetune": (FineTune(method=PPFL(lr=0.3)), {"k": 2, "mix": "weights"}),
    "fedem": (FedEM(lr=0.3), {"k": 2, "mix": "predictions"}),
    "ifca": (IFCA(lr=0.3), {"k": 2}),
    "cfl": (CFL(lr=0.3), {"k": 2}),
    "constants": (PPFL(lr=0.3), {"net": with_constants, "k": 3, "mix": "weights", "canonical": "4"}),
    "own network": (PPFL(lr=0.3), {"net": own_frozen, "k": 3}),
    "own loss": (PPFL(lr=0.1), {"k": 2, "loss": power}),
    "own method": (MyFedAvg(lr=0.1, mine=2.0), {"k": 1}),
}
OWN_LOSS = Population(make_net(), k=1, loss=power).loss  # a function is not enough to load a fit
PASSED = {"own network": {"net": Own()}, "own loss": {"loss": OWN_LOSS}, "own method": {"method": MyFedAvg}}


@functools.cache
def fitted_by(name: str) -> Fitted:
    method, settings = CASES[name]
    settings = dict(settings)
    net = settings.pop("net", make_net)()
    return fit(Population(net, **settings), NUMBERS if name == "own loss" else FEDERATION, method, rounds=3)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every case, saved."""
    folder = tmp_path_factory.mktemp("fits")
    return {name: fitted_by(name).save(folder / name.replace(" ", "-")) for name in CASES}


def assert_same_fit(one: Fitted, other: Fitted, folder: Path) -> None:
    """Saved again they are the same bytes, so that nothing differs that a file has."""
    assert one.ids == other.ids and one.history == other.history and one.method == other.method
    for client in one.ids:
        assert torch.equal(one.predict(client, X), other.predict(client, X))
    first, second = one.save(folder / "one"), other.save(folder / "other")
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("name", CASES)
def test_everything_comes_back(name: str, files, tmp_path: Path) -> None:
    fitted, again = fitted_by(name), load(files[name], **PASSED.get(name, {}))
    assert_same_fit(fitted, again, tmp_path)
    assert torch.equal(fitted.memberships, again.memberships)
    if name != "own loss":
        one, other = fitted.evaluate(FEDERATION), again.evaluate(FEDERATION)
        assert torch.equal(one.loss, other.loss) and torch.equal(one.score, other.score)
    ours, theirs = fitted.population.architecture, again.population.architecture
    assert [m.training for m in ours.modules()] == [m.training for m in theirs.modules()]
    assert [p.requires_grad for p in ours.parameters()] == [p.requires_grad for p in theirs.parameters()]
    for a, b in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        assert torch.equal(a, b)


PREDICT = """
import sys, torch, ppfl
for path in sys.argv[1:]:
    fitted = ppfl.load(path)
    x = torch.load(path + ".x", weights_only=True)
    torch.save({client: fitted.predict(client, x) for client in fitted.ids}, path + ".y")
"""


@pytest.mark.processes
def test_predictions_in_another_process_have_the_same_bits(files) -> None:
    paths = {name: str(path) for name, path in files.items() if name not in PASSED}
    for path in paths.values():
        torch.save(X, f"{path}.x")
    subprocess.run([sys.executable, "-W", "error", "-c", PREDICT, *paths.values()], check=True)
    for name, path in paths.items():
        there = torch.load(f"{path}.y", weights_only=True)
        assert set(there) == set(fitted_by(name).ids)
        for client, found in there.items():
            assert torch.equal(found, fitted_by(name).predict(client, X)), name


def test_populations_and_fits_can_be_copied_and_pickled(tmp_path: Path) -> None:
    for name in ("constants", "ditto", "finetune"):
        for again in (copy.deepcopy(fitted_by(name)), pickle.loads(pickle.dumps(fitted_by(name)))):
            assert_same_fit(fitted_by(name), again, tmp_path)
    population = Population(with_constants(), k=2)
    first, *others = (
        fit(each, FEDERATION, PPFL(lr=0.1), rounds=2)
        for each in (population, copy.deepcopy(population), pickle.loads(pickle.dumps(population)))
    )
    for other in others:
        assert torch.equal(first.predict("client-0", X), other.predict("client-0", X))


# ---------------------------------------------------------------------- networks that need no code


def test_chains_of_torchs_layers_are_built_again() -> None:
    chains = [
        (nn.Linear(4, 3, bias=False), (4,)),
        ([nn.Conv2d(1, 4, 3, padding=1, stride=2), nn.GroupNorm(2, 4), nn.GELU("tanh"), nn.Flatten()], (1, 8, 8)),
        ([nn.Conv2d(2, 4, (1, 3), padding="same", groups=2), nn.MaxPool2d((2, 1)), nn.Flatten(1, 2)], (2, 8, 8)),
        ([nn.LayerNorm((4, 2), eps=1e-3), nn.Unflatten(1, (2, 2)), nn.LeakyReLU(0.3)], (4, 2)),
        ([nn.Sequential(nn.Linear(4, 4), nn.PReLU(4)), nn.Softplus(2.0), nn.Dropout(0.4)], (4,)),
        ([nn.ConvTranspose1d(2, 3, 4, output_padding=1, stride=2), nn.AdaptiveAvgPool1d(3)], (2, 6)),
        ([nn.Embedding(7, 3, padding_idx=2), nn.Flatten(), nn.BatchNorm1d(6), nn.Linear(6, 2)], (2,)),
    ]
    for layers, shape in chains:
        net = nn.Sequential(*layers) if isinstance(layers, list) else layers
        again = built_again(net)
        assert str(again) == str(net)
        x = torch.arange(3 * torch.Size(shape).numel()).reshape(3, *shape) % 7
        x = x if "Embedding" in str(net) else x / 7
        assert torch.equal(again.eval()(x), net.eval()(x))


def test_what_torchs_layers_do_not_say_is_not_guessed() -> None:
    hooked, patched = nn.Linear(4, 3), nn.Linear(4, 3)
    hooked.register_forward_hook(lambda _m, _x, out: out * 2)
    patched.forward = lambda x: x
    tied = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tied[1].weight = tied[0].weight
    twice = nn.Sequential(*[nn.Linear(4, 4)] * 2)
    parametrised = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    for net in (Own(), nn.Sequential(Own()), hooked, patched, tied, twice, parametrised):
        assert built_again(net) is None
    assert built_again(nn.TransformerEncoderLayer(4, 2)) is None


# ---------------------------------------------------------------------- refusals

REFUSED = {
    "own network": ({}, ModelError, "ppfl.load(path, net=net)"),
    "own network, wider": ({"net": Own(hidden=7)}, ModelError, "'first.weight'", "(7, 4)", "(5, 4)"),
    "own network, another": ({"net": make_net()}, ModelError, "'0.bias'"),
    "own loss": ({}, ModelError, "'power'", "loss="),
    "own loss, another": ({"loss": LOSSES["squared"]}, ModelError, "'power'", "'squared'"),
    "own method": ({}, SettingError, "'my-fedavg'", "method="),
    "own method, another": ({"method": FedAvg}, SettingError, "'my-fedavg'", "'fedavg'"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_classes_of_ones_own_are_asked_for(name: str, files) -> None:
    passed, *expected = REFUSED[name]
    assert_refused(lambda: load(files[name.split(",")[0]], **passed), *expected)


def test_an_object_of_ones_own_method_serves_as_its_class_does(files, tmp_path: Path) -> None:
    again = load(files["own method"], method=MyFedAvg(lr=0.1, mine=2.0))
    assert load(files["own method"], method=MyFedAvg).method.mine == 2.0
    assert_same_fit(fitted_by("own method"), again, tmp_path)


def test_a_damaged_file_is_refused(files, tmp_path: Path) -> None:
    path, whole = tmp_path / "fit", files["fedavg"].read_bytes()
    for at in range(100, len(whole), len(whole) // 60):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        assert_refused(lambda: load(path), CheckpointError)
    path.write_bytes(whole[: len(whole) // 2])
    assert_refused(lambda: load(path), CheckpointError, "damaged")
    assert_refused(lambda: load(tmp_path / "nowhere"), CheckpointError, "nowhere")
    assert_refused(lambda: load(tmp_path), CheckpointError, "no run in")
    assert_refused(lambda: fitted_by("fedavg").save(tmp_path), CheckpointError, "is a folder")
    assert_refused(lambda: fitted_by("fedavg").save(tmp_path / "a" / "b"), CheckpointError, "no folder")


def test_a_whole_file_of_another_version_or_content_is_refused(tmp_path: Path) -> None:
    path = fitted_by("fedavg").save(tmp_path / "fit")
    about = read_saved(path)
    network = lambda kind, arguments: {  # noqa: E731
        "population": about["population"] | {"network": {"type": kind, "arguments": arguments}}
    }
    contents = [
        (about | {"version": 99}, "version 99"),
        ({"anything": 1}, "no fitted population"),
        (about | network("Module", {"x": 1}), ""),
        (about | network("functional", {}), ""),
        (about | network("Linear", [10**15] * 2), ""),
        (about | {"population": about["population"] | {"k": "many"}}, ""),
        (about | {"data": {}}, ""),
        (about | {"problem": None}, ""),
        (about | {"method": about["method"] | {"settings": {"lr": "fast"}}}, ""),
    ]
    for content, words in contents:
        rewrite_saved(path, content)
        assert_refused(lambda: load(path), (CheckpointError, ModelError), words)
