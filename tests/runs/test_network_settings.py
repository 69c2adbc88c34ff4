"""Networks take their sizes from the data and their values from the seed."""

import pytest
import torch

from ppfl import fit
from ppfl.algorithms import METHODS, FedAvg
from ppfl.core import ModelError, Population
from ppfl.core.backends import make_backend
from ppfl.core.losses import LOSSES
from ppfl.core.models import Mixture
from ppfl.data import Federation, synthetic_groups
from ppfl.runs.network_contract import choose_loss
from ppfl.runs.network_settings import Cnn, Linear, Perceptron
from ppfl.sites import Loop, Stacked


@pytest.fixture
def images() -> Federation:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(30, 1, 8, 8, generator=generator)
    return Federation.from_arrays(x, [0, 1, 2] * 10, ["a"] * 10 + ["b"] * 20)


PERCEPTRONS = [Perceptron(hidden=5), Perceptron(hidden=[5, 4])]
CNNS = [Cnn(channels=[4, 8]), Cnn(channels=[4, 8], hidden=[6, 5])]
NETWORKS = [Linear(), Linear(bias=False), *PERCEPTRONS, *CNNS]


@pytest.mark.parametrize("network", NETWORKS, ids=repr)
def test_a_network_fits_its_data_and_ends_in_its_classifier(network, images):
    net = network.build(images, 0, choose_loss(None, images))
    assert net(images.train.x[:5]).shape == (5, 3)
    population = Population(net, k=2, canonical="classifier")
    assert make_backend(population, images.train.x[:2], images.train.y, 3).caches_outputs


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


def test_without_hidden_layers_a_cnn_is_its_convolutions_and_a_classifier(images):
    ends = [Cnn(channels=[4, 8], hidden=widths).build(images, 0, LOSSES["cross_entropy"]) for widths in ([], [6])]
    assert [name for name, _ in ends[0].named_children()] == ["body", "classifier"]
    assert [name for name, _ in ends[1].named_children()] == ["body", "hidden", "classifier"]
    for name, leaf in ends[0].body.named_parameters():
        assert torch.equal(leaf, ends[1].body.get_parameter(name))


HEADS = [["hidden", "classifier"], ["hidden.1", "classifier"], "classifier"]


@pytest.mark.parametrize("canonical", HEADS, ids=str)
@pytest.mark.parametrize("mix", ["outputs", "weights"])
def test_the_last_layers_of_a_cnn_can_be_canonical(canonical, mix, images):
    net = Cnn(channels=[4, 8], hidden=[6, 5]).build(images, 0, LOSSES["cross_entropy"])
    population = Population(net, k=4, canonical=canonical, mix=mix)
    backend = make_backend(population, images.train.x[:2], images.train.y, 3)
    models, x = population.initial_models(0, distinct=True), images.train.x
    common, theta = population.split(models)
    assert any(name.startswith("body.") for name in common)
    assert all(name.startswith(("hidden.", "classifier.")) for name in theta)
    for k in range(4):  # a membership at a corner picks one network
        one = common | {name: leaf[k] for name, leaf in theta.items()}
        expected = torch.func.functional_call(net, one, x).softmax(-1)
        found = backend.predict(Mixture(models, torch.eye(4)[k : k + 1]), x[None])[0]
        torch.testing.assert_close(found, expected)


NAMES = ["fedavg", "fedem", "pfedme", "lg-fedavg", "cfl", "ppfl outputs", "ppfl weights"]


@pytest.mark.parametrize("name", NAMES)
def test_every_kind_of_method_trains_a_cnn_with_hidden_layers(name):
    method, _, mix = name.partition(" ")
    y, x = torch.arange(40) % 2, torch.rand(40, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    x[y == 0, :, :4] += 1  # the upper half is lit, or the lower
    x[y == 1, :, 4:] += 1
    halves = Federation.from_arrays(x, y, torch.arange(40) // 10, test_fraction=0)
    net = Cnn(channels=[4, 8], hidden=[6, 5]).build(halves, 0, LOSSES["cross_entropy"])
    many = {"k": 4, "mix": mix or "predictions"} if method in ("fedem", "ppfl") else {"k": 1}
    population = Population(net, canonical=["hidden", "classifier"] if method == "ppfl" else "all", **many)
    fitted = fit(population, halves, METHODS[method](lr=0.1, batch_size=5), rounds=8)
    losses = [record["loss"] for record in fitted.history if record["loss"] == record["loss"]]  # a survey has none
    assert losses[-1] < losses[0]


def test_convolutions_are_the_same_on_both_engines(images):
    net = Cnn(channels=[4], groups=2).build(images, 0, LOSSES["cross_entropy"])
    ends = [
        fit(Population(net, k=1), images, FedAvg(batch_size=4), rounds=2, engine=engine).state.server.shared
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
    with pytest.raises(ModelError, match="8 x 8 pixels are too small to halve 4 times; use.*fewer channels"):
        Cnn(channels=[4, 4, 4, 4]).build(images, 0, LOSSES["cross_entropy"])
    with pytest.raises(ModelError, match="real targets.*'squared'"):
        Linear().build(synthetic_groups(task="regression"), 0, LOSSES["cross_entropy"])
