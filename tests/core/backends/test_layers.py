"""Gradients written out for chains are those of autograd, and other networks are not taken for chains."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from ppfl.core.backends.layers import add_chain_gradients, chain_of, chain_outputs
from ppfl.core.losses import LOSSES
from ppfl.core.mixing import MIXES
from ppfl.core.workspace import Workspace

NETS = {
    "linear": lambda out: nn.Linear(4, out),
    "without bias": lambda out: nn.Linear(4, out, bias=False),
    "two layers": lambda out: nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, out)),
    "three kinds": lambda out: nn.Sequential(
        nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5, bias=False), nn.Sigmoid(), nn.Linear(5, out), nn.Tanh()
    ),
    "nested": lambda out: nn.Sequential(
        OrderedDict(body=nn.Sequential(nn.Linear(4, 6), nn.ReLU()), classifier=nn.Linear(6, out))
    ),
    "one activation twice": lambda out: (
        lambda act: nn.Sequential(nn.Linear(4, 6), act, nn.Linear(6, 5), act, nn.Linear(5, out))
    )(nn.ReLU()),
    "flattened": lambda out: nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, out)),
    "linear twice": lambda out: nn.Sequential(nn.Linear(4, 3), nn.Linear(3, out)),
}
TARGETS = {
    "cross_entropy": (3, torch.tensor([[0, 2, 1, 0, 2], [1, 1, 0, 2, 0]])),
    "logistic": (1, torch.tensor([[0, 1, 1, 0, 1], [1, 1, 0, 0, 0]])),
    "squared": (1, torch.linspace(-1, 1, 10, dtype=torch.float64).reshape(2, 5)),
    "poisson": (1, torch.tensor([[0.0, 2, 1, 0, 5], [1, 1, 0, 3, 0]], dtype=torch.float64)),
}


def stacked(nets: list[list[nn.Module]]) -> dict[str, torch.Tensor]:
    """Parameters (C, K, ...) of K networks for each of C clients."""
    return {
        name: torch.stack([torch.stack([dict(net.named_parameters())[name].detach() for net in own]) for own in nets])
        for name, _ in nets[0][0].named_parameters()
    }


def outputs_of(nets: list[list[nn.Module]], x: torch.Tensor) -> torch.Tensor:
    """(C, K, B, out), by the networks themselves."""
    return torch.stack([torch.stack([net(x[i]) for net in own]) for i, own in enumerate(nets)])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("loss", TARGETS)
@pytest.mark.parametrize("kind", NETS)
def test_what_is_added_to_the_velocity_is_the_gradient_of_autograd(kind: str, loss: str, momentum: float) -> None:
    """Two clients, three models each, a loss that mixes their outputs with weights of the client's own."""
    outputs, y = TARGETS[loss]
    torch.manual_seed(0)
    nets = [[NETS[kind](outputs).double() for _ in range(3)] for _ in range(2)]
    x, c = torch.randn(2, 5, 4, dtype=torch.float64), torch.rand(2, 3, dtype=torch.float64).softmax(1)

    def slopes(found: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        slope, losses = MIXES["outputs"].slopes(LOSSES[loss], found, c, y)
        return slope / 5, losses.mean(1)

    models = stacked(nets)
    velocity = {name: torch.randn_like(value) for name, value in models.items()}
    if momentum == 0:
        velocity = {name: value.fill_(torch.nan) for name, value in velocity.items()}
    kept, before = ({name: value.clone() for name, value in tree.items()} for tree in (models, velocity))
    losses = add_chain_gradients(chain_of(nets[0][0]), models, velocity, momentum, x, slopes, Workspace())
    assert all(models[name].equal(value) for name, value in kept.items())
    for i in (0, 1):
        expected = LOSSES[loss].per_sample(sum(c[i, k] * net(x[i]) for k, net in enumerate(nets[i])), y[i]).mean()
        expected.backward()
        torch.testing.assert_close(losses[i], expected.detach())
        for k, net in enumerate(nets[i]):
            for name, parameter in net.named_parameters():
                added = parameter.grad if momentum == 0 else momentum * before[name][i, k] + parameter.grad
                torch.testing.assert_close(velocity[name][i, k], added)


@pytest.mark.parametrize("kind", NETS)
def test_outputs_are_those_of_the_networks_with_one_column_per_sample(kind: str) -> None:
    torch.manual_seed(0)
    nets = [[NETS[kind](3).double() for _ in range(2)] for _ in range(4)]
    x = torch.randn(4, 5, 4, dtype=torch.float64)
    found = chain_outputs(chain_of(nets[0][0]), stacked(nets), x, Workspace())
    torch.testing.assert_close(found.transpose(2, 3), outputs_of(nets, x).detach())


@pytest.mark.parametrize("scaled", [("0.weight",), ("2.weight",), ("0.weight", "2.weight")])
def test_scales_multiply_the_gradients_of_the_layers_they_name(scaled: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    nets = [[NETS["two layers"](3).double()] for _ in range(2)]
    x, y, scale = torch.randn(2, 5, 4).double(), TARGETS["cross_entropy"][1], torch.tensor([0.5, 3.0]).double()

    def slopes(found: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        slope, losses = LOSSES["cross_entropy"].slopes(found[:, 0], y)
        return slope[:, None], losses.sum(1)

    models = stacked(nets)
    plain, found = ({name: torch.zeros_like(value) for name, value in models.items()} for _ in range(2))
    add_chain_gradients(chain_of(nets[0][0]), models, plain, 0.0, x, slopes, Workspace())
    scales = dict.fromkeys(scaled, scale[:, None, None])
    add_chain_gradients(chain_of(nets[0][0]), models, found, 0.0, x, slopes, Workspace(), scales)
    for name, value in plain.items():
        factor = scale if name.replace("bias", "weight") in scaled else torch.ones_like(scale)
        torch.testing.assert_close(found[name], value * factor.reshape(-1, *(1 for _ in value.shape[1:])))


def test_samples_of_any_shape_go_through_a_chain_that_flattens_them_first() -> None:
    flattens = chain_of(nn.Sequential(nn.Flatten(), nn.Linear(4, 3)))
    later = chain_of(nn.Sequential(nn.Linear(4, 3), nn.Flatten()))
    assert flattens.takes(torch.zeros(5, 2, 2)) and flattens.takes(torch.zeros(5, 4))
    assert later.takes(torch.zeros(5, 4)) and not later.takes(torch.zeros(5, 2, 4))


class Skip(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + super().forward(x)


@pytest.mark.parametrize(
    "net",
    [
        nn.Conv2d(1, 2, 3),
        nn.Sequential(nn.ReLU(), nn.Linear(4, 3)),  # would write into its input
        nn.Sequential(nn.Linear(4, 6), nn.GroupNorm(2, 6), nn.Linear(6, 3)),
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.ReLU()),
        nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)),
        nn.Sequential(nn.Linear(4, 4), nn.LeakyReLU(), nn.Linear(4, 3)),
        Skip(nn.Linear(4, 4)),
        nn.Sequential(),
    ],
)
def test_other_networks_are_no_chains(net: nn.Module) -> None:
    assert chain_of(net) is None


def test_a_layer_used_twice_is_no_chain() -> None:
    layer = nn.Linear(4, 4)
    assert chain_of(nn.Sequential(layer, nn.ReLU(), layer)) is None
