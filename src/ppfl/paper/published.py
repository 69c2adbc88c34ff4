"""The accuracies that the paper reports, read from `figures.csv`, each with the table of the paper it comes from."""

from __future__ import annotations

import csv
from functools import cache
from importlib.resources import files
from typing import NamedTuple


class PaperResult(NamedTuple):
    """An accuracy in per cent."""

    accuracy: float
    sd: float | None  # standard deviation over five trials, if the paper reports it
    source: str  # table of the paper


def paper_results(study: str, case: str) -> dict[str, PaperResult]:
    """The results of one case of a study, by method.

    >>> paper_results("table1", "mnist")["PPFL1"]
    PaperResult(accuracy=99.01, sd=0.03, source='Table 1')
    """
    return {method: result for (*where, method), result in _read_all().items() if where == [study, case]}


@cache
def _read_all() -> dict[tuple[str, str, str], PaperResult]:
    text = files(__package__).joinpath("figures.csv").read_text(encoding="utf-8")
    return {
        (row["study"], row["case"], row["method"]): PaperResult(
            float(row["accuracy"]), float(row["sd"]) if row["sd"] else None, row["source"]
        )
        for row in csv.DictReader(text.splitlines())
    }
