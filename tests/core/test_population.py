"""A population splits a network into common and canonical parts and constants, and refuses what it cannot hold."""

import copy

import pytest
import torch
from torch import nn

from kit.networks import PartlyFrozen, make_net, with_seed
from kit.refusals import ModelError, SettingError, assert_refused
from ppfl.core import Population
from ppfl.core.backends import make_backend
from ppfl.core.parts import freeze, parameters_of
from ppfl.core.population import OneNetwork

TRAINED = {"body.2.weight", "body.2.bias", "norm.weight", "norm.bias", "head.weight", "head.bias"}


def zeros_of(population):
    return {name: torch.zeros_like(value) for name, value in population.initial_network().items()}


def test_common_layers_have_one_copy_starts_come_from_the_seed_and_the_given_network_is_left_alone():
    net, before = make_net(), make_net().state_dict()
    population = Population(net, k=3, canonical="2")
    models = population.initial_models(0)
    common, canonical = population.split(models)
    assert set(common) == {"0.weight", "0.bias"} == population.common_names
    assert canonical["2.weight"].shape == (3, 3, 5) and models["0.weight"].shape == (5, 4)
    assert canonical["2.weight"][1].equal(canonical["2.weight"][2])
    a, b, other = (population.initial_models(seed, distinct=True)["2.weight"] for seed in (5, 5, 6))
    assert a.equal(b)
    assert not a[1].equal(a[2]) and not a[1].equal(other[1])
    models["0.weight"].zero_()
    population.load(zeros_of(population))
    assert all(value.equal(before[name]) for name, value in net.state_dict().items())


def test_what_is_frozen_is_a_constant():
    net = with_seed(PartlyFrozen)
    population = Population(net, k=3, canonical="head")
    assert population.initial_network().keys() == TRAINED == population.canonical_names | population.common_names
    assert population.initial_models(0, distinct=True).keys() == population.initial_models(0).keys() == TRAINED
    sizes = sum(p.numel() for name, p in net.named_parameters() if name in TRAINED)
    assert Population(net, k=1).bytes_of_local_run == 8 * sizes
    population.load(zeros_of(population))
    for name, value in population.net.state_dict().items():
        assert bool(value.any()) == (name not in TRAINED)


def test_layers_in_evaluation_mode_stay_in_it():
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    layers = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 3)
    net = with_seed(lambda: nn.Sequential(*layers))
    net(3 + 2 * x)
    assert_refused(lambda: Population(net, k=2), ModelError, "'1' (BatchNorm1d)", "GroupNorm", ".eval()")
    net[1].eval()
    assert Population(net, k=2).mask_keys == ("3.key",)
    population = Population(net.eval(), k=2)
    assert population.mask_keys == () and "1.running_mean" not in population.initial_network()
    backend = make_backend(population, x, torch.arange(6) % 3, 3)
    found = backend.predict(OneNetwork(population.initial_network()), x[None])[0]
    torch.testing.assert_close(found, net(x).softmax(1))


TIED_TO_ITS_PARENT = nn.Sequential(nn.Linear(4, 3))
TIED_TO_ITS_PARENT.register_parameter("own", TIED_TO_ITS_PARENT[0].weight)
REFUSED = {
    "all frozen": (make_net().requires_grad_(False), {}, "no parameters to train"),
    "a module": (make_net(), {"canonical": make_net()[0]}, "name"),
    "no part": (make_net(), {"canonical": ()}, "at least one"),
    "a part tied to what holds it": (TIED_TO_ITS_PARENT, {"canonical": "0"}, "'own'", "canonical='all'"),
    "a part of a part": (nn.Sequential(make_net()), {"canonical": ["0", "0.2"]}, "'0.2' twice"),
    "a frozen part": (PartlyFrozen(), {"canonical": "body.0"}, "'body.0'", "frozen", "'body', 'body.2', 'head'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_a_population_is_refused(case):
    net, settings, *words = REFUSED[case]
    assert_refused(lambda: Population(net, **{"k": 2, **settings}), ModelError, *words)


DEEP = nn.Sequential(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 6), nn.ReLU()), nn.Linear(6, 3))
TIED = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("encoder", "middle", "decoder")})
TIED["decoder"].weight = TIED["encoder"].weight
NAMED = nn.ModuleDict({"output": nn.Linear(1, 1), "then": nn.Linear(1, 1)})
ONE_TRAINED = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 6), nn.Linear(6, 3)).requires_grad_(False)
ONE_TRAINED[1].weight.requires_grad_(True)


@pytest.mark.parametrize(
    ("net", "part", "expected"),
    [
        (DEEP, "input", {"0.0.weight", "0.0.bias"}),
        (DEEP, "output", {"1.weight", "1.bias"}),
        (DEEP, "0", {"0.0.weight", "0.0.bias", "0.2.weight", "0.2.bias"}),
        (DEEP, ("0.2", "output"), {"0.2.weight", "0.2.bias", "1.weight", "1.bias"}),
        (NAMED, "output", {"output.weight", "output.bias"}),
        (TIED, "output", {"encoder.weight", "decoder.bias"}),
        (ONE_TRAINED, "output", {"1.weight"}),
    ],
)
def test_parts_are_named_as_the_network_names_them(net, part, expected):
    assert parameters_of(net, part, "personal_part") == expected
    frozen, all_names = copy.deepcopy(net), {name for name, p in net.named_parameters() if p.requires_grad}
    if expected != all_names:
        freeze(frozen, part)
        assert {name for name, p in frozen.named_parameters() if p.requires_grad} == all_names - expected
    else:
        assert_refused(lambda: freeze(frozen, part), SettingError, "nothing to train")
