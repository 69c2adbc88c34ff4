"""Dropout whose masks are functions of a key, and a refusal of layers that draw or remember anything else.

A network runs for many clients at once or for one after the other. Its output may depend on its parameters, its
input and its keys, never on torch's global generator or on what ran before.
"""

import copy
import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ModelError
from .draws import name_key

_GAMMA, _FIRST, _SECOND = (c - (1 << 64) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


class KeyedModule(nn.Module):
    """A layer whose random numbers depend on its `key`, its name in the network, the sample and the position alone.

    `key` is int64: shape () draws, shape (0,) draws nothing, as in evaluation. It is passed in by `functional_call`.
    For random layers of your own: derive from this class and take the numbers from `random_bits`.
    """

    key: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("key", torch.zeros(0, dtype=torch.int64), persistent=False)  # not part of a saved model
        self.name = ""
        self.calls: int | None = None  # how often the layer was called in the forward pass that is running

    @property
    def is_random(self) -> bool:
        """Whether the layer is to draw: it is in training mode and has a key."""
        if self.key.shape not in ((), (0,)):
            raise ModelError(
                f"the key of {self.name or 'the network'} has shape {tuple(self.key.shape)}; a key has shape () to "
                "draw and (0,) not to; give each client its own key, with vmap over the clients"
            )
        return self.training and self.key.dim() == 0

    def random_bits(self, shape: Sequence[int], device: torch.device) -> Tensor:
        """Uniform int64 of a shape (N, ...). Those of a sample do not depend on N, and work inside vmap and grad."""
        salt = name_key(f"{self.name}/{self.calls or 0}")
        if self.calls is not None:
            self.calls += 1
        samples = _splitmix64(self.key.to(device) ^ salt) ^ torch.arange(shape[0], device=device)
        positions = torch.arange(math.prod(shape[1:]), device=device) * _GAMMA
        return _splitmix64(_splitmix64(samples)[:, None] + positions).reshape(shape)


# Layers that drop whole channels of (N, C, ...), with the dimensions of a batch: torch takes an input of fewer for one
# sample without a batch. By their forward, which subclasses may have changed.
_DIMENSIONS: dict[Any, tuple[int, ...]] = {
    nn.Dropout.forward: (),
    nn.Dropout1d.forward: (3,),
    nn.Dropout2d.forward: (3, 4),
    nn.Dropout3d.forward: (5,),
}


class KeyedDropout(KeyedModule):
    """nn.Dropout and its family for batches (N, ...), with masks that depend on the key alone.

    Never in place, whatever `dropout.inplace` says: its input may be a client's own data.
    """

    def __init__(self, dropout: Any) -> None:
        super().__init__()
        self.p, self.dimensions = float(dropout.p), _DIMENSIONS[type(dropout).forward]
        self.train(dropout.training)

    def extra_repr(self) -> str:
        return f"p={self.p}, channels={bool(self.dimensions)}"

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_random:
            return x
        if self.dimensions and x.dim() not in self.dimensions:
            raise ModelError(
                f"{self.name or 'the network'} drops whole channels, and got an input of shape {tuple(x.shape)}; it "
                f"expects a batch (N, C, ...) of {' or '.join(map(str, self.dimensions))} dimensions; use nn.Dropout "
                "for features (N, C)"
            )
        if self.p == 1:
            return x * 0
        drawn = x.shape[:2] if self.dimensions else x.shape
        below = int(self.p * 2**64) - 2**63  # a share p of all int64
        kept = (self.random_bits(drawn, x.device) >= below).to(x.dtype)
        return x * kept.reshape(*drawn, *(1 for _ in x.shape[len(drawn) :])).div_(1 - self.p)


def with_keyed_dropout(net: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
    """A copy of `net` with its active dropout layers keyed, and the names of their keys for `functional_call`.

    A layer that is called several times in one forward pass of the copy has a new mask each time. It has the same
    mask each time if only a part of the copy is run, since nothing tells then where a forward pass begins.

    >>> with_keyed_dropout(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1), nn.Dropout(0.0)))[1]
    ('1.key',)
    """
    active = [m for m in net.modules() if _is_dropout(m)]
    keyed = copy.deepcopy(net, {id(dropout): KeyedDropout(dropout) for dropout in active})
    names = []
    for name, module in keyed.named_modules():
        if isinstance(module, KeyedModule):
            module.name = name
            names.append(f"{name}.key".lstrip("."))
    if names:
        keyed.register_forward_pre_hook(partial(_set_all_call_counts, 0))
        keyed.register_forward_hook(partial(_set_all_call_counts, None), always_call=True)
    return keyed, tuple(names)


def draws_randomly(net: nn.Module) -> bool:
    """Whether a layer of it draws random numbers when it runs as it is."""
    return any(_is_dropout(m) or (isinstance(m, KeyedModule) and m.training) for m in net.modules())


def key_names(net: nn.Module) -> tuple[str, ...]:
    """The names of the keys of the layers that draw."""
    layers = ((name, module) for name, module in net.named_modules() if isinstance(module, KeyedModule))
    return tuple(f"{name}.key" if name else "key" for name, module in layers if module.training)


def refuse_running_statistics(net: nn.Module) -> None:
    """Refuse layers that keep statistics of the data they see, or whose output mixes the samples of a batch."""
    for name, module in net.named_modules():
        if module.training and getattr(module, "track_running_stats", False):
            found = "updates running statistics, and those of clients that differ cannot be averaged soundly"
        elif isinstance(module, nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d | nn.SyncBatchNorm) and (
            module.training or module.running_mean is None
        ):
            found = "uses statistics of the batch, which padding changes"
        else:
            continue
        raise ModelError(
            f"{_described(name, module)} {found}; expected an output that depends on one sample alone; use "
            "nn.GroupNorm(groups, channels), or freeze its running statistics with .eval()"
        )


def refuse_side_effects(net: nn.Module, x: Tensor) -> None:
    """Run a copy of `net` on x, and refuse it if that draws random numbers or changes the network.

    Dropout that can be keyed draws nothing here. The copy is on the CPU, so that layers which draw on the device of
    their input move the one generator that is watched. Draws from any other generator show as a second output that
    differs from the first.

    >>> refuse_side_effects(nn.Sequential(nn.Linear(2, 2), nn.RReLU()), torch.ones(3, 2))
    Traceback (most recent call last):
    ppfl.errors.ModelError: '1' (RReLU) draws random numbers; expected draws that ...
    """
    keyed, x = with_keyed_dropout(net)[0].cpu(), x.cpu()
    before = {name: value.detach().clone() for name, value in _values(keyed).items()}
    generator = torch.get_rng_state()
    # RReLU draws for negative inputs alone, and x need not lead to any
    rrelus = [(name, module) for name, module in keyed.named_modules() if isinstance(module, nn.RReLU)]
    drawing = [_described(name, module) for name, module in rrelus if module.training]

    def watch(name: str, module: nn.Module, *_: Any) -> None:
        if not generator.equal(torch.get_rng_state()):
            drawing.append(_described(name, module))  # the innermost module comes first

    for name, module in keyed.named_modules():
        module.register_forward_hook(partial(watch, name))
    try:
        with torch.no_grad():
            first, second = keyed(x), keyed(x)
    finally:
        torch.set_rng_state(generator)
    _refuse_changes(before, _values(keyed))
    if not drawing and isinstance(first, Tensor) and not torch.allclose(first, second, equal_nan=True):
        drawing.append("the network")
    if drawing:
        raise ModelError(
            f"{drawing[0]} draws random numbers; expected draws that depend on the client and the step alone; use "
            "nn.Dropout layers, beside layers whose own dropout is 0, or derive the layer from KeyedModule"
        )


def _refuse_changes(before: dict[str, Tensor], after: dict[str, Tensor]) -> None:
    for name, value in after.items():
        old = before[name]
        if value.shape != old.shape or not torch.allclose(value, old, rtol=0, atol=0, equal_nan=True):
            raise ModelError(
                f"the network's forward changes its own {name!r}; expected an output and nothing else; freeze the "
                "layer with .eval(), or use one without a state"
            )


def _is_dropout(module: Any) -> bool:
    """Whether it is an active dropout layer that can be keyed."""
    return type(module).forward in _DIMENSIONS and module.training and bool(module.p)


def _described(name: str, module: nn.Module) -> str:
    return f"{repr(name) if name else 'the network'} ({type(module).__name__})"


def _values(net: nn.Module) -> dict[str, Tensor]:
    return {**dict(net.named_parameters()), **dict(net.named_buffers())}


def call_counts(net: nn.Module) -> dict[KeyedModule, int | None]:
    """How often each layer that draws was called so far in the forward pass that is running."""
    return {module: module.calls for module in net.modules() if isinstance(module, KeyedModule)}


def set_call_counts(counts: dict[KeyedModule, int | None]) -> None:
    """Take up these counts again, so that the next calls draw the same as after them."""
    for module, calls in counts.items():
        module.calls = calls


def _set_all_call_counts(calls: int | None, net: nn.Module, *_: Any) -> None:
    set_call_counts(dict.fromkeys(call_counts(net), calls))


def _splitmix64(z: Tensor) -> Tensor:
    """Int64 products wrap as unsigned ones do; int64 >> copies the sign, which is masked away."""
    z = z + _GAMMA  # in place from here: new memory would take most of the time
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        z ^= (z >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        z *= factor
    z ^= (z >> 31).bitwise_and_((1 << 33) - 1)
    return z
