"""Gradients written out for chains are those of autograd, and what is no chain is not taken for one."""

from collections import OrderedDict

import pytest
import torch
from torch import nn

from ppfl.core.chain import chain_gradients, chain_of
from ppfl.core.losses import LOSSES

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


@pytest.mark.parametrize("loss", TARGETS)
@pytest.mark.parametrize("kind", NETS)
def test_gradients_are_those_of_autograd(kind: str, loss: str) -> None:
    """Two clients, three models each, a loss that mixes their outputs with weights of the client's own."""
    outputs, y = TARGETS[loss]
    torch.manual_seed(0)
    nets = [[NETS[kind](outputs).double() for _ in range(3)] for _ in range(2)]
    x, c = torch.randn(2, 5, 4, dtype=torch.float64), torch.rand(2, 3, dtype=torch.float64).softmax(1)

    def slopes(found: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        at = found.detach().requires_grad_()
        losses = torch.stack([LOSSES[loss].per_sample(torch.tensordot(c[i], at[i], 1), y[i]).mean() for i in (0, 1)])
        return torch.autograd.grad(losses.sum(), at)[0], losses.detach()

    models = stacked(nets)
    kept = {name: value.clone() for name, value in models.items()}
    gradients, losses = chain_gradients(chain_of(nets[0][0]), slopes, models, x)
    assert all(models[name].equal(value) for name, value in kept.items())
    assert set(gradients) == set(models)
    for i in (0, 1):
        expected = LOSSES[loss].per_sample(sum(c[i, k] * net(x[i]) for k, net in enumerate(nets[i])), y[i]).mean()
        expected.backward()
        torch.testing.assert_close(losses[i], expected.detach())
        for k, net in enumerate(nets[i]):
            for name, parameter in net.named_parameters():
                torch.testing.assert_close(gradients[name][i, k], parameter.grad)


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
