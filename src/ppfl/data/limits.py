"""How large data may become. A small file can describe more than any memory holds, so sizes are checked before.

The limits protect a machine, not an experiment, so they are set where the program runs: the environment variable
PPFL_LIMITS, such as "bytes=8e9,classes=1e6", holds for every reader and every command.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

from pydantic import Field, ValidationError

from ppfl.core.settings import Settings
from ppfl.errors import DataError, PPFLError, SettingError

VARIABLE = "PPFL_LIMITS"
_chosen: ContextVar["Limits | None"] = ContextVar("limits", default=None)


class Limits(Settings):
    """The largest sizes that are accepted."""

    bytes: int = Field(2**31, ge=1)  # of one file after decompression, of drawn data, of K copies of a network
    classes: int = Field(100_000, ge=1)  # of a target
    features: int = Field(1_000_000, ge=1)  # of a sample, and columns of a table
    clients: int = Field(10_000_000, ge=1)  # of a federation


def current_limits() -> Limits:
    """Those of the innermost `limited`, or of the environment variable PPFL_LIMITS, or the defaults."""
    return _chosen.get() or _parsed(os.environ.get(VARIABLE, ""))


@contextmanager
def limited(**changes: int) -> Iterator[Limits]:
    """Other limits for a while.

    >>> with limited(classes=10) as limits:
    ...     limits.classes, current_limits().classes, current_limits().clients
    (10, 10, 10000000)
    """
    token = _chosen.set(_validated(current_limits().model_dump() | changes))
    try:
        yield current_limits()
    finally:
        _chosen.reset(token)


def check_limit(
    name: str, found: int, what: str, remedy: str = "", error: Callable[[str], PPFLError] = DataError
) -> None:
    """Refuse a size above the limit of that name; `what` says whose size it is, `remedy` what may be wrong.

    >>> check_limit("classes", 10, "y has 10 classes")
    """
    most = getattr(current_limits(), name)
    if found > most:
        raise error(f"{what}, more than the limit of {most:,}; {remedy}set {VARIABLE}={name}={_rounded_up(found)}")


def _rounded_up(size: int) -> str:
    """A number to set a limit to, at least `size` and short.

    >>> _rounded_up(4_000_000_001)
    '5e9'
    """
    zeros = len(str(size)) - 1 if size < 10**100 else 100
    return f"{size // 10**zeros + 1}e{zeros}" if zeros else str(size)


@lru_cache(maxsize=1)  # asked for in every round
def _parsed(text: str) -> Limits:
    pairs = [part.partition("=")[::2] for part in text.split(",") if part.strip()]
    return _validated({name.strip(): _number(value) for name, value in pairs})


def _number(text: str) -> Any:
    try:
        return int(float(text))
    except (ValueError, OverflowError):
        return text


def _validated(sizes: dict[str, Any]) -> Limits:
    try:
        return Limits.model_validate(sizes)
    except ValidationError as error:
        fault = error.errors()[0]
        key = ".".join(map(str, fault["loc"]))
        raise SettingError(
            f"limit {key!r} is {fault['input']!r}: {fault['msg']}; write whole numbers for some of "
            f"{', '.join(Limits.model_fields)}, such as {VARIABLE}=bytes=8e9,classes=1e6"
        ) from None
