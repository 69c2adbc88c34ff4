"""A module that runs with any parameters, in any thread, on one client's batch or on many."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.utils import _pytree as pytree

from .shared import Params, Shared


class Network:
    """A copy of `net` for every thread that runs it: functional_call puts its values into the module for a while."""

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self._copies: dict[int, nn.Module] = {}

    def __call__(self, values: Params, x: Tensor) -> Tensor:
        thread = threading.get_ident()
        if thread not in self._copies:
            self._copies[thread] = copy.deepcopy(self.net)
        output: Tensor = functional_call(self._copies[thread], values, (x,))
        return output

    def to(self, device: torch.device | str) -> None:
        """Buffers to `device`; parameters follow the data anyway."""
        self.net.to(device)
        self._copies.clear()


class Clients:
    """How a function of one client is taken over many: by vmap, or one after the other.

    Convolutions of many clients at once are grouped ones, which a CPU is slow at. For one client's images it prefers
    the channels last; not every network takes them so, which `look_at` finds out.
    """

    def __init__(self, net: nn.Module) -> None:
        self.convolves = any(isinstance(module, nn.modules.conv._ConvNd) for module in net.modules())
        self.channels_last = False

    def look_at(self, net: nn.Module, x: Tensor) -> None:
        """Whether the network takes images (N, ...) in either layout."""
        self.channels_last = False
        if self.convolves and x.dim() == 4:
            try:
                with torch.no_grad():
                    net(x.contiguous(memory_format=torch.channels_last))
                self.channels_last = True
            except RuntimeError:  # such as view() of what no longer lies in order
                pass

    def one_by_one(self, x: Tensor) -> bool:
        """Whether clients with batches on x's device run one after the other."""
        return self.convolves and x.device.type == "cpu"

    def each(self, f: Callable[..., Any], own: bool, parameters: Shared, *rows: Tensor) -> Any:
        """f(parameters, row of each) for every client; `own`: parameters have (C, ...) leaves as well."""
        if len(rows[0]) > 1 and not self.one_by_one(rows[0]):
            return vmap(f, in_dims=(0 if own else None, *(0 for _ in rows)))(parameters, *rows)
        found = [
            f(parameters.map(lambda leaf, i=i: leaf[i]) if own else parameters, *self._row(rows, i))
            for i in range(len(rows[0]))
        ]
        return pytree.tree_map(lambda *leaves: torch.stack(leaves), *found)

    def gradients(
        self, f: Callable[..., Tensor], own: bool, parameters: Shared, *rows: Tensor
    ) -> tuple[Shared, Tensor]:
        """df/dparameters, leaves (C, ...), and f (C,)."""
        stacked = len(rows[0]) > 1 and not self.one_by_one(rows[0])
        gradient, value = self.each(grad_and_value(f) if stacked else _backward(f), own, parameters, *rows)
        return gradient, value

    def _row(self, rows: tuple[Tensor, ...], i: int) -> list[Tensor]:
        return [self.laid_out(row[i]) for row in rows]

    def laid_out(self, x: Tensor) -> Tensor:
        """A batch (B, ...) as the network runs on it fastest."""
        return x.contiguous(memory_format=torch.channels_last) if self.channels_last and x.dim() == 4 else x


def _backward(f: Callable[..., Tensor]) -> Callable[..., tuple[Shared, Tensor]]:
    """As grad_and_value, by torch's own tape, which is faster for one client."""

    def gradient_and_value(parameters: Shared, *rows: Tensor) -> tuple[Shared, Tensor]:
        with torch.enable_grad():
            at = parameters.map(lambda leaf: leaf.detach().requires_grad_())
            value = f(at, *rows)
            found = iter(torch.autograd.grad(value, at.leaves(), allow_unused=True, materialize_grads=True))
        return at.map(lambda leaf: next(found)), value.detach()

    return gradient_and_value
