"""Max pooling before ReLU gives the bits of max pooling after it."""

import copy

import pytest
import torch
from torch import nn

from ppfl.core.backends.networks import FunctionalNetwork
from ppfl.core.backends.pooling import pool_before_relu

NETS = {
    "halved": nn.Sequential(nn.Conv2d(2, 6, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 3, 2)),
    "padded, windows that overlap": nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)),
    "norm in front, in place": nn.Sequential(
        nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(inplace=True), nn.AdaptiveMaxPool2d(2)
    ),
    "pooled twice": nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.MaxPool2d(2)),
    "deep inside": nn.Sequential(nn.Sequential(nn.Conv2d(2, 4, 3), nn.Sequential(nn.ReLU(), nn.MaxPool2d(2)))),
}


def results(net: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    out = net(x)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    return [out, *torch.autograd.grad((out * weights).sum(), [x, *net.parameters()])]


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("ties", [False, True])
def test_outputs_and_gradients_have_the_same_bits(name, ties) -> None:
    net = NETS[name]
    x = torch.randn(5, 2, 12, 12, generator=torch.Generator().manual_seed(0))
    x = x.round() if ties else x  # many equal values, and many zeros
    swapped = pool_before_relu(copy.deepcopy(net))
    kinds = [[type(module) for module in one.modules()] for one in (net, swapped)]
    assert kinds[0] != kinds[1]
    assert list(net.state_dict()) == list(swapped.state_dict())
    for plain, quick in zip(results(net, x), results(swapped, x), strict=True):
        assert torch.equal(plain, quick)


class Doubled(nn.Sequential):
    def forward(self, x):
        return super().forward(x) + super().forward(-x)


def test_what_is_not_this_pattern_stays_as_it_is() -> None:
    watched = nn.Sequential(nn.ReLU(), nn.MaxPool2d(2))
    watched[0].register_forward_hook(lambda *_: None)
    for net in (
        nn.Sequential(nn.ReLU(), nn.AvgPool2d(2)),
        nn.Sequential(nn.LeakyReLU(-1.0), nn.MaxPool2d(2)),
        nn.Sequential(nn.ReLU(), nn.MaxPool2d(2, return_indices=True)),
        Doubled(nn.ReLU(), nn.MaxPool2d(2)),
        watched,
    ):
        before = list(net.children())
        assert list(pool_before_relu(net).children()) == before


def test_every_network_of_a_run_has_it_and_that_of_the_user_stays() -> None:
    net = copy.deepcopy(NETS["halved"])
    own = FunctionalNetwork(net, torch.device("cpu"))
    assert [type(module) for module in own.net][1:3] == [nn.MaxPool2d, nn.ReLU]
    assert [type(module) for module in net][1:3] == [nn.ReLU, nn.MaxPool2d]
