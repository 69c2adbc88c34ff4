"""What is wrong with an experiment, in one line: the key, what was found, what was expected."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from ..algorithms.registry import MethodByName
from .experiment import Experiment

Location = Sequence[int | str]
_LONGEST = 200  # characters of a value that are shown


def explain(error: ValidationError, found: Mapping[str, Any]) -> str:
    """The first fault of an experiment that was read as `found`."""
    faults = error.errors(include_url=False)
    first = faults[0]
    key, value = _locate(first["loc"], found)
    if first["type"] in _EXPLANATIONS:
        return _EXPLANATIONS[first["type"]](key, value, first["loc"], first)
    alternatives = [fault for fault in faults if _locate(fault["loc"], found)[0] == key]
    return _wrong(key, value, [_expectation(fault) for fault in alternatives])


def _locate(location: Location, found: Any) -> tuple[str, Any]:
    """The dotted key as its writer knows it, and its value: pydantic's location also names variants."""
    parts: list[str] = []
    tagged = False
    for part in location:
        if isinstance(found, dict) and (part in found or tagged or part != found.get("name")):
            parts.append(str(part))
            found, tagged = found.get(part), False
        elif isinstance(found, dict):
            tagged = True  # the variant the table names; what follows is a key of it
        elif isinstance(found, list | tuple) and isinstance(part, int):
            parts.append(str(part))
            found = found[part] if part < len(found) else None
    return ".".join(parts), found


def _unknown(key: str, value: Any, location: Location, fault: Any) -> str:
    allowed = _keys_at(location[:-1])
    near = _near(str(location[-1]), allowed)
    return f"unknown key {_shown(key)} (found {_shown(value)}); {near}keys here are {', '.join(allowed)}"


def _missing(key: str, value: Any, location: Location, fault: Any) -> str:
    if isinstance(location[-1], int):
        return f"{key.rpartition('.')[0]} has {location[-1]} values, too few; give one more"
    if len(location) == 1 and _variants(Experiment.model_fields[str(location[0])]):
        names = ", ".join(map(repr, _names_at(location)))
        return f"table [{key}] is missing; add it, with name = one of {names}"
    return f"{key} is missing; add {key.rpartition('.')[2]} = ... " + (
        f"under [{key.rpartition('.')[0]}]" if "." in key else "at the top"
    )


def _unnamed(key: str, value: Any, location: Location, fault: Any) -> str:
    return (
        f"[{key}] has no name (found {_shown(value)}); set name to one of {', '.join(map(repr, _names_at(location)))}"
    )


def _misnamed(key: str, value: Any, location: Location, fault: Any) -> str:
    names, tag = _names_at(location), str(fault["ctx"]["tag"])
    return f"{key}.name is {_shown(tag)}; {_near(tag, names)}use one of {', '.join(map(repr, names))}"


def _wrong(key: str, value: Any, expectations: Iterable[str]) -> str:
    expected = ", or ".join(dict.fromkeys(expectations))
    if isinstance(value, dict):
        return f"[{key}]: {expected}" if key else expected
    return f"{key} is {_shown(value)}; {expected}" if key else expected


def _expectation(fault: Any) -> str:
    message = " ".join(fault["msg"].removeprefix("Value error, ").split())
    return re.sub(r"^\w+ should", "it should", message).replace("a valid tuple", "a list")  # as TOML calls it


_EXPLANATIONS = {
    "extra_forbidden": _unknown,
    "missing": _missing,
    "union_tag_not_found": _unnamed,
    "union_tag_invalid": _misnamed,
}


def _shown(value: Any) -> str:
    """A value for a message, not too long.

    >>> _shown(0.5), len(_shown("x" * 1000))
    ('0.5', 203)
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # too many digits, or nested too deep
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _near(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]!r}? " if close else ""


def _keys_at(location: Location) -> list[str]:
    settings = _settings_at(location)
    named = ["name"] if any(_name(s) for s in settings) else []
    return list(dict.fromkeys([*named, *(key for s in settings for key in s.model_fields)]))


def _names_at(location: Location) -> list[str]:
    return [name for s in _settings_at(location) if (name := _name(s)) is not None]


def _settings_at(location: Location) -> list[type[BaseModel]]:
    """The settings that may stand at a location."""
    here: list[type[BaseModel]] = [Experiment]
    for part in location:
        field = next((s.model_fields[part] for s in here if part in s.model_fields), None)
        here = _variants(field) if field else [s for s in here if _name(s) == part] or here
    return here


def _variants(field: FieldInfo) -> list[type[BaseModel]]:
    choice = next((hint for hint in field.metadata if isinstance(hint, MethodByName)), None)
    return _models(field.annotation) if choice is None else list(choice.registry.values())


def _models(hint: Any) -> list[type[BaseModel]]:
    if isinstance(hint, type) and issubclass(hint, BaseModel):
        return [hint]
    return [model for part in get_args(hint) for model in _models(part)]


def _name(settings: type[BaseModel]) -> str | None:
    field = settings.model_fields.get("name")
    name = getattr(settings, "name", None) if field is None else field.default
    return name if isinstance(name, str) else None
