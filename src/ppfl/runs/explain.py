"""What is wrong with an experiment, in one line: the key, what was found, what was expected."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from ..core.registry import ByName, did_you_mean
from ..core.settings import expected_value, shown
from ..errors import SettingError
from .experiment import Experiment

Location = Sequence[int | str]
Variants = list[type[BaseModel]]


def explain(error: ValidationError, found: Mapping[str, Any]) -> str:
    """The first fault of an experiment that was read as `found`."""
    faults = error.errors(include_url=False)
    first = faults[0]
    if first["type"] == "missing":  # perhaps it is there by another name
        beside = [fault for fault in faults if fault["type"] == "extra_forbidden"]
        first = next((fault for fault in beside if fault["loc"][:-1] == first["loc"][:-1]), first)
    key, value = _locate(first["loc"], found)
    if first["type"] in _EXPLANATIONS:
        here = _settings_at(first["loc"][:-1] if first["type"] == "extra_forbidden" else first["loc"], found)
        return _EXPLANATIONS[first["type"]](key, value, first, here)
    alternatives = [fault for fault in faults if _locate(fault["loc"], found)[0] == key]
    return _wrong(key, value, [_expected(fault) for fault in alternatives])


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


def _unknown(key: str, value: Any, fault: Any, here: Variants) -> str:
    named = ["name"] if any(_name(s) for s in here) else []
    allowed = list(dict.fromkeys([*named, *(key for s in here for key in s.model_fields)]))
    near = did_you_mean(str(fault["loc"][-1]), allowed)
    return f"unknown key {shown(key)} (found {shown(value)}); {near}keys here are {', '.join(allowed)}"


def _missing(key: str, value: Any, fault: Any, here: Variants) -> str:
    last = fault["loc"][-1]
    if isinstance(last, int):
        return f"{key.rpartition('.')[0]} has {last} values, too few; give one more"
    if len(fault["loc"]) == 1 and here:
        names = ", ".join(map(repr, filter(None, map(_name, here))))
        return f"table [{key}] is missing; add it, with name = one of {names}"
    return f"{key} is missing; add {key.rpartition('.')[2]} = ... " + (
        f"under [{key.rpartition('.')[0]}]" if "." in key else "at the top"
    )


def _unnamed(key: str, value: Any, fault: Any, here: Variants) -> str:
    names = ", ".join(map(repr, filter(None, map(_name, here))))
    return f"[{key}] has no name (found {shown(value)}); set name to one of {names}"


def _misnamed(key: str, value: Any, fault: Any, here: Variants) -> str:
    names, tag = [name for s in here if (name := _name(s)) is not None], str(fault["ctx"]["tag"])
    return f"{key}.name is {shown(tag)}; {did_you_mean(tag, names)}use one of {', '.join(map(repr, names))}"


def _wrong(key: str, value: Any, expectations: Iterable[str]) -> str:
    expected = ", or ".join(dict.fromkeys(expectations))
    if isinstance(value, dict):
        return f"[{key}]: {expected}" if key else expected
    return f"{key} is {shown(value)}; {expected}" if key else expected


def _expected(fault: Any) -> str:
    return expected_value(fault).replace("a valid tuple", "a list")  # as TOML calls it


_EXPLANATIONS = {
    "extra_forbidden": _unknown,
    "missing": _missing,
    "union_tag_not_found": _unnamed,
    "union_tag_invalid": _misnamed,
}


def _settings_at(location: Location, found: Any) -> Variants:
    """The settings that may stand at a location."""
    here: Variants = [Experiment]
    for part in location:
        field = next((s.model_fields[part] for s in here if part in s.model_fields), None)
        if field is None:
            here = [s for s in here if _name(s) == part] or here
        else:
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
