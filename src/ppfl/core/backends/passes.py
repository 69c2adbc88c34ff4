"""How forward and backward passes of a network run: in which precision, and what is kept between them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from ..errors import ModelError, SettingError
from ..population import Population
from ..randomness import layer_uses, return_to_uses

PRECISIONS = ("float32", "bfloat16")


class Passes(NamedTuple):
    """Settings of the passes.

    precision: "bfloat16" runs the network in it. Parameters, gradients, sums over clients, losses and memberships stay
    as they are. "float32": in the precision of the parameters.
    checkpoint_activations: keep what goes into each block of the network alone, and run a block again when its
    gradients are taken.

    >>> Passes(precision="bfloat16", checkpoint_activations=True).plain
    False
    """

    precision: str = "float32"
    checkpoint_activations: bool = False

    @property
    def plain(self) -> bool:
        """Whether the network runs as it is."""
        return self == Passes()

    def check(self) -> Passes:
        """Refuse a precision that there is not."""
        if self.precision not in PRECISIONS:
            names = ", ".join(map(repr, PRECISIONS))
            raise SettingError(f"precision is {self.precision!r}; it must be one of {names}")
        return self

    def refuse_unusable(self, population: Population, device: torch.device) -> None:
        """Refuse what this network, or this device, cannot do."""
        if self.checkpoint_activations and not blocks_of(population.net):
            raise SettingError(
                "checkpoint_activations is set, but the network has no blocks to run again; group its layers into "
                "submodules, such as nn.Sequential(nn.Sequential(...), nn.Sequential(...)), or leave the setting out"
            )
        if self.precision != "bfloat16":
            return
        if not _computes_bfloat16(device):
            raise SettingError(
                f"precision is 'bfloat16', but this {'processor' if device.type == 'cpu' else device.type} has no "
                f"instructions for it (avx512_bf16, amx_bf16) and would be slower; use precision = 'float32'"
            )
        if population.dtype != torch.float32:
            raise ModelError(
                f"precision is 'bfloat16', which is for networks of float32; this one's parameters are "
                f"{population.dtype}; use precision = 'float32'"
            )


class CheckpointedBlock(nn.Module):
    """A part of a network that keeps its input alone, and runs again when its gradients are taken.

    Runs under `functional_call`, whose values are gone when gradients are taken: they are passed on as they are now.
    """

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Any, **named: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.inner(*inputs, **named)
        values = {**dict(self.inner.named_parameters()), **dict(self.inner.named_buffers())}
        uses, first = layer_uses(self.inner), True

        def run() -> Any:
            nonlocal first
            now, again, first = layer_uses(self.inner), not first, False
            return_to_uses(uses)  # the masks of the first time
            try:
                return functional_call(self.inner, values, inputs, named)
            finally:
                if again:
                    return_to_uses(now)

        return checkpoint(run, use_reentrant=False, preserve_rng_state=False)


def blocks_of(net: nn.Module) -> list[str]:
    """The names of the submodules that are checkpointed: those at the top that have layers of their own.

    >>> net = nn.ModuleDict({"body": nn.ModuleList([nn.Sequential(nn.ReLU())]), "head": nn.Linear(2, 2)})
    >>> blocks_of(net)
    ['body.0']
    """
    found = []
    for name, child in net.named_children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict):  # these are never called
            found += [f"{name}.{inside}" for inside in blocks_of(child)]
        elif any(True for _ in child.children()):
            found.append(name)
    return found


def with_passes(net: nn.Module, passes: Passes) -> nn.Module:
    """The network, changed in place to run so."""
    for path in blocks_of(net) if passes.checkpoint_activations else ():
        parent, _, name = path.rpartition(".")
        setattr(net.get_submodule(parent), name, CheckpointedBlock(net.get_submodule(path)))
    return net.bfloat16() if passes.precision == "bfloat16" else net


def names_in_blocks(names: Iterable[str], blocks: list[str]) -> dict[str, str]:
    """What values of these names are called in a network whose blocks are checkpointed.

    >>> names_in_blocks(["a.weight", "b.weight"], ["a"])
    {'a.weight': 'a.inner.weight', 'b.weight': 'b.weight'}
    """
    renamed = {}
    for name in names:
        block = next((block for block in blocks if name.startswith(block + ".")), None)
        renamed[name] = name if block is None else f"{block}.inner{name[len(block) :]}"
    return renamed


def in_bfloat16(value: Tensor) -> Tensor:
    """Numbers in bfloat16; the rest, such as keys and words, as it is."""
    return value.to(torch.bfloat16) if value.is_floating_point() else value


def _computes_bfloat16(device: torch.device) -> bool:
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type != "cpu":
        return False
    capabilities: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return any(value is True for name, value in capabilities.items() if name.endswith("bf16"))
