"""What is frozen is a constant: parameters with requires_grad=False, buffers, and layers in evaluation mode."""

import copy

import pytest
import torch
from torch import nn

from kit.problems import make_net
from ppfl.core.backends import Autograd, Batch, make_backend
from ppfl.core.errors import ModelError
from ppfl.core.models import Mixture, OneNetwork
from ppfl.core.population import Population

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.tensor([0, 1, 2, 0, 1, 2])
C = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]], dtype=torch.float64)
MIXES = ["outputs", "predictions", "weights"]


class Scaled(nn.Module):
    """A frozen layer, a buffer, a body of which a part is frozen, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Linear(4, 5).requires_grad_(False)
        self.register_buffer("scale", torch.full((5,), 0.5))
        self.body = nn.Sequential(nn.Linear(5, 5).requires_grad_(False), nn.Tanh(), nn.Linear(5, 5))
        self.head = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.relu(self.body(self.scale * self.embedding(x))))


def scaled() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Scaled().double()


TRAINED = {"body.2.weight", "body.2.bias", "head.weight", "head.bias"}


def test_start_values_hold_what_is_trained_and_nothing_else() -> None:
    net = scaled()
    population = Population(net, k=3, canonical="head")
    assert population.initial_network().keys() == TRAINED
    assert population.canonical_names | population.common_names == TRAINED
    for distinct in (True, False):
        models = population.initial_models(0, distinct=distinct)
        assert models.keys() == TRAINED and models["body.2.weight"].shape == (5, 5)
    numbers = {name: p.numel() for name, p in net.named_parameters() if name in TRAINED}
    assert Population(net, k=1).bytes_of_local_run == 8 * sum(numbers.values())


def test_other_start_values_leave_constants_alone() -> None:
    population = Population(scaled(), k=2)
    population.load({name: torch.zeros_like(value) for name, value in population.initial_network().items()})
    for name, value in population.net.state_dict().items():
        assert bool(value.any()) == (name not in TRAINED)


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("canonical", ["all", "body", "head"])
def test_models_share_their_constants(mix: str, canonical: str) -> None:
    """Against K ordinary networks, of which the frozen part is the same."""
    net = scaled()
    population = Population(net, k=3, canonical=canonical, mix=mix)
    backend = Autograd(population, X, Y, 3)
    models = population.initial_models(3, distinct=True)

    def plain(values) -> nn.Module:
        one = copy.deepcopy(net)
        one.load_state_dict(values, strict=False)
        return one

    each = [
        plain({name: leaf[k] if name in population.canonical_names else leaf for name, leaf in models.items()})
        for k in range(3)
    ]
    found = backend.predict(Mixture(models, C), torch.stack([X, X + 1]))
    for c, x, predicted in zip(C, (X, X + 1), found, strict=True):
        if mix == "weights":
            mixed = {
                name: torch.tensordot(c, leaf, 1) if name in population.canonical_names else leaf
                for name, leaf in models.items()
            }
            expected = plain(mixed)(x).softmax(1)
        elif mix == "predictions":
            expected = sum(c[k] * one(x).softmax(1) for k, one in enumerate(each))
        elif canonical == "body":
            hidden = sum(c[k] * one.body(net.scale * net.embedding(x)) for k, one in enumerate(each))
            expected = net.head(torch.relu(hidden)).softmax(1)
        else:
            expected = sum(c[k] * one(x) for k, one in enumerate(each)).softmax(1)
        torch.testing.assert_close(predicted, expected)


@pytest.mark.parametrize("make", [Autograd, make_backend])
def test_gradients_are_those_of_what_is_trained(make) -> None:
    net = scaled()
    backend = make(Population(net, k=1), X, Y, 3)
    networks = {name: value[None].clone() for name, value in backend.population.initial_network().items()}
    velocity = {name: torch.empty_like(value) for name, value in networks.items()}
    even, at = torch.full((1, 6), 1 / 6, dtype=torch.float64), torch.arange(6)[None]
    loss = backend.add_gradients(networks, velocity, 0.0, Batch(X[None], Y[None], even, torch.tensor([6]), at, None))
    expected = nn.functional.cross_entropy(net(X), Y)
    expected.backward()
    torch.testing.assert_close(loss[0], expected.detach())
    assert velocity.keys() == TRAINED
    for name, p in net.named_parameters():
        assert (p.grad is None) == (name not in TRAINED)
        if p.grad is not None:
            torch.testing.assert_close(velocity[name][0], p.grad)


def test_a_canonical_part_that_is_frozen_is_refused() -> None:
    for name in ("embedding", "body.0"):
        with pytest.raises(ModelError, match=rf"canonical names '{name}', which is frozen.*'body', 'body.2', 'head'"):
            Population(scaled(), k=2, canonical=name)
    assert Population(scaled(), k=2, canonical="body").canonical_names == {"body.2.weight", "body.2.bias"}


# ---------------------------------------------------------------------- layers in evaluation mode


def normalised() -> nn.Module:
    """With running statistics that are not the first ones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.ReLU(), nn.Dropout(0.5), nn.Linear(5, 3)).double()
        net(3 + 2 * torch.randn(100, 4, dtype=torch.float64))
    return net


def test_batch_norm_is_refused_while_it_learns_and_accepted_once_it_is_fixed() -> None:
    net = normalised()
    with pytest.raises(ModelError, match=r"'1' \(BatchNorm1d\).*GroupNorm.*\.eval\(\)"):
        Population(net, k=2)
    net[1].eval()
    population = Population(net, k=2)
    assert "1.running_mean" not in population.initial_network()
    assert "1.weight" in population.initial_network()  # its scale and shift are trained like any others
    backend = make_backend(population, X, Y, 3)
    found = backend.predict(OneNetwork(population.initial_network()), X[None])[0]
    torch.testing.assert_close(found, net.eval()(X).softmax(1))


def test_gradients_leave_the_statistics_of_a_fixed_batch_norm_as_they_are() -> None:
    net = normalised().eval()
    before = net[1].running_mean.clone()
    backend = make_backend(Population(net, k=1), X, Y, 3)
    network = backend.population.initial_network()
    first = backend.predict(OneNetwork(network), X[None])
    networks = {name: value.expand(2, *value.shape) for name, value in network.items()}
    velocity = {name: torch.empty_like(value) for name, value in networks.items()}
    batch = Batch(
        torch.stack([X, 5 * X]), torch.stack([Y, Y]), torch.full((2, 6), 1 / 6).double(), torch.tensor([6, 6]),
        torch.arange(6).expand(2, 6), None,
    )  # fmt: skip
    backend.add_gradients(networks, velocity, 0.0, batch)
    assert net[1].running_mean.equal(before)
    assert backend.predict(OneNetwork(network), X[None]).equal(first)


def test_dropout_is_off_in_evaluation_mode_and_keyed_in_training_mode() -> None:
    net = make_net(dtype=torch.float64)
    with_dropout = nn.Sequential(net[0], net[1], nn.Dropout(0.5), net[2])
    assert Population(with_dropout, k=2).mask_keys == ("2.key",)
    population = Population(with_dropout.eval(), k=2)
    assert population.mask_keys == ()
    found = make_backend(population, X, Y, 3).predict(OneNetwork(population.initial_network()), X[None])[0]
    torch.testing.assert_close(found, net(X).softmax(1))
