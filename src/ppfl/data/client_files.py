"""Data sets by client: which files of a folder are read, and which of their clients are taken."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from ppfl.data.samples import random_rows
from ppfl.errors import DataError


class SplitFiles(NamedTuple):
    """The files of a data set: those for training, and those for testing if the data set has its own."""

    train: list[Path]
    test: list[Path]

    def marked(self) -> list[tuple[Path, bool]]:
        """Every file, with whether it is for testing."""
        return [(path, False) for path in self.train] + [(path, True) for path in self.test]


def find_files(path: str | Path, patterns: Sequence[tuple[str, str]], wanted: str) -> SplitFiles:
    """The file itself, or in a folder the files of the first (training, test) patterns that fit; "" fits no file.

    >>> find_files("no such folder", [("train.h5", "test.h5")], "train.h5")
    Traceback (most recent call last):
        ...
    ppfl.errors.DataError: no train.h5 in no such folder; check the path, or set PPFL_DATA to your data folder
    """
    # os.path, because the methods of Path raise for names that no file can have
    if os.path.isfile(path):  # noqa: PTH113
        return SplitFiles([Path(path)], [])
    for train, test in patterns if os.path.isdir(path) else ():  # noqa: PTH112
        if found := sorted(Path(path).glob(train)):
            return SplitFiles(found, sorted(Path(path).glob(test)) if test else [])
    raise DataError(f"no {wanted} in {path}; check the path, or set PPFL_DATA to your data folder")


def choose_clients(
    names: Sequence[str], size_of: Callable[[str], int], at_least: int, clients: int | None, seed: int, unit: str
) -> list[str]:
    """The clients of at least that size: all of them, or `clients` of them at random, in the order of `names`.

    Sizes are asked for one by one, and no longer than needed. A smaller choice is a part of a larger one.

    >>> choose_clients(["a", "b", "c"], {"a": 9, "b": 2, "c": 7}.get, 5, None, seed=0, unit="samples")
    ['a', 'c']
    """
    order = list(range(len(names)))
    if clients is not None and names:
        order = random_rows(len(names), len(names), seed, "clients").tolist()
    found: list[int] = []
    for at in order:
        if size_of(names[at]) >= at_least:
            found.append(at)
        if len(found) == clients:
            break
    if len(found) < (clients or 1):
        raise DataError(
            f"{len(found)} of {len(names)} clients have at least {at_least} {unit}; expected {clients or 1} or more: "
            f"set a lower minimum, or fewer clients"
        )
    return [names[at] for at in sorted(found)]
