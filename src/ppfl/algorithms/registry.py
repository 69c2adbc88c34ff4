"""Methods by name, in an experiment file or within another method: ours, and a user's own by "module:Class"."""

from __future__ import annotations

from typing import Any

from ..core.registry import ByName, Registry
from ..errors import SettingError
from ..io.codec import message
from .contract import Method


def _checked_method(name: str, found: Any) -> type[Method]:
    """The class of a method, which from now on may be written and read."""
    if not (isinstance(found, type) and issubclass(found, Method)):
        what = f"the class {found.__name__}" if isinstance(found, type) else f"a {type(found).__name__}"
        raise SettingError(f"{name!r} is {what}, not a method; name a class that is a ppfl.algorithms.Method")
    try:
        return message(found)
    except TypeError as error:
        raise SettingError(f"{name!r} cannot be used: {error}") from None


METHODS: Registry[type[Method]] = Registry("method", _checked_method)


class MethodByName(ByName):
    """A field with a table whose `name` says which method the other keys are settings of."""

    def __init__(self, *, besides: str | None = None) -> None:
        super().__init__(METHODS, besides=besides)
