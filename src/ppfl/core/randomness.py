"""Dropout whose masks are functions of a key, and a refusal of layers that draw or remember anything else.

A network runs for many clients at once or for one after the other. Its output may depend on its parameters, its
input and its keys, never on torch's global generator or on what ran before.
"""

import copy
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .draws import name_key
from .errors import ModelError

_GAMMA, _FIRST, _SECOND = (c - (1 << 64) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_SELU_LIMIT = 1.7580993408473766  # -selu(-infinity): what alpha dropout sets an activation to, with its sign changed


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
        self.use: int | None = None  # how often the layer was called in the forward pass that is running

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
        salt = name_key(f"{self.name}/{self.use or 0}")
        if self.use is not None:
            self.use += 1
        samples = _splitmix64(self.key.to(device) ^ salt) ^ torch.arange(shape[0], device=device)
        positions = torch.arange(math.prod(shape[1:]), device=device) * _GAMMA
        return _splitmix64(_splitmix64(samples)[:, None] + positions).reshape(shape)


class _Kind(NamedTuple):
    channels: bool = False  # drops whole channels of (N, C, ...)
    alpha: bool = False  # keeps mean and variance of normal activations
    dims: tuple[int, ...] = ()  # of a batch, where torch takes an input of fewer for one sample without a batch


_KINDS: dict[type[nn.Module], _Kind] = {
    nn.Dropout: _Kind(),
    nn.Dropout1d: _Kind(channels=True, dims=(3,)),
    nn.Dropout2d: _Kind(channels=True, dims=(3, 4)),
    nn.Dropout3d: _Kind(channels=True, dims=(5,)),
    nn.AlphaDropout: _Kind(alpha=True),
    nn.FeatureAlphaDropout: _Kind(channels=True, alpha=True),
}


class KeyedDropout(KeyedModule):
    """nn.Dropout and its family for batches (N, ...), with masks that depend on the key alone.

    Never in place, whatever `dropout.inplace` says: its input may be a client's own data.
    """

    def __init__(self, dropout: Any) -> None:
        super().__init__()
        self.p, self.kind = float(dropout.p), _kind_of(dropout) or _Kind()
        self.train(dropout.training)

    def extra_repr(self) -> str:
        return f"p={self.p}, channels={self.kind.channels}, alpha={self.kind.alpha}"

    def forward(self, x: Tensor) -> Tensor:
        if not self.is_random:
            return x
        if self.kind.dims and x.dim() not in self.kind.dims:
            raise ModelError(
                f"{self.name or 'the network'} drops whole channels, and got an input of shape {tuple(x.shape)}; it "
                f"expects a batch (N, C, ...) of {' or '.join(map(str, self.kind.dims))} dimensions; use nn.Dropout "
                "for features (N, C)"
            )
        if self.p == 1:
            return x * 0
        drawn = x.shape[:2] if self.kind.channels else x.shape
        below = int(self.p * 2**64) - 2**63  # a share p of all int64
        kept = (self.random_bits(drawn, x.device) >= below).to(x.dtype)
        kept = kept.reshape(*drawn, *(1 for _ in x.shape[len(drawn) :]))
        if not self.kind.alpha:
            return x * kept.div_(1 - self.p)
        scale = 1 / math.sqrt((_SELU_LIMIT**2 * self.p + 1) * (1 - self.p))
        return x * (kept * scale) + (kept - 1 + self.p) * (_SELU_LIMIT * scale)


def with_keyed_dropout(net: nn.Module) -> tuple[nn.Module, tuple[str, ...]]:
    """A copy of `net` with its active dropout layers keyed, and the names of their keys for `functional_call`.

    A layer that is called several times in one forward pass of the copy has a new mask each time. It has the same
    mask each time if only a part of the copy is run, since nothing tells then where a forward pass begins.

    >>> with_keyed_dropout(nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.1), nn.Dropout(0.0)))[1]
    ('1.key',)
    """
    active = [m for m in net.modules() if _kind_of(m) and m.training and m.p]
    keyed = copy.deepcopy(net, {id(dropout): KeyedDropout(dropout) for dropout in active})
    names = []
    for name, module in keyed.named_modules():
        if isinstance(module, KeyedModule):
            module.name = name
            names.append(f"{name}.key".lstrip("."))
    if names:
        keyed.register_forward_pre_hook(partial(_set_uses, 0))
        keyed.register_forward_hook(partial(_set_uses, None), always_call=True)
    return keyed, tuple(names)


def draws_randomly(net: nn.Module) -> bool:
    """Whether a layer of it draws random numbers when it runs as it is."""
    return any(m.training and (isinstance(m, KeyedModule) or (_kind_of(m) and m.p)) for m in net.modules())


Remedy = Callable[[Any], str | None]  # what to do about a module, None if it draws nothing as it is

_DROPOUT_BESIDE = "set its dropout to 0 and put an nn.Dropout layer beside it, or freeze it with .eval()"
_OWN_FORWARD = "use the class of torch.nn itself, or derive yours from KeyedModule"
_FRACTIONAL = "use nn.MaxPool{0}d or nn.AdaptiveMaxPool{0}d, or give it fixed _random_samples"

# To have a module of your own refused, or a subclass of one of these accepted, add its class.
HIDDEN_RANDOMNESS: dict[type[nn.Module], Remedy] = {
    nn.RNNBase: lambda m: _DROPOUT_BESIDE if m.training and m.dropout and m.num_layers > 1 else None,
    nn.MultiheadAttention: lambda m: _DROPOUT_BESIDE if m.training and m.dropout else None,
    nn.RReLU: lambda m: "use nn.LeakyReLU, or freeze it with .eval()" if m.training else None,
    # these two draw in evaluation as well; their only buffer is the fixed samples
    nn.FractionalMaxPool2d: lambda m: None if [*m.buffers()] else _FRACTIONAL.format(2),
    nn.FractionalMaxPool3d: lambda m: None if [*m.buffers()] else _FRACTIONAL.format(3),
    # subclasses with a forward of their own; the classes themselves are keyed
    **dict.fromkeys(_KINDS, lambda m: _OWN_FORWARD if m.training and m.p and not _kind_of(m) else None),
}


def key_names(net: nn.Module) -> tuple[str, ...]:
    """The names of the keys of the layers that draw."""
    layers = ((name, module) for name, module in net.named_modules() if isinstance(module, KeyedModule))
    return tuple(f"{name}.key" if name else "key" for name, module in layers if module.training)


def refuse_hidden_randomness(net: nn.Module) -> None:
    """Refuse layers that draw random numbers no key decides. Dropout that can be keyed passes.

    >>> refuse_hidden_randomness(nn.Sequential(nn.Linear(2, 2), nn.RReLU()))
    Traceback (most recent call last):
    ppfl.core.errors.ModelError: '1' (RReLU) draws random numbers from torch's global generator; expected ...
    """
    for name, module in net.named_modules():
        remedy = next((HIDDEN_RANDOMNESS[cls] for cls in type(module).__mro__ if cls in HIDDEN_RANDOMNESS), None)
        if remedy and (advice := remedy(module)):
            raise ModelError(
                f"{_described(name, module)} draws random numbers from torch's global generator; expected draws that "
                f"depend on the client and the step alone; {advice}"
            )


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
    """Run a copy of `net` on x and refuse it if that moves the global generator or changes the network.

    Finds what no list of layers can, such as F.dropout in a forward method or spectral norm. On the CPU.
    """
    keyed, _ = with_keyed_dropout(net)
    before = {name: value.detach().clone() for name, value in _values(keyed).items()}
    generator = torch.get_rng_state()
    try:
        with torch.no_grad():
            keyed(x)
        draws = not generator.equal(torch.get_rng_state())
    finally:
        torch.set_rng_state(generator)
    if draws:
        raise ModelError(
            "the network's forward draws random numbers from torch's global generator; expected draws that depend on "
            "the client and the step alone; use nn.Dropout instead of F.dropout, or derive the layer from KeyedModule"
        )
    for name, value in _values(keyed).items():
        old = before[name]
        if value.shape != old.shape or not torch.allclose(value, old, rtol=0, atol=0, equal_nan=True):
            raise ModelError(
                f"the network's forward changes its own {name!r}; expected an output and nothing else; freeze the "
                "layer with .eval(), or use one without a state"
            )


def _kind_of(module: nn.Module) -> _Kind | None:
    """How a dropout layer drops; None for other modules, and for subclasses with a forward of their own."""
    return next((kind for cls, kind in _KINDS.items() if type(module).forward is cls.forward), None)


def _described(name: str, module: nn.Module) -> str:
    return f"{repr(name) if name else 'the network'} ({type(module).__name__})"


def _values(net: nn.Module) -> dict[str, Tensor]:
    return {**dict(net.named_parameters()), **dict(net.named_buffers())}


def layer_uses(net: nn.Module) -> dict[KeyedModule, int | None]:
    """How often each layer that draws was called so far in the forward pass that is running."""
    return {module: module.use for module in net.modules() if isinstance(module, KeyedModule)}


def return_to_uses(uses: dict[KeyedModule, int | None]) -> None:
    """Go back to there, to draw the same again."""
    for module, use in uses.items():
        module.use = use


def _set_uses(use: int | None, net: nn.Module, *_: Any) -> None:
    return_to_uses(dict.fromkeys(layer_uses(net), use))


def _splitmix64(z: Tensor) -> Tensor:
    """Int64 products wrap as unsigned ones do; int64 >> copies the sign, which is masked away."""
    z = z + _GAMMA  # in place from here: new memory would take most of the time
    for shift, factor in ((30, _FIRST), (27, _SECOND)):
        z ^= (z >> shift).bitwise_and_((1 << (64 - shift)) - 1)
        z *= factor
    z ^= (z >> 31).bitwise_and_((1 << 33) - 1)
    return z
