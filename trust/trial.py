"""What every attack reports."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random
from typing import NamedTuple, Protocol


class Trial(NamedTuple):
    """One attack, and what came of it."""

    attack: str  # what was done; trials of the same name share a row of the table
    failure: str | None = None  # what went wrong, with all that is needed to repeat it; None: survived
    figures: Mapping[str, float] = {}  # measured on the way, such as "rounds lost"; the table shows the largest


class Attack(Protocol):
    """A part of the campaign: `count` trials of one kind, in a folder of its own, drawn from `random`."""

    def __call__(self, count: int, random: Random, folder: Path) -> Iterator[Trial]: ...
