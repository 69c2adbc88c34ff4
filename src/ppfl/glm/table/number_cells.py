"""Columns of numbers in which a few cells are no numbers, such as `n/a?`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from ...data.encoded_column import is_text
from .encoding import is_plain

NEARLY_ALL = 0.9  # a text column with at least this share of numbers is one of numbers


class BadCells(NamedTuple):
    """The cells of a column of numbers that are no numbers."""

    column: str
    cells: int
    example: str
    row: int  # of the example, from 1

    def describe(self) -> str:
        what = "1 cell" if self.cells == 1 else f"{self.cells} cells"
        such_as = "" if self.cells == 1 else "such as "
        return (
            f"{self.column} has {what} without a number, {such_as}{self.example!r} in row {self.row}: taken as missing"
        )


def read_numbers(frame: Any, names: Iterable[str]) -> tuple[Any, list[BadCells]]:
    """The table with numbers in all columns that hold nearly only numbers, and the cells that hold none."""
    import pandas as pd

    changed, found = {}, []
    for name in names:
        values = frame[name]
        known = values.dropna()
        if known.empty or not is_text(values) or isinstance(values.dtype, pd.CategoricalDtype) or not is_plain(known):
            continue
        numbers = pd.to_numeric(values.astype(str).where(values.notna()), errors="coerce")
        bad = (numbers.isna() & values.notna()).to_numpy()
        if not bad.any() or bad.sum() > (1 - NEARLY_ALL) * len(known):
            continue
        changed[name] = numbers.astype(float)
        first = int(bad.argmax())
        found.append(BadCells(name, int(bad.sum()), str(values.iloc[first]), first + 1))
    return (frame.assign(**changed) if changed else frame), found
