"""Populations mix as the figures say, and refuse what they cannot hold."""

import pytest
import torch
from ppfl.core.shared import Shared
from torch import nn

from ppfl.core.errors import DataError, ModelError
from ppfl.core.population import Population
from ppfl.core.workspace import Workspace
from support import make_linear, make_net

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.tensor([0, 1, 2, 0, 1, 2])
C = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
EVEN = torch.full((6,), 1 / 6, dtype=torch.float64)
PADDED = torch.stack([EVEN, torch.tensor([0.25] * 4 + [0.0] * 2, dtype=torch.float64)])


def distinct(population: Population) -> Shared:
    return population.initial(seed=3, distinct=True)


def plain_nets(population: Population, net: nn.Module, shared: Shared) -> list[nn.Module]:
    """The K networks as ordinary modules."""
    import copy

    nets = [copy.deepcopy(net) for _ in range(population.k)]
    with torch.no_grad():
        for k, one in enumerate(nets):
            for name, parameter in one.named_parameters():
                parameter.copy_(shared.common[name] if name in shared.common else shared.canonical[name][k])
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
    population = Population(net, k=3, mix="outputs")
    shared = distinct(population)
    expected = sum(c * one(X) for c, one in zip(C, plain_nets(population, net, shared), strict=True)).softmax(1)
    torch.testing.assert_close(population.predict_one(shared, C, X), expected)


def test_predictions_are_averaged_after_the_link() -> None:
    net = make_net(dtype=torch.float64)
    population = Population(net, k=3, mix="predictions")
    shared = distinct(population)
    expected = sum(c * one(X).softmax(1) for c, one in zip(C, plain_nets(population, net, shared), strict=True))
    torch.testing.assert_close(population.predict_one(shared, C, X), expected)
    loss = -expected[torch.arange(6), Y].log()
    torch.testing.assert_close(population.losses_one(shared, C, X, Y), loss)


def test_weights_are_averaged_before_the_network() -> None:
    net = make_net(dtype=torch.float64)
    population = Population(net, k=3, mix="weights")
    shared = distinct(population)
    nets = plain_nets(population, net, shared)
    with torch.no_grad():
        for into, *values in zip(net.parameters(), *(one.parameters() for one in nets), strict=True):
            into.copy_(sum(c * v for c, v in zip(C, values, strict=True)))
    torch.testing.assert_close(population.predict_one(shared, C, X), net(X).softmax(1))


def test_mixed_outputs_of_a_middle_layer_go_to_the_next_layer() -> None:
    net = Middle().double()
    population = Population(net, k=3, canonical="middle", mix="outputs").fit_to(X, Y, 3)
    assert not population.caches_outputs
    shared = distinct(population)
    nets = plain_nets(population, net, shared)
    hidden = torch.relu(net.first(X))
    mixed = sum(c * one.middle(hidden) for c, one in zip(C, nets, strict=True))
    expected = net.last(torch.tanh(mixed) + hidden).softmax(1)
    torch.testing.assert_close(population.predict_one(shared, C, X), expected)


def test_several_canonical_layers_are_mixed_each_on_its_own() -> None:
    net = make_net(dtype=torch.float64)
    population = Population(net, k=3, canonical=["0", "2"], mix="outputs").fit_to(X, Y, 3)
    shared = distinct(population)
    nets = plain_nets(population, net, shared)
    hidden = torch.relu(sum(c * one[0](X) for c, one in zip(C, nets, strict=True)))
    expected = sum(c * one[2](hidden) for c, one in zip(C, nets, strict=True)).softmax(1)
    torch.testing.assert_close(population.predict_one(shared, C, X), expected)


def test_whole_networks_and_layer_by_layer_are_different_models() -> None:
    net = make_net(dtype=torch.float64)
    whole, layers = Population(net, k=3), Population(net, k=3, canonical=["0", "2"])
    shared = distinct(whole)
    assert not torch.allclose(whole.predict_one(shared, C, X), layers.predict_one(shared, C, X), atol=1e-3)


def test_a_linear_canonical_part_makes_outputs_and_weights_equal() -> None:
    net = make_linear(dtype=torch.float64)
    outputs, weights = Population(net, k=3, mix="outputs"), Population(net, k=3, mix="weights")
    shared = distinct(outputs)
    torch.testing.assert_close(outputs.predict_one(shared, C, X), weights.predict_one(shared, C, X))
    for one, other in zip(
        outputs.theta_gradients(shared, C[None], X[None], Y[None], EVEN[None], own=False)[0].canonical.values(),
        weights.theta_gradients(shared, C[None], X[None], Y[None], EVEN[None], own=False)[0].canonical.values(),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_a_hidden_layer_makes_them_differ() -> None:
    net = make_net(dtype=torch.float64)
    outputs, weights = Population(net, k=3, mix="outputs"), Population(net, k=3, mix="weights")
    shared = distinct(outputs)
    assert not torch.allclose(outputs.predict_one(shared, C, X), weights.predict_one(shared, C, X), atol=1e-3)


@pytest.mark.parametrize("mix", ["outputs", "predictions", "weights"])
def test_one_canonical_model_is_the_network(mix: str) -> None:
    net = make_net(dtype=torch.float64)
    population = Population(net, k=1, mix=mix)
    one = torch.ones(1, dtype=torch.float64)
    torch.testing.assert_close(population.predict_one(population.initial(0), one, X), net(X).softmax(1))


@pytest.mark.parametrize("mix", ["outputs", "predictions", "weights"])
def test_equal_canonical_models_make_memberships_irrelevant(mix: str) -> None:
    population = Population(make_net(dtype=torch.float64), k=3, mix=mix)
    shared = population.initial(0)
    torch.testing.assert_close(population.predict_one(shared, C, X), population.predict_one(shared, C.flip(0), X))


@pytest.mark.parametrize("mix", ["outputs", "predictions", "weights"])
def test_the_max_rule_uses_one_model(mix: str) -> None:
    net = make_net(dtype=torch.float64)
    population = Population(net, k=3, mix=mix)
    shared = distinct(population)
    expected = plain_nets(population, net, shared)[1](X).softmax(1)
    c = torch.tensor([[0.3, 0.4, 0.3]], dtype=torch.float64)
    torch.testing.assert_close(population.predict(shared, c, X[None], hard=True)[0], expected)


@pytest.mark.parametrize("mix", ["outputs", "predictions", "weights"])
@pytest.mark.parametrize("canonical", ["all", "2"])
def test_a_chunk_of_clients_is_its_clients_one_by_one(mix: str, canonical: str) -> None:
    population = Population(make_net(dtype=torch.float64), k=3, mix=mix, canonical=canonical).fit_to(X, Y, 3)
    shared = distinct(population)
    c = torch.stack([C, C.flip(0)])
    x, y = torch.stack([X, X + 1]), torch.stack([Y, Y])
    together, losses = population.theta_gradients(shared, c, x, y, PADDED, own=False)
    slopes, _ = population.membership_gradients(shared, c, x, y, PADDED)
    for i, size in enumerate((6, 4)):
        alone = (c[i : i + 1], x[i : i + 1, :size], y[i : i + 1, :size], PADDED[i : i + 1, :size])
        gradients, loss = population.theta_gradients(shared, *alone, own=False)
        torch.testing.assert_close(losses[i], loss[0])
        torch.testing.assert_close(slopes[i], population.membership_gradients(shared, *alone)[0][0])
        for part, part_alone in zip(together, gradients, strict=True):
            for name in part:
                torch.testing.assert_close(part[name][i], part_alone[name][0])


@pytest.mark.parametrize("mix", ["outputs", "predictions"])
@pytest.mark.parametrize("canonical", ["all", "2"])
@pytest.mark.parametrize("loss", ["cross_entropy", "logistic", "squared", "poisson"])
def test_cached_outputs_give_the_membership_gradient(mix: str, canonical: str, loss: str) -> None:
    labels = loss == "cross_entropy"
    net = make_net(classes=3 if labels else 1, dtype=torch.float64)
    target = Y if labels else Y % 2 if loss == "logistic" else Y.double()
    population = Population(net, k=3, mix=mix, canonical=canonical, loss=loss).fit_to(X, target, 3 if labels else None)
    assert population.caches_outputs
    shared = distinct(population)
    c, x, y = torch.stack([C, C.flip(0)]), torch.stack([X, X + 1]), torch.stack([target] * 2)
    expected_slopes, expected_losses = population.membership_gradients(shared, c, x, y, PADDED)
    for space in (None, Workspace()):
        slopes, losses = population.membership_loss(population.outputs(shared, x, space), y, PADDED)(c)
        torch.testing.assert_close(slopes, expected_slopes)
        torch.testing.assert_close(losses, expected_losses)


LOSS_TARGETS = {"cross_entropy": Y, "logistic": Y % 2, "squared": Y.double(), "poisson": Y.double()}


@pytest.mark.parametrize("loss", LOSS_TARGETS)
@pytest.mark.parametrize("mix", ["outputs", "predictions", "weights"])
@pytest.mark.parametrize("canonical", ["all", "2", "0"])
def test_by_hand_everything_is_what_torch_func_finds(mix: str, canonical: str, loss: str) -> None:
    target = LOSS_TARGETS[loss]
    net = make_net(classes=3 if loss == "cross_entropy" else 1, dtype=torch.float64)
    population = Population(net, k=3, mix=mix, canonical=canonical, loss=loss)
    population.fit_to(X, target, 3 if loss == "cross_entropy" else None)
    shared, c = distinct(population), torch.stack([C, C.flip(0)])
    batch = torch.stack([X, X + 1]), torch.stack([target] * 2), PADDED
    own, start = shared.copies(2, None), shared.copies(2, None)
    velocity = own.map(lambda leaf: torch.linspace(-1, 1, leaf.numel(), dtype=leaf.dtype).reshape(leaf.shape))
    found = []
    for space in (None, Workspace()):
        pushed = velocity.map(torch.clone)
        losses = population.push_models(own, pushed, 0.9, c, *batch, space)
        judged = population.judge(shared, c, *batch[:2], space=space)
        slopes = population.membership_gradients(shared, c, *batch, space)
        found.append([losses, *pushed.leaves(), judged[1], judged[0].reshape(2, 6, -1), *slopes])
    for reference, by_hand in zip(*found, strict=True):
        torch.testing.assert_close(by_hand, reference)
    assert all(now.equal(before) for now, before in zip(own.leaves(), start.leaves(), strict=True))


@pytest.mark.parametrize("canonical", ["all", "2"])
def test_by_hand_plain_networks_are_pushed_alike(canonical: str) -> None:
    population = Population(make_net(dtype=torch.float64), k=1, canonical=canonical)
    start = population.initial(0)
    networks = Shared(start.common, {name: theta[0] for name, theta in start.canonical.items()}).copies(2, None)
    scale = torch.tensor([0.4, 2.0], dtype=torch.float64)
    found = []
    for space in (None, Workspace()):
        velocity = networks.map(torch.ones_like)
        losses = population.push_networks(
            networks, velocity, 0.5, torch.stack([X, X + 1]), torch.stack([Y, Y]), PADDED, space, scale
        )
        found.append([losses, *velocity.leaves()])
    for reference, by_hand in zip(*found, strict=True):
        torch.testing.assert_close(by_hand, reference)


def test_the_membership_gradient_of_mixed_weights_is_the_inner_product_of_G_and_theta() -> None:
    population = Population(make_net(dtype=torch.float64), k=3, mix="weights")
    shared = distinct(population)
    mixed = {name: torch.tensordot(C, theta, dims=1)[None] for name, theta in shared.canonical.items()}
    (_, G), _ = population.network_gradients(Shared({}, mixed), X[None], Y[None], EVEN[None])
    inner = sum(torch.einsum("...,k...->k", G[name][0], shared.canonical[name]) for name in G)
    slopes, _ = population.membership_gradients(shared, C[None], X[None], Y[None], EVEN[None])
    torch.testing.assert_close(slopes[0], inner)


def test_common_layers_have_one_copy() -> None:
    population = Population(make_net(), k=3, canonical="2")
    shared = population.initial(0)
    assert set(shared.common) == {"0.weight", "0.bias"}
    assert shared.canonical["2.weight"].shape == (3, 3, 5)


def test_distinct_starts_differ_and_come_from_the_seed() -> None:
    population = Population(make_net(), k=3)
    a, b, other = (population.initial(seed, distinct=True).canonical["0.weight"] for seed in (5, 5, 6))
    assert a.equal(b)
    assert not a[1].equal(a[2])
    assert not a[1].equal(other[1])


def test_the_given_network_is_left_alone() -> None:
    net = make_net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    population = Population(net, k=2)
    shared = population.initial(0)
    shared.canonical["0.weight"].zero_()
    assert all(value.equal(before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize(
    ("net", "settings", "words"),
    [
        (nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)), {}, "GroupNorm"),
        (nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)), {}, "p=0"),
        (nn.ReLU(), {}, "no parameters"),
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


def test_group_norm_is_welcome() -> None:
    net = nn.Sequential(nn.Linear(4, 6), nn.GroupNorm(2, 6), nn.ReLU(), nn.Linear(6, 3)).double()
    population = Population(net, k=2).fit_to(X, Y, 3)
    assert population.predict_one(population.initial(0), C[:2], X).shape == (6, 3)


def test_a_network_that_does_not_fit_the_data_is_refused() -> None:
    with pytest.raises(ModelError, match=r"shape \(4,\)"):
        Population(nn.Linear(7, 3).double(), k=2).fit_to(X, Y, 3)
    with pytest.raises(ModelError, match="give its last layer 5 outputs"):
        Population(make_net(dtype=torch.float64), k=2).fit_to(X, Y, 5)
    with pytest.raises(ModelError, match="one output"):
        Population(make_net(dtype=torch.float64), k=2, loss="logistic").fit_to(X, Y % 2, 2)
    with pytest.raises(DataError, match="0 or 1"):
        Population(nn.Linear(4, 1).double(), k=2, loss="logistic").fit_to(X, Y, None)
