"""Several inputs per sample, such as tokens and an age: they stand side by side in the columns of one tensor.

Data, batches and engines know one tensor x (n, columns). A hook takes a batch apart where it enters the network, which
is called with its own arguments and keeps the names of its parameters.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .errors import DataError, ModelError

_LAST_EXACT = 2**24  # whole numbers up to here are exact in float32


class InputLayout(NamedTuple):
    """Where each input of a sample stands in the columns.

    >>> layout = InputLayout.of({"tokens": torch.tensor([[5, 2], [7, 0]]), "age": torch.tensor([41.0, 30.0])})
    >>> x = layout.pack({"tokens": torch.tensor([[5, 2]]), "age": torch.tensor([41.0])})
    >>> x, layout.take_apart(x)
    (tensor([[ 5.,  2., 41.]]), {'tokens': tensor([[5, 2]]), 'age': tensor([41.])})
    """

    names: tuple[str, ...]  # of keyword arguments; numbers "0", "1", ... for arguments in order
    shapes: tuple[tuple[int, ...], ...]  # of one sample
    whole: tuple[bool, ...]  # whether an input is of whole numbers, such as tokens

    @classmethod
    def of(cls, inputs: Mapping[str, Tensor] | Sequence[Tensor]) -> InputLayout:
        """The layout of inputs (n, ...) by name, or in order."""
        named = _named(inputs)
        shapes = tuple(tuple(value.shape[1:]) for value in named.values())
        return cls(tuple(named), shapes, tuple(not value.is_floating_point() for value in named.values()))

    @property
    def by_name(self) -> bool:
        """Whether the network takes keyword arguments."""
        return not self.names[0].isdigit()

    @property
    def columns(self) -> int:
        """How many columns all inputs take."""
        return sum(math.prod(shape) for shape in self.shapes)

    def pack(self, inputs: Mapping[str, Tensor] | Sequence[Tensor]) -> Tensor:
        """(n, columns), float32, of inputs (n, ...)."""
        named = _named(inputs)
        if set(named) != set(self.names):
            raise DataError(f"x has the inputs {', '.join(named)}; expected {', '.join(self.names)}")
        parts = []
        for name, shape, whole in zip(self.names, self.shapes, self.whole, strict=True):
            value = named[name]
            if tuple(value.shape[1:]) != shape:
                raise DataError(f"input {name!r} has shape {tuple(value.shape)}; expected {('n', *shape)}")
            if whole and len(value) and int(value.abs().max()) > _LAST_EXACT:
                raise DataError(f"input {name!r} has whole numbers above {_LAST_EXACT:,}; number them from 0")
            parts.append(value.reshape(len(value), -1).float())
        if len({len(part) for part in parts}) > 1:
            sizes = ", ".join(f"{name} {len(part)}" for name, part in zip(self.names, parts, strict=True))
            raise DataError(f"inputs have different numbers of samples ({sizes}); they must pair row by row")
        return torch.cat(parts, dim=1)

    def take_apart(self, x: Tensor) -> dict[str, Tensor]:
        """The inputs (B, ...) that x (B, columns) was packed from."""
        parts = torch.split(x, [math.prod(shape) for shape in self.shapes], dim=1)
        return {
            name: part.reshape(len(x), *shape).to(torch.int64 if whole else part.dtype)
            for name, shape, whole, part in zip(self.names, self.shapes, self.whole, parts, strict=True)
        }

    def describe(self) -> str:
        """Names and shapes.

        >>> InputLayout(("tokens", "age"), ((12,), ()), (True, False)).describe()
        'tokens (12,), age ()'
        """
        return ", ".join(f"{name} {shape}" for name, shape in zip(self.names, self.shapes, strict=True))


def with_packed_inputs(net: nn.Module, layout: InputLayout) -> nn.Module:
    """A copy of `net` that also takes packed inputs (B, columns). Called with its own arguments, it is as before."""
    if net._forward_pre_hooks:
        raise ModelError("a network with several inputs must not have forward hooks; remove them")
    taking = copy.deepcopy(net)
    taking.register_forward_pre_hook(partial(_take_apart, layout), with_kwargs=True)
    return taking


def _take_apart(layout: InputLayout, _net: nn.Module, arguments: Any, named: Any) -> Any:
    if named or len(arguments) != 1:
        return None
    inputs = layout.take_apart(arguments[0])
    return ((), inputs) if layout.by_name else (tuple(inputs.values()), {})


def _named(inputs: Mapping[str, Tensor] | Sequence[Tensor]) -> dict[str, Tensor]:
    if isinstance(inputs, Mapping):
        return dict(inputs)
    return {str(at): value for at, value in enumerate(inputs)}
