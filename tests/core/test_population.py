"""A population splits a network into common and canonical parts, and refuses what it cannot hold."""

import pytest
import torch
from torch import nn

from kit.problems import make_net
from ppfl.core.errors import ModelError
from ppfl.core.population import Population


def test_common_layers_have_one_copy() -> None:
    population = Population(make_net(), k=3, canonical="2")
    models = population.initial_models(0)
    common, canonical = population.split(models)
    assert set(common) == {"0.weight", "0.bias"} == population.common_names
    assert canonical["2.weight"].shape == (3, 3, 5) and models["0.weight"].shape == (5, 4)


def test_distinct_starts_differ_and_come_from_the_seed() -> None:
    population = Population(make_net(), k=3)
    a, b, other = (population.initial_models(seed, distinct=True)["0.weight"] for seed in (5, 5, 6))
    assert a.equal(b)
    assert not a[1].equal(a[2])
    assert not a[1].equal(other[1])


def test_the_given_network_is_left_alone() -> None:
    net = make_net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    population = Population(net, k=2)
    population.initial_models(0)["0.weight"].zero_()
    population.load({name: torch.zeros_like(value) for name, value in population.initial_network().items()})
    assert all(value.equal(before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize(
    ("net", "settings", "words"),
    [
        (nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), {}, "GroupNorm"),
        (nn.Sequential(nn.Linear(4, 3), nn.RReLU()), {}, "LeakyReLU"),
        (nn.ReLU(), {}, "no parameters to train"),
        (make_net().requires_grad_(False), {}, "no parameters to train"),
        (make_net(), {"canonical": make_net()[0]}, "name"),
        (make_net(), {"loss": 2}, "ppfl.core.Loss"),
        (make_net(), {"canonical": "head"}, "'0', '2'"),
        (make_net(), {"canonical": []}, "at least one"),
        (make_net(), {"mix": "votes"}, "'outputs', 'predictions', 'weights'"),
        (make_net(), {"k": 0}, "k >= 1"),
        (make_net(), {"loss": "hinge"}, "cross_entropy"),
    ],
)
def test_what_cannot_be_a_population_is_refused_with_a_remedy(net: nn.Module, settings: dict, words: str) -> None:
    with pytest.raises(ModelError, match=words):
        Population(net, **{"k": 2, **settings})
