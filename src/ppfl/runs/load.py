"""Experiments from TOML files, with settings changed on the way."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..core.registry import Imports
from ..data.files import one_line
from ..errors import SettingError
from .estimator_settings import refuse_both
from .experiment import Experiment
from .explain import explain

_MOST_BYTES = 1 << 20  # of an experiment file
_DEEPEST = 32  # tables or lists within each other
_LONGEST_KEY = 100  # dots


def load_experiment(
    path: str | Path, overrides: Iterable[str] = (), allow: tuple[str, ...] | None = None
) -> Experiment:
    """The experiment of a TOML file; each override is "key.sub=value". Without a name, the file's is taken.

    allow: "module:Class" of the methods that may be imported; None: all.
    """
    path = Path(path)
    settings = load_settings(path, overrides)
    if "methods" in settings:
        raise SettingError(f"{path} compares methods; run it with ppfl compare")
    refuse_both(settings)
    try:
        return Experiment.model_validate(settings, context=Imports(path.parent, allow))
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
        raise SettingError(f"{path} is not TOML: {one_line(error)}; correct it there") from None
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
