"""Names in experiment files stand for Python objects: for those of a registry, or for any by "package.module:object".

The other keys of the table are the keyword arguments. A module is looked for in the folder of the experiment file
first, then where Python finds any other. Reading settings imports nothing unless they are validated with `Imports` as
their context, which says from where and what; without it only classes that were imported before are found.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import ConfigDict, Field, GetCoreSchemaHandler, ValidationInfo, model_validator
from pydantic_core import CoreSchema, core_schema

from ..errors import PPFLError, SettingError
from .settings import Settings

T = TypeVar("T")

_LOADED: dict[str, Path] = {}  # modules that objects were taken from, and the folder each was found in


PythonName = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$")]


class Imports(NamedTuple):
    """Lets modules be imported for names in settings: `Experiment.model_validate(found, context=Imports(folder))`.

    folder: whose modules come before all others; None: the working directory.
    allow: names that may be imported; None: all.
    """

    folder: Path | None = None
    allow: tuple[str, ...] | None = None


class Registry(Mapping[str, T]):
    """Classes of settings by name; `find` also takes "module:Class".

    Args:
        what: what they are, for messages: "method".
        check: gives an imported object back, or raises SettingError where it is none of them.
    """

    def __init__(self, what: str, check: Callable[[str, Any], T]) -> None:
        self.what, self.check = what, check
        self._known: dict[str, T] = {}
        self._imported: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def register(self, name: str, found: T) -> None:
        """Let experiment files name it."""
        self._known[name] = self.check(name, found)

    def find(self, name: str, imports: Imports | None) -> T:
        """The class with this name; SettingError where there is none, or where it may not be imported."""
        if name in self._known:
            return self._known[name]
        if ":" not in name:
            raise SettingError(
                f"there is no {self.what} {name!r:.200}; {did_you_mean(name, self)}use one of "
                f'{", ".join(map(repr, self))}, or "module:Class" for one of your own'
            )
        if imports is None:
            if name not in self._imported:
                raise SettingError(f"the {self.what} {name!r:.200} has not been imported here; pass its class")
            return self._imported[name]
        if imports.allow is not None and name not in imports.allow:
            allowed = ", ".join(imports.allow) or "nothing"
            raise SettingError(f"{name!r:.200} may not be imported here; `allow` in site.toml has {allowed}")
        self._imported[name] = found = self.check(name, find_object(name, imports.folder))
        return found

    def name_of(self, kind: type) -> str:
        """The name that `find` finds a class by."""
        names = (name for known in (self._known, self._imported) for name, found in known.items() if found is kind)
        return next(names, f"{kind.__module__}:{kind.__qualname__}")


class ByName:
    """A field with a table whose `name` says which class of a registry the other keys are settings of."""

    def __init__(self, registry: Registry[Any], *, besides: str | None = None) -> None:
        self.registry, self.besides = registry, besides  # besides: a name that cannot be chosen here

    @property
    def names(self) -> list[str]:
        """The registered names to choose from."""
        return [name for name in self.registry if name != self.besides]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        dump = core_schema.plain_serializer_function_ser_schema(
            lambda found: {"name": self.registry.name_of(type(found)), **found.model_dump(mode="json")}
        )
        return core_schema.with_info_plain_validator_function(self._validate, serialization=dump)

    def _validate(self, value: Any, info: ValidationInfo) -> Any:
        what, names = self.registry.what, ", ".join(map(repr, self.names))
        if isinstance(value, Settings):
            name = self.registry.name_of(type(value))
        elif isinstance(value, dict) and "name" in value:
            name = str(value["name"])
        else:
            raise ValueError(f"it has no name (found {value!r:.200}); set name to one of {names}")
        if name == self.besides:
            raise ValueError(f"the {what} {name!r} cannot stand here; use one of {names}")
        if isinstance(value, Settings):
            self.registry.check(name, type(value))
            return value
        kind = self.registry.find(name, info.context if isinstance(info.context, Imports) else None)
        return kind.model_validate({key: of for key, of in value.items() if key != "name"}, context=info.context)


def python_names(settings: Mapping[str, Any]) -> list[str]:
    """Names of Python objects in the settings of an experiment: `name` and `factory` of any table, and metrics.

    Those under [data] are left out: every site has data of its own.
    """
    watch = settings.get("watch")
    found = list(watch.get("metrics", ())) if isinstance(watch, Mapping) else []
    tables: list[Any] = [{key: value for key, value in settings.items() if key != "data"}]
    while tables:
        table = tables.pop()
        if isinstance(table, Mapping):
            found += [table[key] for key in ("name", "factory") if ":" in str(table.get(key, ""))]
            tables += table.values()
        elif isinstance(table, list | tuple):
            tables += table
    return list(dict.fromkeys(map(str, found)))


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The known name that is nearest, as a question; nothing where none is near.

    >>> did_you_mean("pplf", ["local", "ppfl"])
    "did you mean 'ppfl'? "
    """
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]!r}? " if near else ""


def find_object(text: str, folder: Path | None, table: str = "") -> Any:
    """The object "package.module:object"; modules in `folder` come before all others. Errors name the `table`."""
    name, _, path = text.partition(":")
    where = f"[{table}]: " if table else ""
    folder = (Path() if folder is None else folder).resolve()
    with _importing_from(folder, name.partition(".")[0], where):
        try:
            found: Any = importlib.import_module(name)
        except Exception as fault:
            if isinstance(fault, ModuleNotFoundError) and fault.name and f"{name}.".startswith(f"{fault.name}."):
                raise SettingError(
                    f"{where}there is no module {fault.name!r} for {text!r}; put it into {folder}, "
                    "the folder of the experiment file, or install it"
                ) from None
            raise SettingError(
                f"{where}the module {name!r} cannot be imported: {_where(fault)}; correct it there"
            ) from fault
    for part in path.split("."):
        if not hasattr(found, part):
            public = [key for key, value in vars(found).items() if callable(value) and not key.startswith("_")]
            raise SettingError(
                f"{where}{name!r} has no {part!r}, which {text!r} names; {did_you_mean(part, public)}"
                f"it has {', '.join(public[:10]) or 'no functions'}"
            )
        found = getattr(found, part)
    return found


def find_function(text: str, folder: Path | None, table: str) -> Callable[..., Any]:
    """The function or class "package.module:function"."""
    found = find_object(text, folder, table)
    if not callable(found):
        raise SettingError(f"[{table}]: {text!r} is a {type(found).__name__}; name a function or a class")
    function: Callable[..., Any] = found
    return function


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


@contextmanager
def _importing_from(folder: Path, top: str, where: str) -> Iterator[None]:
    """The folder in front of the import path, and no module of this name from another experiment's folder."""
    here = PathFinder.find_spec(top, [str(folder)])
    if here is not None and top in sys.modules and _LOADED.get(top) != folder:
        if top not in _LOADED:
            loaded = getattr(sys.modules[top], "__file__", None) or "Python itself"
            if not (here.origin and Path(here.origin).resolve() == Path(loaded).resolve()):
                raise SettingError(
                    f"{where}the module {top!r} in {folder} has the name of another one, of {loaded}; rename the file"
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
