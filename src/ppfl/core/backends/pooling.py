"""Max pooling before ReLU instead of after it: the same numbers, and ReLU has a fourth of the work."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

MAX_POOLS = (
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
)  # fmt: skip


def pool_before_relu(net: nn.Module) -> nn.Module:
    """Swap each ReLU in a Sequential with the max pooling that follows it, in place.

    Values are the same because ReLU never changes an order, and gradients because they pass only where the largest
    value is positive, either way.

    >>> pool_before_relu(nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2)))
    Sequential(
      (0): Conv2d(1, 4, kernel_size=(3, 3), stride=(1, 1))
      (1): MaxPool2d(kernel_size=2, stride=2, padding=0, dilation=1, ceil_mode=False)
      (2): ReLU()
    )
    """
    for module in net.modules():
        if type(module).forward is nn.Sequential.forward:
            children = module._modules
            for first, second in pairwise(children):
                relu, pool = children[first], children[second]
                if type(relu) is nn.ReLU and _pools_alone(pool) and not _is_watched(relu):
                    children[first], children[second] = pool, relu
    return net


def _pools_alone(module: nn.Module | None) -> bool:
    return isinstance(module, MAX_POOLS) and not module.return_indices and not _is_watched(module)


def _is_watched(module: nn.Module) -> bool:
    """Whether somebody looks at what goes in or out."""
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )
