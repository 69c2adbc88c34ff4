"""Methods by name, in an experiment file or within another method: ours, and a user's own by "module:Class"."""

from __future__ import annotations

from typing import Any

from ..core.registry import ByName, Registry
from ..core.settings import Settings
from ..errors import SettingError
from ..io.codec import message
from .contract import Method

_CONTRACT = ("init_server", "plan", "send", "merge", "init_client", "work", "model")


def _checked_method(name: str, found: Any) -> type[Method]:
    """The class of a method, which from now on may be written and read."""
    is_settings = isinstance(found, type) and issubclass(found, Settings)
    if not is_settings or not all(hasattr(found, part) for part in _CONTRACT):
        what = f"the class {found.__name__}" if isinstance(found, type) else f"a {type(found).__name__}"
        raise SettingError(f"{name!r} is {what}, not a method; name a class that is a ppfl.algorithms.Method")
    try:
        method: type[Method] = message(found)
    except TypeError as error:
        raise SettingError(f"{name!r} cannot be used: {error}") from None
    return method


METHODS: Registry[type[Method]] = Registry("method", _checked_method)


class MethodByName(ByName):
    """A field with a table whose `name` says which method the other keys are settings of."""

    def __init__(self, *, besides: str | None = None) -> None:
        super().__init__(METHODS, besides=besides)
