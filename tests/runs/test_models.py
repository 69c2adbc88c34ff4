"""Networks take their sizes from the data and their values from the seed."""

import pytest
import torch

from ppfl.algorithms import FedAvg
from ppfl.core import ModelError, Population
from ppfl.core.losses import LOSSES
from ppfl.data import Federation, synthetic_groups
from ppfl.engines import Loop, Stacked, fit
from ppfl.runs.models import Cnn, Linear, Perceptron, choose_loss


@pytest.fixture
def images() -> Federation:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(30, 1, 8, 8, generator=generator)
    return Federation.from_arrays(x, [0, 1, 2] * 10, ["a"] * 10 + ["b"] * 20)


NETWORKS = [Linear(), Linear(bias=False), Perceptron(hidden=5), Perceptron(hidden=[5, 4]), Cnn(channels=[4, 8])]


@pytest.mark.parametrize("network", NETWORKS, ids=repr)
def test_a_network_fits_its_data_and_ends_in_its_classifier(network, images):
    net = network.build(images, 0, choose_loss(None, images))
    assert net(images.train.x[:5]).shape == (5, 3)
    population = Population(net, k=2, canonical="classifier").fit_to(images.train.x[:2], images.train.y, 3)
    assert population.caches_outputs


@pytest.mark.parametrize("network", NETWORKS, ids=repr)
def test_values_come_from_the_seed_and_from_nothing_else(network, images):
    def values(seed: int) -> torch.Tensor:
        net = network.build(images, seed, choose_loss(None, images))
        return torch.cat([p.detach().flatten() for p in net.parameters()])

    state = torch.random.get_rng_state()
    first = values(3)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(17)
    assert torch.equal(values(3), first)
    assert not torch.equal(values(4), first)


def test_bias_is_a_choice(images):
    assert "classifier.bias" not in dict(
        Linear(bias=False).build(images, 0, LOSSES["cross_entropy"]).named_parameters()
    )


def test_convolutions_are_the_same_on_both_engines(images):
    net = Cnn(channels=[4], groups=2).build(images, 0, LOSSES["cross_entropy"])
    ends = [
        fit(Population(net, k=1), images, FedAvg(batch_size=4), rounds=2, engine=engine).state.server.shared.canonical
        for engine in (Loop(), Stacked())
    ]
    for name, leaf in ends[0].items():
        torch.testing.assert_close(leaf, ends[1][name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(("task", "expected"), [("classification", "cross_entropy"), ("regression", "squared")])
def test_the_usual_loss_follows_the_targets(task, expected):
    assert choose_loss(None, synthetic_groups(task=task)).name == expected


@pytest.mark.parametrize(
    ("task", "loss", "outputs"),
    [
        ("classification", "cross_entropy", 2),
        ("classification", "logistic", 1),
        ("regression", "squared", 1),
        ("regression", "poisson", 1),
    ],
)
def test_outputs_follow_the_loss(task, loss, outputs):
    federation = synthetic_groups(task=task)
    net = Linear().build(federation, 0, choose_loss(loss, federation))
    assert net(federation.train.x[:5]).shape == (5, outputs)


def test_what_does_not_fit_says_what_does(images):
    with pytest.raises(ModelError, match=r"shape \(8,\).*perceptron"):
        Cnn().build(synthetic_groups(), 0, LOSSES["cross_entropy"])
    with pytest.raises(ModelError, match="8 x 8 pixels are too small to halve 4 times; give fewer"):
        Cnn(channels=[4, 4, 4, 4]).build(images, 0, LOSSES["cross_entropy"])
    with pytest.raises(ModelError, match="real targets.*'squared'"):
        Linear().build(synthetic_groups(task="regression"), 0, LOSSES["cross_entropy"])
