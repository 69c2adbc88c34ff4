"""Numbers that were measured, as files: what a page shows, the values of single seeds behind it, and how they were
made. Also the numbers of the paper, and what a run costs until it reaches an accuracy."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from ..errors import DataError
from ..io.files import write_text
from ..report import Column, Table
from ..runs.record import RunRecord


class StoredTable(NamedTuple):
    """A table as a page shows it: the texts of its cells, under a key for the numbers in sentences."""

    key: str
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int = 1  # columns of words
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, key: str, table: Table) -> StoredTable:
        names, rows = (column.name for column in table.columns), (tuple(row) for row in table.texts)
        left = next((at for at, column in enumerate(table.columns) if not column.text), len(table.columns))
        return cls(key, table.title, tuple(names), tuple(rows), left, tuple(table.about))

    def markdown(self) -> str:
        columns = tuple(Column(name, text=at < self.left) for at, name in enumerate(self.columns))
        return Table(self.title, columns, self.rows, self.notes).to_markdown()

    def cell(self, row: str, column: str) -> str:
        """The text of a cell; a row is named by its first cells, joined by commas where one is not enough."""
        where = [own for own in self.rows if row in (own[0], ", ".join(own[: max(1, self.left)]))]
        if len(where) != 1 or column not in self.columns:
            raise DataError(f"table {self.key!r} has no single cell in row {row!r} and column {column!r}")
        return where[0][self.columns.index(column)]


class Figures(NamedTuple):
    """What was measured at once.

    >>> table = StoredTable("mnist", "On MNIST", ("method", "accuracy"), (("PPFL", "99.20"), ("FedAvg", "96.16")))
    >>> figures = Figures("table1", "Table 1", "ppfl reproduce table1", "commit 0123abc", (table,))
    >>> figures.cell("mnist/PPFL/accuracy")
    '99.20'
    """

    name: str
    title: str
    command: str
    made_with: str  # when, by which version, on what
    tables: tuple[StoredTable, ...]
    values: tuple[tuple[Any, ...], ...] = ()  # (case, method, seed, metric, value)
    settings: Mapping[str, Any] = {}  # of every case and method

    def cell(self, key: str) -> str:
        """The text of the cell "table/row/column"; the first and the last are without strokes."""
        table, _, rest = key.partition("/")
        row, _, column = rest.rpartition("/")
        found = [each for each in self.tables if each.key == table]
        if not found:
            known = ", ".join(each.key for each in self.tables)
            raise DataError(f"{self.name} has no table {table!r}; it has {known}")
        return found[0].cell(row, column)

    def write(self, folder: Path) -> Path:
        content = self._asdict() | {"tables": [table._asdict() for table in self.tables]}
        path = folder / f"{self.name}.json"
        write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        return path

    @classmethod
    def read(cls, path: Path) -> Figures:
        content = json.loads(path.read_text(encoding="utf-8"))
        tables = tuple(
            StoredTable(**table | {"columns": tuple(table["columns"]), "rows": tuple(map(tuple, table["rows"])),
                                   "notes": tuple(table["notes"])})
            for table in content["tables"]
        )  # fmt: skip
        return cls(**content | {"tables": tables, "values": tuple(map(tuple, content["values"]))})


# ---------------------------------------------------------------------- the paper


class PaperResult(NamedTuple):
    """An accuracy in per cent."""

    accuracy: float
    sd: float | None  # standard deviation over five trials, if the paper reports it
    source: str  # table of the paper


def paper_results(study: str, case: str) -> dict[str, PaperResult]:
    """The paper's results for one case of a study, by method.

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


# ---------------------------------------------------------------------- costs


class Cost(NamedTuple):
    """The cost of all rounds up to a certain round; bytes are per client of the federation."""

    rounds: float
    seconds: float
    bytes_up: float
    bytes_down: float


def cost_to_reach(run: RunRecord, accuracy: float) -> Cost | None:
    """The cost up to the first evaluated round with at least this accuracy; None if no round has it."""
    reached = next((row["round"] for row in run.metrics if (row.get("accuracy") or 0.0) >= accuracy), None)
    if reached is None:
        return None
    seconds, up, down = (
        sum(row.get(key) or 0 for row in run.metrics if row["round"] <= reached)
        for key in ("seconds", "bytes_up", "bytes_down")
    )
    return Cost(reached, seconds, up / len(run.ids), down / len(run.ids))


def mean_cost(runs: Sequence[RunRecord], accuracy: float) -> Cost | None:
    """The mean cost over seeds; None if a seed does not reach the accuracy."""
    costs = [cost_to_reach(run, accuracy) for run in runs]
    known = [cost for cost in costs if cost is not None]
    return Cost(*map(fmean, zip(*known, strict=True))) if len(known) == len(costs) else None
