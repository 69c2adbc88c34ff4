"""A network that runs with any parameters, in any thread, and a function of one client taken over many."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from ..params import Params
from ..trees import tree_map

CONVOLUTIONS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip


class FunctionalNetwork:
    """One copy of `net` per thread: functional_call puts its values into the module for a while."""

    def __init__(self, net: nn.Module, device: torch.device) -> None:
        self.net = copy.deepcopy(net).to(device)
        self._copies: dict[int, nn.Module] = {}

    def __call__(self, values: Params, x: Tensor) -> Tensor:
        thread = threading.get_ident()
        if thread not in self._copies:
            self._copies[thread] = copy.deepcopy(self.net)
        output: Tensor = functional_call(self._copies[thread], values, (x,))
        return output


class ClientMap:
    """How a function of one client is taken over many: by vmap, or one after the other.

    Convolutions of many clients at once are grouped ones, which a CPU is slow at. For one client's images it prefers
    the channels last; not every network takes them so, which is tried on x (N, ...).
    """

    def __init__(self, net: nn.Module, x: Tensor) -> None:
        convolves = any(isinstance(module, CONVOLUTIONS) for module in net.modules())
        self.one_by_one = convolves and x.device.type == "cpu"
        self.channels_last = convolves and x.dim() == 4 and _takes_channels_last(net, x)

    def each(self, f: Callable[..., Any], own: bool, parameters: Params, *rows: Tensor) -> Any:
        """f(parameters, row of each) for every client; `own`: parameters have (C, ...) leaves as well."""
        if len(rows[0]) > 1 and not self.one_by_one:
            return vmap(f, in_dims=(0 if own else None, *(0 for _ in rows)))(parameters, *rows)
        found = [
            f({name: leaf[i] for name, leaf in parameters.items()} if own else parameters, *self._row(rows, i))
            for i in range(len(rows[0]))
        ]
        return tree_map(lambda *leaves: torch.stack(leaves), *found)

    def gradients(
        self, f: Callable[..., Tensor], own: bool, parameters: Params, *rows: Tensor
    ) -> tuple[Params, Tensor]:
        """df/dparameters, leaves (C, ...), and f (C,)."""
        stacked = len(rows[0]) > 1 and not self.one_by_one
        gradient, value = self.each(grad_and_value(f) if stacked else _backward(f), own, parameters, *rows)
        return gradient, value

    def laid_out(self, x: Tensor) -> Tensor:
        """A batch (B, ...) in the memory layout that the network runs on fastest."""
        return x.contiguous(memory_format=torch.channels_last) if self.channels_last and x.dim() == 4 else x

    def _row(self, rows: tuple[Tensor, ...], i: int) -> list[Tensor]:
        return [self.laid_out(row[i]) for row in rows]


def _takes_channels_last(net: nn.Module, x: Tensor) -> bool:
    try:
        with torch.no_grad():
            net(x.contiguous(memory_format=torch.channels_last))
    except RuntimeError:  # such as view() of what no longer lies in order
        return False
    return True


def _backward(f: Callable[..., Tensor]) -> Callable[..., tuple[Params, Tensor]]:
    """As grad_and_value, by torch's own tape, which is faster for one client."""

    def gradient_and_value(parameters: Params, *rows: Tensor) -> tuple[Params, Tensor]:
        with torch.enable_grad():
            at = {name: leaf.detach().requires_grad_() for name, leaf in parameters.items()}
            value = f(at, *rows)
            found = torch.autograd.grad(value, list(at.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(at, found, strict=True)), value.detach()

    return gradient_and_value
