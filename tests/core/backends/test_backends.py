"""Models run and mix as the figures say, and both backends find the same gradients."""

import copy

import pytest
import torch
from torch import nn

from kit.problems import make_linear, make_net
from ppfl.core.backends import Autograd, Batch, Chained, make_backend
from ppfl.core.errors import DataError, ModelError
from ppfl.core.models import Mixture, Networks, OneNetwork
from ppfl.core.params import Params, map_params
from ppfl.core.population import Population

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.tensor([0, 1, 2, 0, 1, 2])
C = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
EVEN = torch.full((6,), 1 / 6, dtype=torch.float64)
PADDED = torch.stack([EVEN, torch.tensor([0.25] * 4 + [0.0] * 2, dtype=torch.float64)])


def distinct(backend: Autograd) -> Params:
    return backend.population.initial_models(seed=3, distinct=True)


def make_batch(x: torch.Tensor = X, y: torch.Tensor = Y, share: torch.Tensor = EVEN) -> Batch:
    """Of one client (N, ...), or of several (C, N, ...)."""
    x, y, share = (t[None] if share.dim() == 1 else t for t in (x, y, share))
    return Batch(x, y, share, (share > 0).sum(1).to(share), torch.zeros_like(share, dtype=torch.long), None)


def autograd(net: nn.Module, *, y: torch.Tensor = Y, n_classes: int | None = 3, **settings) -> Autograd:
    return Autograd(Population(net, **{"k": 3, **settings}), X, y, n_classes)


def predict_one(backend: Autograd, models: Params, c: torch.Tensor, x: torch.Tensor = X) -> torch.Tensor:
    return backend.predict(Mixture(models, c[None]), x[None])[0]


def plain_nets(backend: Autograd, net: nn.Module, shared: Params) -> list[nn.Module]:
    """The K networks as ordinary modules."""
    nets = [copy.deepcopy(net) for _ in range(backend.population.k)]
    canonical = backend.population.canonical_names
    with torch.no_grad():
        for k, one in enumerate(nets):
            for name, parameter in one.named_parameters():
                parameter.copy_(shared[name][k] if name in canonical else shared[name])
    return nets


class Middle(nn.Module):
    """A canonical layer with layers on both sides, and a skip around it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        return self.last(torch.tanh(self.middle(hidden)) + hidden)


def test_outputs_of_whole_networks_are_summed() -> None:
    net = make_net(dtype=torch.float64)
    backend = autograd(net, mix="outputs")
    shared = distinct(backend)
    expected = sum(c * one(X) for c, one in zip(C, plain_nets(backend, net, shared), strict=True)).softmax(1)
    torch.testing.assert_close(predict_one(backend, shared, C), expected)


def test_predictions_are_averaged_after_the_link() -> None:
    net = make_net(dtype=torch.float64)
    backend = autograd(net, mix="predictions")
    shared = distinct(backend)
    expected = sum(c * one(X).softmax(1) for c, one in zip(C, plain_nets(backend, net, shared), strict=True))
    torch.testing.assert_close(predict_one(backend, shared, C), expected)
    loss = -expected[torch.arange(6), Y].log()
    _, losses = backend.evaluate(Mixture(shared, C[None]), X[None], Y[None])
    torch.testing.assert_close(losses[0], loss)


def test_weights_are_averaged_before_the_network() -> None:
    net = make_net(dtype=torch.float64)
    backend = autograd(net, mix="weights")
    shared = distinct(backend)
    nets = plain_nets(backend, net, shared)
    with torch.no_grad():
        for into, *values in zip(net.parameters(), *(one.parameters() for one in nets), strict=True):
            into.copy_(sum(c * v for c, v in zip(C, values, strict=True)))
    torch.testing.assert_close(predict_one(backend, shared, C), net(X).softmax(1))


def test_mixed_outputs_of_a_middle_layer_go_to_the_next_layer() -> None:
    net = Middle().double()
    backend = autograd(net, canonical="middle", mix="outputs")
    assert not backend.caches_outputs
    shared = distinct(backend)
    nets = plain_nets(backend, net, shared)
    hidden = torch.relu(net.first(X))
    mixed = sum(c * one.middle(hidden) for c, one in zip(C, nets, strict=True))
    expected = net.last(torch.tanh(mixed) + hidden).softmax(1)
    torch.testing.assert_close(predict_one(backend, shared, C), expected)


def test_several_canonical_layers_are_mixed_each_on_its_own() -> None:
    net = make_net(dtype=torch.float64)
    backend = autograd(net, canonical=["0", "2"], mix="outputs")
    shared = distinct(backend)
    nets = plain_nets(backend, net, shared)
    hidden = torch.relu(sum(c * one[0](X) for c, one in zip(C, nets, strict=True)))
    expected = sum(c * one[2](hidden) for c, one in zip(C, nets, strict=True)).softmax(1)
    torch.testing.assert_close(predict_one(backend, shared, C), expected)


def test_whole_networks_and_layer_by_layer_are_different_models() -> None:
    net = make_net(dtype=torch.float64)
    whole, layers = autograd(net), autograd(net, canonical=["0", "2"])
    shared = distinct(whole)
    assert not torch.allclose(predict_one(whole, shared, C), predict_one(layers, shared, C), atol=1e-3)


def test_a_linear_canonical_part_makes_outputs_and_weights_equal() -> None:
    net = make_linear(dtype=torch.float64)
    outputs, weights = autograd(net, mix="outputs"), autograd(net, mix="weights")
    shared = distinct(outputs)
    torch.testing.assert_close(predict_one(outputs, shared, C), predict_one(weights, shared, C))
    found = [backend.model_gradients(shared, C[None], make_batch())[0] for backend in (outputs, weights)]
    for name in shared:
        torch.testing.assert_close(found[0][name], found[1][name])


def test_a_hidden_layer_makes_them_differ() -> None:
    net = make_net(dtype=torch.float64)
    outputs, weights = autograd(net, mix="outputs"), autograd(net, mix="weights")
    shared = distinct(outputs)
    assert not torch.allclose(predict_one(outputs, shared, C), predict_one(weights, shared, C), atol=1e-3)


@pytest.mark.parametrize("mix", ["outputs", "predictions", "weights"])
def test_one_canonical_model_is_the_network(mix: str) -> None:
    net = make_net(dtype=torch.float64)
    backend = autograd(net, k=1, mix=mix)
    one = torch.ones(1, dtype=torch.float64)
    models = backend.population.initial_models(0)
    torch.testing.assert_close(predict_one(backend, models, one), net(X).softmax(1))
    torch.testing.assert_close(
        backend.predict(OneNetwork(backend.population.initial_network()), X[None])[0], net(X).softmax(1)
    )


@pytest.mark.parametrize("mix", ["outputs", "predictions", "weights"])
def test_equal_canonical_models_make_memberships_irrelevant(mix: str) -> None:
    backend = autograd(make_net(dtype=torch.float64), mix=mix)
    shared = backend.population.initial_models(0)
    torch.testing.assert_close(predict_one(backend, shared, C), predict_one(backend, shared, C.flip(0)))


@pytest.mark.parametrize("mix", ["outputs", "predictions", "weights"])
def test_the_max_rule_uses_one_model(mix: str) -> None:
    net = make_net(dtype=torch.float64)
    backend = autograd(net, mix=mix)
    shared = distinct(backend)
    expected = plain_nets(backend, net, shared)[1](X).softmax(1)
    c = torch.tensor([[0.3, 0.4, 0.3]], dtype=torch.float64)
    torch.testing.assert_close(backend.predict(Mixture(shared, c).hardened(), X[None])[0], expected)


@pytest.mark.parametrize("mix", ["outputs", "predictions", "weights"])
@pytest.mark.parametrize("canonical", ["all", "2"])
def test_a_chunk_of_clients_is_its_clients_one_by_one(mix: str, canonical: str) -> None:
    backend = autograd(make_net(dtype=torch.float64), mix=mix, canonical=canonical)
    shared, c = distinct(backend), torch.stack([C, C.flip(0)])
    x, y = torch.stack([X, X + 1]), torch.stack([Y, Y])
    together, losses = backend.model_gradients(shared, c, make_batch(x, y, PADDED))
    slopes, _ = backend.membership_gradients(shared, c, make_batch(x, y, PADDED))
    for i, size in enumerate((6, 4)):
        alone = make_batch(x[i, :size], y[i, :size], PADDED[i, :size])
        gradients, loss = backend.model_gradients(shared, c[i : i + 1], alone)
        torch.testing.assert_close(losses[i], loss[0])
        torch.testing.assert_close(slopes[i], backend.membership_gradients(shared, c[i : i + 1], alone)[0][0])
        for name in together:
            torch.testing.assert_close(together[name][i], gradients[name][0])


def both_backends(net: nn.Module, target: torch.Tensor, loss: str, **settings) -> list[Autograd]:
    """The reference, and the one for chains."""
    n_classes = 3 if loss == "cross_entropy" else None
    reference = autograd(net, y=target, n_classes=n_classes, loss=loss, **settings)
    chained = make_backend(reference.population, X, target, n_classes)
    assert isinstance(chained, Chained)
    return [reference, chained]


@pytest.mark.parametrize("mix", ["outputs", "predictions"])
@pytest.mark.parametrize("canonical", ["all", "2"])
@pytest.mark.parametrize("loss", ["cross_entropy", "logistic", "squared", "poisson"])
def test_cached_outputs_give_the_membership_gradient(mix: str, canonical: str, loss: str) -> None:
    labels = loss == "cross_entropy"
    net = make_net(classes=3 if labels else 1, dtype=torch.float64)
    target = Y if labels else Y % 2 if loss == "logistic" else Y.double()
    reference, chained = both_backends(net, target, loss, mix=mix, canonical=canonical)
    assert reference.caches_outputs and chained.caches_outputs
    shared, c = distinct(reference), torch.stack([C, C.flip(0)])
    batch = make_batch(torch.stack([X, X + 1]), torch.stack([target] * 2), PADDED)
    expected_slopes, expected_losses = reference.membership_gradients(shared, c, batch)
    for backend in (reference, chained):
        slopes, losses = backend.membership_loss(backend.outputs(shared, batch.x), batch.y, PADDED)(c)
        torch.testing.assert_close(slopes, expected_slopes)
        torch.testing.assert_close(losses, expected_losses)


LOSS_TARGETS = {"cross_entropy": Y, "logistic": Y % 2, "squared": Y.double(), "poisson": Y.double()}


@pytest.mark.parametrize("loss", LOSS_TARGETS)
@pytest.mark.parametrize("mix", ["outputs", "predictions", "weights"])
@pytest.mark.parametrize("canonical", ["all", "2", "0"])
def test_by_hand_everything_is_what_torch_func_finds(mix: str, canonical: str, loss: str) -> None:
    target = LOSS_TARGETS[loss]
    net = make_net(classes=3 if loss == "cross_entropy" else 1, dtype=torch.float64)
    backends = both_backends(net, target, loss, mix=mix, canonical=canonical)
    shared, c = distinct(backends[0]), torch.stack([C, C.flip(0)])
    batch = make_batch(torch.stack([X, X + 1]), torch.stack([target] * 2), PADDED)
    own = {name: leaf.expand(2, *leaf.shape).clone() for name, leaf in shared.items()}
    start = map_params(torch.clone, own)
    weights = torch.rand(2, 3, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = []
    for backend in backends:
        velocity, weighted = (
            map_params(lambda v: torch.linspace(-1, 1, v.numel(), dtype=v.dtype).reshape(v.shape), own) for _ in "ab"
        )
        losses = backend.add_model_gradients(own, velocity, 0.9, c, batch)
        weighted_losses = backend.add_weighted_gradients(own, weighted, 0.9, weights, batch)
        predictions, evaluated = backend.evaluate(Mixture(shared, c), batch.x, batch.y)
        slopes = backend.membership_gradients(shared, c, batch)
        found.append(
            [
                losses,
                *velocity.values(),
                weighted_losses,
                *weighted.values(),
                evaluated,
                predictions.reshape(2, 6, -1),
                *slopes,
            ]
        )
    for reference, by_hand in zip(*found, strict=True):
        torch.testing.assert_close(by_hand, reference)
    assert all(own[name].equal(before) for name, before in start.items())


@pytest.mark.parametrize("canonical", ["all", "2"])
def test_by_hand_plain_networks_have_the_same_gradients_and_outputs(canonical: str) -> None:
    backends = both_backends(make_net(dtype=torch.float64), Y, "cross_entropy", k=1, canonical=canonical)
    network = backends[0].population.initial_network()
    networks = {name: torch.stack([leaf, leaf + 0.1]) for name, leaf in network.items()}
    scale = torch.tensor([0.4, 2.0], dtype=torch.float64)
    batch = make_batch(torch.stack([X, X + 1]), torch.stack([Y, Y]), PADDED)
    found = []
    for backend in backends:
        velocity = map_params(torch.ones_like, networks)
        losses = backend.add_gradients(networks, velocity, 0.5, batch, scale)
        outputs = [backend.outputs_of(models, batch.x) for models in (OneNetwork(network), Networks(networks))]
        found.append([losses, *velocity.values(), *outputs])
    for reference, by_hand in zip(*found, strict=True):
        torch.testing.assert_close(by_hand, reference)


def test_the_membership_gradient_of_mixed_weights_is_the_inner_product_of_G_and_theta() -> None:
    backend = autograd(make_net(dtype=torch.float64), mix="weights")
    shared = distinct(backend)
    mixed = {name: torch.tensordot(C, theta, dims=1)[None] for name, theta in shared.items()}
    G = map_params(torch.empty_like, mixed)
    backend.add_gradients(mixed, G, 0.0, make_batch())
    inner = sum(torch.einsum("...,k...->k", G[name][0], shared[name]) for name in G)
    slopes, _ = backend.membership_gradients(shared, C[None], make_batch())
    torch.testing.assert_close(slopes[0], inner)


def test_chains_whose_layers_are_frozen_or_have_dropout_are_left_to_autograd() -> None:
    frozen = make_net(dtype=torch.float64)
    frozen[0].requires_grad_(False)
    dropout = nn.Sequential(nn.Linear(4, 5), nn.Dropout(0.5), nn.Linear(5, 3)).double()
    for net in (frozen, dropout, Middle().double()):
        assert type(make_backend(Population(net, k=2), X, Y, 3)) is Autograd


def test_group_norm_is_accepted() -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.GroupNorm(2, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    backend = autograd(net, k=2)
    assert predict_one(backend, backend.population.initial_models(0), C[:2]).shape == (6, 3)


class TwoOutputs(nn.Linear):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return super().forward(x), x


def test_a_network_that_does_not_fit_the_data_is_refused() -> None:
    with pytest.raises(ModelError, match=r"shape \(4,\)"):
        autograd(nn.Linear(7, 3).double())
    with pytest.raises(ModelError, match="give its last layer 5 outputs"):
        autograd(make_net(dtype=torch.float64), n_classes=5)
    with pytest.raises(ModelError, match="one output"):
        autograd(make_net(dtype=torch.float64), y=Y % 2, n_classes=2, loss="logistic")
    with pytest.raises(DataError, match="0 or 1"):
        autograd(nn.Linear(4, 1).double(), n_classes=None, loss="logistic")
    with pytest.raises(ModelError, match="returns a tuple"):
        autograd(TwoOutputs(4, 3).double())
    with pytest.raises(ModelError, match="squared loss cannot be taken|outputs .* do not fit"):
        autograd(nn.Linear(4, 2).double(), y=Y.double(), n_classes=None, loss="squared")
