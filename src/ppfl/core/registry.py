"""Names in experiment files stand for functions and classes: for those of a registry, or any "package.module:object".

The other keys of the table are the keyword arguments of the function, or the fields of the class. A module is looked
for in the folder of the experiment file first, then where Python finds any other. The module of a class is imported
when the settings are read, that of a function when it is called. Reading settings imports nothing unless they are
validated with `Imports` as their context, which says from where and what; without it only classes that were imported
before are found.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar, get_type_hints

from pydantic import (
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    SerializationInfo,
    ValidationError,
    ValidationInfo,
    create_model,
    model_validator,
)
from pydantic_core import CoreSchema, core_schema

from ..errors import PPFLError, SettingError
from .settings import Settings, first_fault

T = TypeVar("T")
Function = TypeVar("Function", bound=Callable[..., Any])

_LOADED: dict[str, Path] = {}  # modules that objects were taken from, and the folder each was found in

_PYTHON_NAME = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*$"
PythonName = Annotated[str, Field(pattern=_PYTHON_NAME)]


class Imports(NamedTuple):
    """Lets modules be imported for names in settings: `Experiment.model_validate(found, context=Imports(folder))`.

    folder: whose modules come before all others; None: the working directory.
    """

    folder: Path | None = None


class Registry(Mapping[str, T]):
    """Classes of settings by name; `find` also takes "module:Class".

    Args:
        what: what they are, for messages: "method".
        check: gives the class of settings for what is registered or imported, or raises SettingError where it is none.
    """

    def __init__(self, what: str, check: Callable[..., T]) -> None:
        self.what, self.check = what, check
        self._known: dict[str, T] = {}
        self._imported: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        return self._known[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def register(self, name: str, **about: Any) -> Callable[[Function], Function]:
        """A decorator that lets experiment files name a function or a class."""

        def add(found: Function) -> Function:
            self._known[name] = self.check(name, found, **about)
            return found

        return add

    def find(self, name: str, imports: Imports | None) -> T:
        """The class with this name; SettingError where there is none, or where it may not be imported."""
        if name in self._known:
            return self._known[name]
        if ":" not in name:
            raise SettingError(
                f"there is no {self.what} {name!r:.200}; {did_you_mean(name, self)}use one of "
                f'{", ".join(map(repr, self))}, or "{self._own_name}" for one of your own'
            )
        return self._find_own(name, imports)

    _own_name: ClassVar[str] = "module:Class"

    def _find_own(self, name: str, imports: Imports | None) -> T:
        if imports is None:
            if name not in self._imported:
                raise SettingError(f"the {self.what} {name!r:.200} has not been imported here; pass its class")
            return self._imported[name]
        self._imported[name] = found = self.check(name, find_function(name, imports.folder))
        return found

    def check_class(self, kind: type) -> None:
        """Raise SettingError where a class is none of these."""
        self.check(self.name_of(kind), kind)

    def name_of(self, kind: type) -> str:
        """The name that `find` finds a class by."""
        names = (name for known in (self._known, self._imported) for name, found in known.items() if found is kind)
        return next(names, f"{kind.__module__}:{kind.__qualname__}")


class NamedCall(Settings):
    """A table of an experiment file: the name of a function, and values for its keyword arguments.

    The registry makes one class for every function: its fields are the keyword arguments of the function, and those of
    the registry's or the function's own `base`.
    """

    model_config = ConfigDict(arbitrary_types_allowed=True, protected_namespaces=(), validate_default=True)

    name: str
    function: ClassVar[Callable[..., Any] | None] = None  # None: it is imported when it is called
    registry: ClassVar[Functions]

    def call(self, base: Path | None = None, **given: Any) -> Any:
        """What the function returns.

        A relative path among the arguments starts at `base`, and so does the search for the module of a function of
        one's own. `given` is passed as far as the function's signature names it.
        """
        function = type(self).function
        if function is not None:
            return function(**self._arguments(function, base, dict(self), given))
        function = find_function(self.name, base, self.registry.table)
        own = _checked_arguments(self, function, given)
        try:
            return function(**self._arguments(function, base, dict(self) | own, given))
        except PPFLError:
            raise
        except Exception as fault:
            raise self.registry.error(
                f"[{self.registry.table}]: {self.name} failed: {_where(fault)}; correct it there"
            ) from fault

    def _arguments(
        self, function: Callable[..., Any], base: Path | None, values: dict[str, Any], given: Mapping[str, Any]
    ) -> dict[str, Any]:
        own = self.model_extra or {}
        named = {name for name, p in inspect.signature(function).parameters.items() if p.kind in _BY_KEYWORD}
        found = {key: value for key, value in values.items() if key in own or (key in named and key != "name")}
        found = {key: find_path(value, base) if isinstance(value, Path) else value for key, value in found.items()}
        return {key: value for key, value in given.items() if key in named} | found


class _OwnCall(NamedCall):
    """A function "module:function" by its name; what its arguments may be is seen when it is called."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="after")
    def _takes_plain_values(self) -> _OwnCall:
        for key, value in (self.model_extra or {}).items():
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError):
                raise ValueError(
                    f"{key} is {value!r:.100}; an argument of a function is a finite number, text, true or false, or a "
                    "list or table of these"
                ) from None
        return self


class Functions(Registry[type[NamedCall]]):
    """Functions by name; the keyword arguments of a function are the keys of its table.

    Types and defaults of the keys are those of the signature. `name = "module:function"` is a function of one's own:
    it is imported when it is called, and its keys are checked then.

    Args:
        what: what they are, for messages: "data set".
        table: where they stand in an experiment file, for messages: "data".
        given: parameters that the program passes to `NamedCall.call`; they are never keys.
        base: keys that all tables have besides the arguments. A function that has a parameter of such a name gets it.
        error: raised when a function of one's own fails.

    >>> shapes = Functions("shape", "shape", given=["seed"])
    >>> @shapes.register("circle")
    ... def circle(seed: int, radius: float = 1.0) -> str:
    ...     return f"{seed}: {radius}"
    >>> asked = shapes.make("circle", radius=2)
    >>> asked, asked.call(seed=5)
    (circle(radius=2.0), '5: 2.0')
    """

    _own_name = "module:function"

    def __init__(
        self,
        what: str,
        table: str,
        given: Iterable[str] = (),
        base: type[Settings] = Settings,
        error: type[PPFLError] = SettingError,
    ) -> None:
        super().__init__(what, self._model)
        self.table, self.given, self.base, self.error = table, frozenset(given), base, error

    def field(self, *, optional: bool = False) -> ByName:
        """For `Annotated[NamedCall, ....field()]`: a table with a name of these; `optional` allows None too."""
        return ByName(self, optional=optional)

    def make(self, name: str, imports: Imports | None = None, /, **settings: Any) -> NamedCall:
        """What a table with this name and these keys stands for; SettingError where it may not have them."""
        kind = self.find(name, imports)
        try:
            return kind.model_validate(settings, context=imports)
        except ValidationError as error:
            raise SettingError(f"[{self.table}] {first_fault(error, kind.model_fields, 'key')}") from None

    def check_class(self, kind: type) -> None:
        """Raise SettingError where a class is none of these."""
        if getattr(kind, "registry", None) is not self:
            raise SettingError(f"{kind.__name__} is not a {self.what}; use one of {', '.join(map(repr, self))}")

    def _model(
        self, name: str, function: Callable[..., Any], base: type[Settings] | None = None, **defaults: Any
    ) -> type[NamedCall]:
        """The class of a function; `base` in the place of the registry's, with other `defaults` for some keys."""
        base = self.base if base is None else base
        made = self._subclass(name, base, NamedCall, _fields(function, {*self.given, *base.model_fields}), defaults)
        made.function = staticmethod(function)
        return made

    def _find_own(self, name: str, imports: Imports | None) -> type[NamedCall]:
        if not re.match(_PYTHON_NAME, name):
            raise SettingError(f'{name!r:.200} is no name of a function; write "module:function"')
        if name not in self._imported:
            self._imported[name] = self._subclass(name, self.base, _OwnCall, {}, {})
        return self._imported[name]

    def _subclass(
        self, name: str, base: type[Settings], call: type[NamedCall], fields: dict[str, Any], defaults: dict[str, Any]
    ) -> type[NamedCall]:
        for key, value in defaults.items():
            known = base.model_fields[key]
            fields[key] = (known.rebuild_annotation(), value)
        bases: Any = (call,) if base is Settings else (base, call)
        fields["name"] = (Literal[name], name)
        made: type[NamedCall] = create_model(name, __base__=bases, **fields)
        made.registry = self
        return made


class ByName:
    """A field with a table whose `name` says which class of a registry the other keys are settings of."""

    def __init__(self, registry: Registry[Any], *, excluded: str | None = None, optional: bool = False) -> None:
        self.registry, self.excluded = registry, excluded  # excluded: a name that cannot be chosen here
        self.optional = optional  # whether None stands for no table

    @property
    def names(self) -> list[str]:
        """The registered names to choose from."""
        return [name for name in self.registry if name != self.excluded]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        dump = core_schema.plain_serializer_function_ser_schema(self._dump, info_arg=True)
        return core_schema.with_info_plain_validator_function(self._validate, serialization=dump)

    def _dump(self, found: Settings | None, info: SerializationInfo) -> dict[str, Any] | None:
        if found is None:
            return None
        settings = found.model_dump(mode="json", exclude_none=info.exclude_none, exclude_unset=info.exclude_unset)
        return {"name": self.registry.name_of(type(found)), **settings}

    def _validate(self, value: Any, info: ValidationInfo) -> Any:
        what, names = self.registry.what, ", ".join(map(repr, self.names))
        if value is None and self.optional:
            return None
        if isinstance(value, Settings):
            name = self.registry.name_of(type(value))
        elif isinstance(value, dict) and "name" in value:
            name = str(value["name"])
        else:
            raise ValueError(f"it has no name (found {value!r:.200}); set name to one of {names}")
        if name == self.excluded:
            raise ValueError(f"the {what} {name!r} cannot stand here; use one of {names}")
        if isinstance(value, Settings):
            self.registry.check_class(type(value))
            return value
        kind = self.registry.find(name, info.context if isinstance(info.context, Imports) else None)
        return kind.model_validate({key: of for key, of in value.items() if key != "name"}, context=info.context)


def python_names(settings: Mapping[str, Any]) -> list[str]:
    """Names of Python objects in the settings of an experiment: every `name` with a colon, and metrics.

    Those under [data] are left out: every site has data of its own.
    """
    watch = settings.get("watch")
    found = list(watch.get("metrics", ())) if isinstance(watch, Mapping) else []
    tables: list[Any] = [{key: value for key, value in settings.items() if key != "data"}]
    while tables:
        table = tables.pop()
        if isinstance(table, Mapping):
            found += [table["name"]] if ":" in str(table.get("name", "")) else []
            tables += table.values()
        elif isinstance(table, list | tuple):
            tables += table
    return list(dict.fromkeys(map(str, found)))


def find_path(path: Path, base: Path | None) -> Path:
    """A path relative to the experiment file (or the working directory); if it does not exist there, in PPFL_DATA."""
    try:
        path = path.expanduser()
    except RuntimeError as error:
        raise SettingError(f"{path} cannot be found ({error}); write the whole path") from None
    near = path if base is None else base / path
    far = Path(os.environ.get("PPFL_DATA") or near) / path
    # os.path, because the methods of Path raise for names that no file can have
    return far if os.path.exists(far) and not os.path.exists(near) else near  # noqa: PTH110


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The known name that is nearest, as a question; nothing where none is near.

    >>> did_you_mean("pplf", ["local", "ppfl"])
    "did you mean 'ppfl'? "
    """
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]!r}? " if near else ""


def find_function(text: str, folder: Path | None, table: str = "") -> Callable[..., Any]:
    """The function or class "package.module:function"; modules in `folder` come before all others. Errors name the
    `table`."""
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
    if not callable(found):
        raise SettingError(f"{where}{text!r} is a {type(found).__name__}; name a function or a class")
    function: Callable[..., Any] = found
    return function


_BY_KEYWORD = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


def _fields(function: Callable[..., Any], but: Iterable[str]) -> dict[str, Any]:
    """Fields of a model for the keyword arguments of a function: their types, and their defaults if any."""
    try:
        of: Any = getattr(function, "__init__") if isinstance(function, type) else function  # noqa: B009
        hints = get_type_hints(of, include_extras=True)
    except (NameError, TypeError, AttributeError):
        hints = {}  # types that are not there when it runs, as in a function of one's own
    return {
        name: (hints.get(name, Any), ... if p.default is p.empty else p.default)
        for name, p in inspect.signature(function).parameters.items()
        if p.kind in _BY_KEYWORD and name not in but
    }


def _checked_arguments(asked: NamedCall, function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a function of one's own as the types of its signature; SettingError where it does not take them."""
    where, own = f"[{asked.registry.table}]: {asked.name}", dict(asked.model_extra or {})
    wanted, common = inspect.signature(function), dict(asked)
    named = wanted.parameters.keys()
    try:
        wanted.bind(**{key: value for key, value in (common | dict(given)).items() if key in named} | own)
    except TypeError as fault:
        raise SettingError(
            f"{where} cannot be called with {', '.join(own) or 'no arguments'}: {fault}; "
            f"it takes {wanted}: give these as keys under [{asked.registry.table}]"
        ) from None
    fields: dict[str, Any] = {key: (hint, ...) for key, (hint, _) in _fields(function, ()).items() if key in own}
    kind = create_model("Arguments", __config__=NamedCall.model_config | {"extra": "allow"}, **fields)
    try:
        return dict(kind.model_validate(own))
    except ValidationError as error:
        raise SettingError(f"{where}: {first_fault(error, kind.model_fields, 'key')}; it takes {wanted}") from None


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
