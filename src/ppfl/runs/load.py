"""Experiments from TOML files, with settings changed on the way."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ..core.errors import SettingError
from .experiment import Experiment
from .explain import explain


def load_experiment(path: str | Path, overrides: Iterable[str] = ()) -> Experiment:
    """The experiment of a TOML file; each override is "key.sub=value". Without a name, the file's is taken."""
    path = Path(path)
    settings = load_settings(path, overrides)
    if "methods" in settings:
        raise SettingError(f"{path} compares methods; run it with ppfl compare")
    try:
        return Experiment.model_validate(settings)
    except ValidationError as error:
        raise SettingError(f"{path}: {explain(error, settings)}") from None


def load_settings(path: Path, overrides: Iterable[str] = ()) -> dict[str, Any]:
    """What a TOML file says, with overrides, as yet unchecked."""
    settings = {"name": path.stem, **_read(path)}
    for override in overrides:
        set_by_text(settings, override)
    return settings


def _read(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise SettingError(f"there is no file {path}; give the path of an experiment in TOML")
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingError(f"{path} is not TOML: {_one_line(error)}; correct it there") from None
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
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    return parsed["value"] if parsed.keys() == {"value"} else text


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
