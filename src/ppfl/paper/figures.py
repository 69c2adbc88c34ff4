"""What the paper reports, from the tables of `figures.csv`: each with the table it stands in."""

from __future__ import annotations

import csv
from functools import cache
from importlib.resources import files
from typing import NamedTuple


class Figure(NamedTuple):
    """An accuracy in per cent."""

    accuracy: float
    sd: float | None  # over five trials, where the paper gives it
    source: str


def paper_figures(study: str, case: str) -> dict[str, Figure]:
    """By method.

    >>> paper_figures("table1", "mnist")["PPFL1"]
    Figure(accuracy=99.01, sd=0.03, source='Table 1')
    """
    return {method: figure for (where, what, method), figure in _all().items() if (where, what) == (study, case)}


@cache
def _all() -> dict[tuple[str, str, str], Figure]:
    text = files(__package__).joinpath("figures.csv").read_text(encoding="utf-8")
    return {
        (row["study"], row["case"], row["method"]): Figure(
            float(row["accuracy"]), float(row["sd"]) if row["sd"] else None, row["source"]
        )
        for row in csv.DictReader(text.splitlines())
    }
