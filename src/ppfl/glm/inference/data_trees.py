"""Fitted state as JSON and tensors, and back. Nothing is pickled, and no code runs that a file names.

Objects are written as the name of their class and their fields. Only classes of `ppfl.glm` are read back, from the
modules that are loaded already, and only their fields are set.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cached_property
from types import MethodType
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from ...errors import DataError

PACKAGE = "ppfl.glm"
_SIMPLE = (bool, int, str, type(None))


class TreeWriter:
    """Turns values into JSON; tensors go to `tensors` and are named in the JSON."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}

    def write(self, value: Any) -> Any:
        if isinstance(value, np.generic):
            value = value.item()
        if isinstance(value, _SIMPLE):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"float": str(value)}
        if isinstance(value, Tensor):
            return {"tensor": self._keep(value)}
        if isinstance(value, np.ndarray):
            return self._write_array(value)
        if isinstance(value, dict):
            return {"dict": [[self.write(key), self.write(item)] for key, item in value.items()]}
        if type(value) in (list, tuple):
            return {type(value).__name__: [self.write(item) for item in value]}
        if _is_ours(type(value)):
            return {"class": _name(type(value)), "fields": {k: self.write(v) for k, v in _fields(value)}}
        if isinstance(value, MethodType) and _is_ours(type(value.__self__)):
            return {"method": value.__name__, "of": self.write(value.__self__)}
        if isinstance(value, pd.DataFrame):
            parts = [value[name].tolist() for name in value]
            return {
                "frame": self.write(parts),
                "columns": self.write(list(value)),
                "index": self.write(list(value.index)),
            }
        raise DataError(
            f"a value of type {type(value).__name__} cannot be saved; use numbers and text for ids and classes"
        )

    def _keep(self, tensor: Tensor) -> str:
        name = f"tensor{len(self.tensors)}"
        self.tensors[name] = tensor
        return name

    def _write_array(self, array: Any) -> Any:
        if array.dtype.kind in "biuf" and np.isfinite(array).all():
            return {"array": self._keep(torch.from_numpy(np.ascontiguousarray(array)))}
        return {"values": [self.write(item) for item in array.ravel().tolist()], "shape": list(array.shape),
                "dtype": str(array.dtype)}  # fmt: skip


class TreeReader:
    """Reads what `TreeWriter` wrote."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self.tensors = tensors
        self.classes = {_name(cls): cls for cls in _our_classes()}

    def read(self, tree: Any) -> Any:
        if isinstance(tree, (*_SIMPLE, float)):
            return tree
        kind = next(iter(tree))
        if kind == "float":
            return float(tree["float"])
        if kind == "tensor":
            return self.tensors[tree["tensor"]]
        if kind == "array":
            return self.tensors[tree["array"]].numpy()
        if kind == "values":
            values = np.empty(len(tree["values"]), dtype=_checked_dtype(tree["dtype"]))
            values[:] = [self.read(item) for item in tree["values"]]
            return values.reshape(tree["shape"])
        if kind == "dict":
            return {self.read(key): self.read(item) for key, item in tree["dict"]}
        if kind in ("list", "tuple"):
            items = [self.read(item) for item in tree[kind]]
            return items if kind == "list" else tuple(items)
        if kind == "frame":
            return self._read_frame(tree)
        if kind == "method":
            return getattr(self._read_object(tree["of"]), tree["method"])
        return self._read_object(tree)

    def _read_frame(self, tree: Any) -> Any:
        columns, parts = self.read(tree["columns"]), self.read(tree["frame"])
        return pd.DataFrame(dict(zip(columns, parts, strict=True)), self.read(tree["index"]))

    def _read_object(self, tree: Any) -> Any:
        cls = self.classes[tree["class"]]
        found = {name: self.read(item) for name, item in tree["fields"].items()}
        if hasattr(cls, "_fields") or is_dataclass(cls):
            return cls(**found)
        made: Any = object.__new__(cls)
        vars(made).update(found)
        return made


def _is_ours(cls: type) -> bool:
    return cls.__module__.startswith(f"{PACKAGE}.")


def _name(cls: type) -> str:
    return f"{cls.__module__.removeprefix(f'{PACKAGE}.')}.{cls.__qualname__}"


def _our_classes() -> Iterator[type]:
    for name, module in list(sys.modules.items()):
        if name.startswith(f"{PACKAGE}."):
            yield from (cls for cls in vars(module).values() if isinstance(cls, type) and _is_ours(cls))


def _fields(value: Any) -> list[tuple[str, Any]]:
    """Of a named tuple, a dataclass or a plain object, without what it computes again."""
    if hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if is_dataclass(value):
        return [(field.name, getattr(value, field.name)) for field in fields(value)]
    return [
        (name, item)
        for name, item in vars(value).items()
        if not isinstance(getattr(type(value), name, None), cached_property)
    ]


def _checked_dtype(name: str) -> np.dtype[Any]:
    dtype = np.dtype(name)
    if dtype.kind not in "biufUO":
        raise DataError(f"arrays of {name} are not read")
    return dtype
