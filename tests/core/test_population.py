"""A population splits a network into common and canonical parts and constants, and refuses what it cannot hold."""

import pytest
import torch
from torch import nn

from kit.networks import PartlyFrozen, make_net, with_seed
from kit.refusals import ModelError, assert_refused
from ppfl.core import Population
from ppfl.core.backends import make_backend
from ppfl.core.models import OneNetwork

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.tensor([0, 1, 2, 0, 1, 2])
TRAINED = {"body.2.weight", "body.2.bias", "norm.weight", "norm.bias", "head.weight", "head.bias"}


def test_common_layers_have_one_copy_and_distinct_starts_come_from_the_seed() -> None:
    population = Population(make_net(), k=3, canonical="2")
    models = population.initial_models(0)
    common, canonical = population.split(models)
    assert set(common) == {"0.weight", "0.bias"} == population.common_names
    assert canonical["2.weight"].shape == (3, 3, 5) and models["0.weight"].shape == (5, 4)
    assert canonical["2.weight"][1].equal(canonical["2.weight"][2])
    a, b, other = (population.initial_models(seed, distinct=True)["2.weight"] for seed in (5, 5, 6))
    assert a.equal(b)
    assert not a[1].equal(a[2]) and not a[1].equal(other[1])


def test_the_given_network_is_left_alone() -> None:
    net = make_net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    population = Population(net, k=2)
    population.initial_models(0)["0.weight"].zero_()
    population.load({name: torch.zeros_like(value) for name, value in population.initial_network().items()})
    assert all(value.equal(before[name]) for name, value in net.state_dict().items())


def test_what_is_frozen_is_a_constant() -> None:
    """Their gradients and predictions are in the laws of backends."""
    net = with_seed(PartlyFrozen)
    population = Population(net, k=3, canonical="head")
    assert population.initial_network().keys() == TRAINED == population.canonical_names | population.common_names
    for distinct in (True, False):
        assert population.initial_models(0, distinct=distinct).keys() == TRAINED
    sizes = sum(p.numel() for name, p in net.named_parameters() if name in TRAINED)
    assert Population(net, k=1).bytes_of_local_run == 8 * sizes
    assert Population(net, k=2, canonical="body").canonical_names == {"body.2.weight", "body.2.bias"}
    population.load({name: torch.zeros_like(value) for name, value in population.initial_network().items()})
    for name, value in population.net.state_dict().items():
        assert bool(value.any()) == (name not in TRAINED)


def test_layers_in_evaluation_mode_stay_in_it() -> None:
    """Statistics stay as they are, and dropout is off."""
    layers = nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 3)
    net = with_seed(lambda: nn.Sequential(*layers))
    net(3 + 2 * X)
    assert_refused(lambda: Population(net, k=2), ModelError, "'1' (BatchNorm1d)", "GroupNorm", ".eval()")
    net[1].eval()
    assert Population(net, k=2).mask_keys == ("3.key",)
    population = Population(net.eval(), k=2)
    assert population.mask_keys == () and "1.running_mean" not in population.initial_network()
    found = make_backend(population, X, Y, 3).predict(OneNetwork(population.initial_network()), X[None])[0]
    torch.testing.assert_close(found, net(X).softmax(1))


REFUSED = {
    "statistics": (nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), {}, "GroupNorm"),
    "hidden draws": (nn.Sequential(nn.Linear(4, 3), nn.RReLU()), {}, "LeakyReLU"),
    "nothing to train": (nn.ReLU(), {}, "no parameters to train"),
    "all frozen": (make_net().requires_grad_(False), {}, "no parameters to train"),
    "a module": (make_net(), {"canonical": make_net()[0]}, "name"),
    "a part that is not there": (make_net(), {"canonical": "head"}, "'0', '2'"),
    "no part": (make_net(), {"canonical": []}, "at least one"),
    "a part twice": (make_net(), {"canonical": ["0", "0"]}, "each once"),
    "a part of a part": (nn.Sequential(make_net()), {"canonical": ["0", "0.2"]}, "'0.2' twice"),
    "a frozen part": (PartlyFrozen(), {"canonical": "body.0"}, "'body.0'", "frozen", "'body', 'body.2', 'head'"),
    "another mix": (make_net(), {"mix": "votes"}, "'outputs', 'predictions', 'weights'"),
    "no model": (make_net(), {"k": 0}, "k >= 1"),
    "another loss": (make_net(), {"loss": "hinge"}, "cross_entropy"),
    "another start": (make_net(), {"start": {"0.weight": torch.zeros(5, 7)}}, "'0.weight'", "(5, 7)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_a_population_is_refused(case: str) -> None:
    net, settings, *words = REFUSED[case]

    def make(start=None, **settings) -> None:
        population = Population(net, **{"k": 2, **settings})
        if start is not None:
            population.start_from(start)

    assert_refused(lambda: make(**settings), ModelError, *words)
