"""Experiments from TOML files, with settings changed on the way; and what is wrong with one, in one line: the key, what
was found, what was expected."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from ..core.registry import ByName, Imports, did_you_mean
from ..core.settings import expected_value, shown
from ..data.files import one_line
from ..errors import SettingError
from .experiment import Experiment

_MOST_BYTES = 1 << 20  # of an experiment file
_DEEPEST = 32  # tables or lists within each other
_LONGEST_KEY = 100  # dots
_INSTEAD_OF_ESTIMATOR = ("model", "population", "method", "affinity")
# what other programs call some tables
_OTHER_NAMES = {"algorithm": "method", "algorithms": "methods", "network": "model", "net": "model", "dataset": "data",
                "evaluation": "watch", "metrics": "watch.metrics"}  # fmt: skip

Location = Sequence[int | str]
Variants = list[type[BaseModel]]


def load_experiment(path: str | Path, overrides: Iterable[str] = (), base: Path | None = None) -> Experiment:
    """The experiment of a TOML file; each override is "key.sub=value". Without a name, the file's is taken.

    base: the folder in which modules are looked for first; None: that of the file.
    """
    path = Path(path)
    settings = load_settings(path, overrides)
    if "methods" in settings:
        raise SettingError(f"{path} compares methods; run it with ppfl compare")
    if settings.get("estimator") is not None and (both := [t for t in _INSTEAD_OF_ESTIMATOR if t in settings]):
        raise SettingError(f"the file has [estimator] and [{both[0]}], and one stands for the other; keep one of them")
    try:
        return Experiment.model_validate(settings, context=Imports(path.parent if base is None else base))
    except ValidationError as error:
        raise SettingError(f"{path}: {explain(error, settings)}") from None


def load_settings(path: Path, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """What a TOML file says, with overrides, as yet unchecked."""
    settings = {"name": path.stem, **_read(path)}
    for override in overrides:
        set_by_text(settings, override)
    return settings


def _read(path: Path) -> dict[str, Any]:
    if not os.path.isfile(path):  # noqa: PTH113 (Path.is_file raises for names that no file can have)
        raise SettingError(f"there is no file {path}; give the path of an experiment in TOML")
    try:
        if (size := path.stat().st_size) > _MOST_BYTES:
            raise SettingError(
                f"{path} has {size:,} bytes; an experiment needs at most {_MOST_BYTES:,}: check the path"
            )
        return _parse_toml(path.read_text(encoding="utf-8"), str(path))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        quotes = ", and put text in quotes" if "Invalid value" in str(error) else ""
        raise SettingError(f"{path} is not TOML: {one_line(error)}; correct it there{quotes}") from None
    except OSError as error:
        raise SettingError(f"{path} cannot be read ({error.strerror}); check its permissions") from None


def set_by_text(settings: dict[str, Any], override: str) -> None:
    """Change settings in place by "key.sub=value".

    >>> settings = {"population": {"k": 2}}
    >>> set_by_text(settings, "population.k=4")
    >>> settings
    {'population': {'k': 4}}
    """
    key, equals, text = override.partition("=")
    *tables, last = key.strip().split(".")
    if not equals or not all((*tables, last)):
        raise SettingError(f"--set {override!r} sets nothing; write it as key.sub=value, such as population.k=4")
    if len(tables) >= _DEEPEST:
        raise SettingError(f"--set {override[:60]!r}... is nested deeper than {_DEEPEST} tables; use a shorter key")
    for name in tables:
        settings = settings.setdefault(name, {})
        if not isinstance(settings, dict):
            raise SettingError(f"--set {override!r}: {name!r} is a value, not a table; set {name}=... as a whole")
    settings[last] = parse_value(text.strip())


def parse_value(text: str) -> Any:
    """A TOML value, or else the text itself.

    >>> parse_value("0.5"), parse_value("[1, 2]"), parse_value("ppfl")
    (0.5, [1, 2], 'ppfl')
    """
    try:
        parsed = _parse_toml(f"value = {text}", f"value {text[:60]!r}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text


def _parse_toml(text: str, where: str) -> dict[str, Any]:
    """As tomllib does it, but what is nested too deep or has too many digits is an error of ours."""
    too_deep = SettingError(f"{where} is nested deeper than {_DEEPEST} tables or lists; write it with fewer")
    if any(part.count(".") > _LONGEST_KEY for part in re.split("[=,\n]", text)):
        raise too_deep  # at once, as tomllib takes very long for such keys
    try:
        parsed = tomllib.loads(text)
    except RecursionError:
        raise too_deep from None
    except ValueError as error:
        if isinstance(error, tomllib.TOMLDecodeError):
            raise
        raise SettingError(f"{where} has a value that cannot be used ({one_line(error)}); use a smaller one") from None
    level: list[Any] = [parsed]
    for _ in range(_DEEPEST):
        level = [inner for value in level for inner in _values_in(value)]
    if level:
        raise too_deep
    return parsed


def _values_in(value: Any) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


# ---------------------------------------------------------------------- what is wrong


def explain(error: ValidationError, found: Mapping[str, Any], whole: type[BaseModel] = Experiment) -> str:
    """The first fault of settings that were read as `found`, by default of an experiment."""
    faults = error.errors(include_url=False)
    # a key that is unknown may be the one that is missing
    first = next((fault for fault in faults if fault["type"] == "extra_forbidden"), faults[0])
    location = first["loc"]
    key, value = _locate(location, found)
    if first["type"] == "extra_forbidden":
        return _unknown(key, value, location, _settings_at(location[:-1], found, whole))
    if first["type"] == "missing":
        return _missing(key, location, _settings_at(location, found, whole))
    alternatives = [expected_value(fault) for fault in faults if _locate(fault["loc"], found)[0] == key]
    expected = ", or ".join(dict.fromkeys(alternatives)).replace("a valid tuple", "a list")  # as TOML calls it
    where = f"[{key}]: " if isinstance(value, dict) else f"{key} is {shown(value)}; "
    return f"{where if key else ''}{expected}"


def _locate(location: Location, found: Any) -> tuple[str, Any]:
    """The dotted key as its writer knows it, and its value: pydantic's location also names the kinds of a union."""
    parts: list[str] = []
    for part in location:
        if isinstance(found, dict):
            parts.append(str(part))
            found = found.get(part)
        elif isinstance(found, list | tuple) and isinstance(part, int):
            parts.append(str(part))
            found = found[part] if part < len(found) else None
    return ".".join(parts), found


def _unknown(key: str, value: Any, location: Location, here: Variants) -> str:
    named = ["name"] if any(_name(s) for s in here) else []
    allowed = list(dict.fromkeys([*named, *(key for s in here for key in s.model_fields)]))
    near = _meant(str(location[-1]), allowed)
    return f"unknown key {shown(key)} (found {shown(value)}); {near}keys here are {', '.join(allowed)}"


def _meant(key: str, allowed: Sequence[str]) -> str:
    """What may have been meant by an unknown key, as a question; nothing where that is not known.

    >>> _meant("round", ["name", "rounds"]), _meant("algorithm", ["name", "rounds"]), _meant("k", ["name", "rounds"])
    ("did you mean 'rounds'? ", "did you mean 'method'? ", "did you mean 'population.k'? ")
    """
    if "rounds" in allowed:
        if key in _OTHER_NAMES:
            return f"did you mean {_OTHER_NAMES[key]!r}? "
        for table in sorted(Experiment.model_fields, key="data".__eq__):
            if any(key in settings.model_fields for settings in _variants(Experiment.model_fields[table], None)):
                return f"did you mean '{table}.{key}'? "
    elif key in Experiment.model_fields:
        return f"did you mean {key!r} at the top, before the first table? "
    return did_you_mean(key.lower(), allowed)


def _missing(key: str, location: Location, here: Variants) -> str:
    table, _, name = key.rpartition(".")
    if isinstance(location[-1], int):
        return f"{table} has {location[-1]} values, too few; give one more"
    if len(location) == 1 and here:
        names = ", ".join(map(repr, filter(None, map(_name, here))))
        return f"table [{key}] is missing; add it, with name = one of {names}"
    return f"{key} is missing; add {name} = ... {f'under [{table}]' if table else 'at the top'}"


def _settings_at(location: Location, found: Any, whole: type[BaseModel]) -> Variants:
    """The settings that may stand at a location."""
    here: Variants = [whole]
    for part in location:
        field = next((s.model_fields[part] for s in here if part in s.model_fields), None)
        if field is not None:
            found = found.get(part) if isinstance(found, Mapping) else None
            here = _variants(field, found)
    return here


def _variants(field: FieldInfo, found: Any) -> Variants:
    """The settings that a field may have; the one that `found` names, where it names one of a registry."""
    choice = next((hint for hint in field.metadata if isinstance(hint, ByName)), None)
    if choice is None:
        return _models(field.annotation)
    if isinstance(found, Mapping) and "name" in found:
        with suppress(SettingError):
            return [choice.registry.find(str(found["name"]), None)]
    return [choice.registry[name] for name in choice.names]


def _models(hint: Any) -> Variants:
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return [hint]
    return [model for part in get_args(hint) for model in _models(part)]


def _name(settings: type[BaseModel]) -> str | None:
    field = settings.model_fields.get("name")
    name = getattr(settings, "name", None) if field is None else field.default
    return name if isinstance(name, str) else None
