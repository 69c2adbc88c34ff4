"""`Table`: named values that a terminal, a page, a notebook, Markdown, LaTeX, a csv file and a DataFrame show alike."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from ..io.text import visible
from .theme import NOTHING, show_number

if TYPE_CHECKING:
    import pandas as pd
    from rich.table import Table as RichTable


class Spread(NamedTuple):
    """A mean over seeds with its standard deviation; None where there is one seed."""

    mean: float
    sd: float | None = None


class Shown(NamedTuple):
    """A number that its row shows in a way of its own."""

    value: float
    text: str


Cell = str | int | float | Spread | Shown | None


class Column(NamedTuple):
    """A column: its name is the same word in every view."""

    name: str
    about: str = ""  # a sentence below the table
    show: Callable[[float], str] = show_number
    show_spread: Callable[[float], str] | None = None  # by default as `show`
    higher_is_better: bool | None = None  # None: no value is the best
    text: bool = False  # words, on the left


class Table(NamedTuple):
    """Values with their names.

    >>> columns = (Column("method", text=True), Column("rmse", "lower is better", higher_is_better=False))
    >>> table = Table("Results", columns, (("PPFL", Spread(0.5, 0.01)), ("Local", 0.75)))
    >>> print(table.to_markdown())
    **Results**
    <BLANKLINE>
    | method | rmse |
    | --- | ---: |
    | PPFL | **0.5** ± 0.01 |
    | Local | 0.75 |
    <BLANKLINE>
    rmse: lower is better.
    ±: standard deviation over seeds.
    >>> table.to_frame()["rmse sd"].tolist()
    [0.01, nan]
    """

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()

    def without_empty_columns(self) -> Table:
        """Only columns that have a value in some row."""
        kept = [at for at in range(len(self.columns)) if any(row[at] not in (None, "") for row in self.rows)]
        rows = tuple(tuple(row[at] for at in kept) for row in self.rows)
        return self._replace(columns=tuple(self.columns[at] for at in kept), rows=rows)

    def text(self, row: int, column: int) -> str:
        """What a cell says."""
        return cell_text(self.rows[row][column], self.columns[column])

    @property
    def texts(self) -> list[list[str]]:
        return [[cell_text(cell, column) for cell, column in zip(row, self.columns, strict=True)] for row in self.rows]

    @property
    def best(self) -> set[tuple[int, int]]:
        """Rows and columns of the best values: all that look as good, and none where all look alike."""
        found = set()
        for at, column in enumerate(self.columns):
            if column.higher_is_better is None:
                continue
            values = {i: value for i, row in enumerate(self.rows) if (value := number(row[at])) is not None}
            if len({column.show(value) for value in values.values()}) < 2:
                continue
            best = (max if column.higher_is_better else min)(values.values())
            found |= {(i, at) for i, value in values.items() if column.show(value) == column.show(best)}
        return found

    @property
    def about(self) -> list[str]:
        """The sentences below the table: what its columns are, and its notes."""
        about = [f"{column.name}: {column.about}." for column in self.columns if column.about]
        spread = any(isinstance(cell, Spread) and cell.sd is not None for row in self.rows for cell in row)
        return [*about, *(["±: standard deviation over seeds."] if spread else []), *self.notes]

    # ------------------------------------------------------------------ views

    def to_rich(self) -> RichTable:
        """For a terminal, where title and notes are lines of their own."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table as RichTable
        from rich.text import Text

        shown = RichTable(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for column in self.columns:
            shown.add_column(column.name, justify="left" if column.text else "right", no_wrap=not column.text)
        best = self.best
        for i, row in enumerate(self.texts):
            shown.add_row(*(Text(visible(text), "bold" if (i, at) in best else "") for at, text in enumerate(row)))
        return shown

    def _repr_html_(self) -> str:
        """For a notebook."""
        from .page import environment

        macro: Any = environment().get_template("parts.html.j2").module
        return str(macro.table(self))

    def to_markdown(self) -> str:
        def cells(row: list[str]) -> str:
            return "| " + " | ".join(visible(cell).replace("|", "\\|").replace("<", "&lt;") for cell in row) + " |"

        rule = "| " + " | ".join("---" if column.text else "---:" for column in self.columns) + " |"
        best = self.best
        body = [
            cells([_marked(text, "**", "**") if (i, at) in best else text for at, text in enumerate(row)])
            for i, row in enumerate(self.texts)
        ]
        head = [f"**{visible(self.title)}**", ""] if self.title else []
        notes = "\n".join(visible(note) for note in self.about)
        return "\n".join([*head, cells([c.name for c in self.columns]), rule, *body, *(["", notes] if notes else [])])

    def to_latex(self) -> str:
        r"""A `tabular` with the rules of booktabs.

        >>> print(Table("", (Column("a_b", text=True),), (("50%",),)).to_latex())
        \begin{tabular}{l}
        \toprule
        a\_b \\
        \midrule
        50\% \\
        \bottomrule
        \end{tabular}
        """
        best = self.best

        def line(row: list[str], i: int = -1) -> str:
            bold = [_marked(_latex(text), r"\textbf{", "}") if (i, at) in best else _latex(text)
                    for at, text in enumerate(row)]  # fmt: skip
            return " & ".join(bold) + r" \\"

        spec = "".join("l" if column.text else "r" for column in self.columns)
        head = line([column.name for column in self.columns])
        body = [line(row, i) for i, row in enumerate(self.texts)]
        return "\n".join([rf"\begin{{tabular}}{{{spec}}}", r"\toprule", head, r"\midrule", *body, r"\bottomrule",
                          r"\end{tabular}"])  # fmt: skip

    def to_csv(self) -> str:
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.to_frame().columns)
        writer.writerows([["" if value is None or value != value else value for value in row]
                          for row in self.to_frame().astype(object).to_numpy().tolist()])  # fmt: skip
        return text.getvalue()

    def to_frame(self) -> pd.DataFrame:
        """A DataFrame of numbers as they were measured; standard deviations have columns of their own."""
        import pandas as pd

        found: dict[str, list[Any]] = {}
        for at, column in enumerate(self.columns):
            cells = [row[at] for row in self.rows]
            found[column.name] = [cell if isinstance(cell, str) else number(cell) for cell in cells]
            if any(isinstance(cell, Spread) and cell.sd is not None for cell in cells):
                found[f"{column.name} sd"] = [cell.sd if isinstance(cell, Spread) else None for cell in cells]
        return pd.DataFrame(found)


def number(cell: Cell) -> float | None:
    """The number of a cell; None where it has none."""
    if isinstance(cell, Spread | Shown):
        cell = cell[0]
    return cell if isinstance(cell, int | float) and math.isfinite(cell) else None


def cell_text(cell: Cell, column: Column) -> str:
    if isinstance(cell, Shown):
        return cell.text
    if isinstance(cell, str):
        return cell
    value = number(cell)
    if value is None:
        return NOTHING
    sd = cell.sd if isinstance(cell, Spread) else None
    return column.show(value) + (f" ± {(column.show_spread or column.show)(sd)}" if sd is not None else "")


def _marked(text: str, before: str, after: str) -> str:
    """The mean in bold, and not what follows it."""
    end = min((at for sign in (" ± ", r" $\pm$ ") if (at := text.find(sign)) >= 0), default=len(text))
    return f"{before}{text[:end]}{after}{text[end:]}"


def _latex(text: str) -> str:
    signs = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "–": "--"}
    return "".join(signs.get(c, f"\\{c}" if c in "&%$#_{}" else c) for c in visible(text))
