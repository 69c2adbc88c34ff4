"""Python functions that an experiment file names: `factory = "package.module:function"`, other keys are its arguments.

A module is looked for in the folder of the experiment file first, then where Python finds any other.
"""

from __future__ import annotations

import importlib
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Annotated, Any

from pydantic import ConfigDict, Field, model_validator

from ..core.settings import Settings
from ..errors import PPFLError, SettingError

_LOADED: dict[str, Path] = {}  # modules that functions were taken from, and the folder each was found in


PythonName = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")]


class FactorySettings(Settings):
    """A function and its keyword arguments, which are plain values, so that settings can be written as JSON."""

    model_config = ConfigDict(frozen=True, extra="allow")

    factory: PythonName

    @model_validator(mode="after")
    def _takes_plain_values(self) -> FactorySettings:
        for key, value in self.arguments.items():
            if not _is_plain(value):
                raise ValueError(
                    f"{key} is {value!r:.100}; an argument of a factory is a finite number, text, true or false, or a "
                    "list or table of these"
                )
        return self

    @property
    def arguments(self) -> dict[str, Any]:
        """The keyword arguments in the file."""
        return dict(self.model_extra or {})

    def call(self, table: str, base: Path | None, offered: Mapping[str, Any], error: type[PPFLError]) -> Any:
        """The function's result. It also gets what is offered, as far as its signature names it."""
        function = find_function(self.factory, base, table)
        wanted = inspect.signature(function)
        named = {name for name, p in wanted.parameters.items() if p.kind is not p.VAR_KEYWORD}
        arguments = {name: value for name, value in offered.items() if name in named} | self.arguments
        try:
            wanted.bind(**arguments)
        except TypeError as fault:
            raise SettingError(
                f"[{table}]: {self.factory} cannot be called with {', '.join(self.arguments) or 'no arguments'}: "
                f"{fault}; it takes {wanted}: give these as keys under [{table}]"
            ) from None
        try:
            return function(**arguments)
        except PPFLError:
            raise
        except Exception as fault:
            raise error(f"[{table}]: {self.factory} failed: {_where(fault)}; correct it there") from fault


def with_factory_name(table: Any) -> Any:
    """A table with a factory needs no name."""
    return {"name": "factory", **table} if isinstance(table, dict) and "factory" in table else table


def find_function(factory: str, base: Path | None, table: str) -> Callable[..., Any]:
    """The function "package.module:function"; modules in the folder `base` come before all others."""
    name, _, path = factory.partition(":")
    folder = (Path() if base is None else base).resolve()
    with _importing_from(folder, name.partition(".")[0], table):
        try:
            found: Any = importlib.import_module(name)
        except Exception as fault:
            if isinstance(fault, ModuleNotFoundError) and fault.name and f"{name}.".startswith(f"{fault.name}."):
                raise SettingError(
                    f"[{table}]: there is no module {fault.name!r} for {factory!r}; put it into {folder}, "
                    "the folder of the experiment file, or install it"
                ) from None
            raise SettingError(
                f"[{table}]: the module {name!r} cannot be imported: {_where(fault)}; correct it there"
            ) from fault
    for part in path.split("."):
        if not hasattr(found, part):
            public = [key for key, value in vars(found).items() if callable(value) and not key.startswith("_")]
            raise SettingError(
                f"[{table}]: {name!r} has no {part!r}, which {factory!r} names; "
                f"it has {', '.join(public[:10]) or 'no functions'}"
            )
        found = getattr(found, part)
    if not callable(found):
        raise SettingError(f"[{table}]: {factory!r} is a {type(found).__name__}; name a function or a class")
    function: Callable[..., Any] = found
    return function


@contextmanager
def _importing_from(folder: Path, top: str, table: str) -> Iterator[None]:
    """The folder in front of the import path, and no module of this name from another experiment's folder."""
    here = PathFinder.find_spec(top, [str(folder)])
    if here is not None and top in sys.modules and _LOADED.get(top) != folder:
        if top not in _LOADED:
            loaded = getattr(sys.modules[top], "__file__", None) or "Python itself"
            if not (here.origin and Path(here.origin).resolve() == Path(loaded).resolve()):
                raise SettingError(
                    f"[{table}]: the module {top!r} in {folder} has the name of another one, of {loaded}; "
                    "rename the file"
                )
        for name in [name for name in sys.modules if f"{name}.".startswith(f"{top}.")]:
            del sys.modules[name]
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()  # the file may be younger than what Python last saw of the folder
    try:
        yield
        if here is not None:
            _LOADED[top] = folder
    finally:
        sys.path.remove(str(folder))


def _where(fault: BaseException) -> str:
    """What went wrong, and in which line of a file."""
    said = " ".join(f"{type(fault).__name__}: {fault}".split())
    frames = traceback.extract_tb(fault.__traceback__)
    last = next((frame for frame in reversed(frames) if "importlib" not in frame.filename), None)
    return said if last is None or isinstance(fault, SyntaxError) else f"{said} ({last.filename}, line {last.lineno})"


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(inner) for key, inner in value.items())
    return isinstance(value, bool | int | str) or (isinstance(value, float) and math.isfinite(value))
