"""A network that runs with any parameters, in any thread, and a function of one client taken over many."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable, Container
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from ...errors import ModelError
from ..trees import Params, tree_map

CONVOLUTIONS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip


class FunctionalNetwork:
    """One copy of `net` per thread: functional_call puts its values into the module for a while."""

    def __init__(self, net: nn.Module, device: torch.device) -> None:
        self.net = copy.deepcopy(net).to(device)
        self._copies: dict[int, nn.Module] = {}

    def __call__(self, values: Params, x: Tensor) -> Tensor:
        output: Tensor = functional_call(self._own_copy(), values, (x,))
        return output

    def _own_copy(self) -> nn.Module:
        """This thread's."""
        thread = threading.get_ident()
        if thread not in self._copies:
            self._copies[thread] = copy.deepcopy(self.net)
        return self._copies[thread]


class ClientMap:
    """How a function of one client is taken over many: by vmap, or one after the other.

    Convolutions of many clients at once are grouped ones, which a CPU is slow at. For one client's images it prefers
    the channels last; not every network takes them so, which is tried on x (N, ...). Networks that vmap cannot run
    (recurrent layers, packed sequences, autograd Functions of one's own) are given to `try_vmap`. One after the other
    means that nothing but torch's own tape is used: no vmap over clients, none over canonical models.
    """

    def __init__(self, net: nn.Module, x: Tensor) -> None:
        convolves = any(isinstance(module, CONVOLUTIONS) for module in net.modules())
        self.one_by_one = convolves and x.device.type == "cpu"
        self.channels_last = convolves and x.dim() == 4 and _takes_channels_last(net, x)

    def try_vmap(self, f: Callable[..., Tensor], parameters: Params, *rows: Tensor) -> None:
        """Take clients one by one if vmap cannot run and differentiate f; refuse f where no tape can.

        Both are tried: recurrent layers of torch are differentiated, but not run, and other operations the reverse.
        """
        if not self.one_by_one:
            self.one_by_one = not (
                _takes_vmap(f, parameters, *rows) and _takes_vmap(grad_and_value(f), parameters, *rows)
            )
        if self.one_by_one:
            try:
                self.gradients(f, True, parameters, *rows)
            except RuntimeError as error:
                raise ModelError(
                    f"the network's loss has no gradient: {str(error).splitlines()[0]}; expected a forward pass that "
                    "autograd can go back through, from the loss to the trained parameters"
                ) from None

    def each(self, f: Callable[..., Any], own: bool, parameters: Params, *rows: Tensor) -> Any:
        """f(parameters, row of each) for every client; `own`: parameters have (C, ...) leaves as well."""
        if len(rows[0]) > 1 and not self.one_by_one:
            return _side_by_side(f, own, parameters, *rows)
        found = [
            f({name: leaf[i] for name, leaf in parameters.items()} if own else parameters, *self._row(rows, i))
            for i in range(len(rows[0]))
        ]
        return tree_map(lambda *leaves: torch.stack(leaves), *found)

    def gradients(
        self,
        f: Callable[..., Tensor],
        own: bool,
        parameters: Params,
        *rows: Tensor,
        only: Container[str] | None = None,
    ) -> tuple[Params, Tensor]:
        """df/dparameters, leaves (C, ...), and f (C,). `only`: of these parameters at least; None: of all."""
        stacked = len(rows[0]) > 1 and not self.one_by_one
        gradient, value = self.each(grad_and_value(f) if stacked else _backward(f, only), own, parameters, *rows)
        return gradient, value

    def laid_out(self, x: Tensor) -> Tensor:
        """A batch (B, ...) in the memory layout that the network runs on fastest. Filters stay as they are: torch has
        crashed in the gradients of filters with the channels last."""
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


def _side_by_side(f: Callable[..., Any], own: bool, parameters: Params, *rows: Tensor) -> Any:
    try:
        return vmap(f, in_dims=(0 if own else None, *(0 for _ in rows)))(parameters, *rows)
    except RuntimeError as error:
        if "vmap" not in str(error):
            raise
        raise ModelError(
            "the network runs on the first samples for many clients at once, but not on later ones: "
            f"{str(error).splitlines()[0]}; write a forward pass that takes the same operations for all samples, or "
            'use engine = "loop"'
        ) from None


def _takes_vmap(f: Callable[..., Any], parameters: Params, *rows: Tensor) -> bool:
    """Whether vmap runs f for several clients, leaves and rows (C, ...)."""
    with warnings.catch_warnings(), torch.no_grad():  # as in a round; torch.func has its own tape
        warnings.simplefilter("ignore")  # of slow operations, such as attention, which pay all the same
        try:
            vmap(f)(parameters, *rows)
        except Exception:  # it ran without vmap, so whatever this is, vmap is the reason
            return False
    return True


def _backward(f: Callable[..., Tensor], only: Container[str] | None) -> Callable[..., tuple[Params, Tensor]]:
    """As grad_and_value, by torch's own tape, which is faster for one client. No tape is kept of layers below the first
    of the parameters `only`."""

    def gradient_and_value(parameters: Params, *rows: Tensor) -> tuple[Params, Tensor]:
        with torch.enable_grad():
            fixed = {name: leaf.detach() for name, leaf in parameters.items()}
            at = {name: leaf.requires_grad_() for name, leaf in fixed.items() if only is None or name in only}
            value = f(fixed, *rows)
            found = torch.autograd.grad(value, list(at.values()), allow_unused=True, materialize_grads=True)
        return dict(zip(at, found, strict=True)), value.detach()

    return gradient_and_value
