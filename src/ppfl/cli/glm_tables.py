"""The tables that `ppfl glm` prints."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table

from ..glm.table import CLEAR, CoefficientRow, TableFit
from ..report.effects import format_same_decimals
from ..report.metric import NOTHING, show_score
from ..report.sorted_memberships import letter


class PrintedTable(NamedTuple):
    """A table with its title, and a note below it."""

    title: str
    table: Table
    note: str = ""


_METRIC_NAMES = {"rmse": "RMSE", "deviance": "mean deviance", "accuracy": "accuracy"}


def summary_lines(fitted: TableFit, name: str) -> Iterator[str]:
    """The data, the target and the features, followed by all notes."""
    table, settings = fitted.table, fitted.settings
    columns = ", ".join(table.features[:6]) + (
        f" and {len(table.features) - 6} more" if len(table.features) > 6 else ""
    )
    columns = columns or "the client alone"
    yield (
        f"{name}: {len(table.frame)} rows of {len(fitted.ids)} clients ({settings.client}); "
        f"{table.target.name} from {columns}"
    )
    yield from table_notes(fitted)


def table_notes(fitted: TableFit) -> list[str]:
    """What was guessed, left out or encoded, and which fits did not converge."""
    table, target = fitted.table, fitted.table.target
    which = f" ({target.classes[0]} or {target.classes[1]})" if target.family == "bernoulli" else ""
    guessed = f", guessed: {target.reason}; change it with --family" if target.reason else ""
    notes = [f"family {target.family}{which}{guessed}"]
    if table.left_out:
        reasons = (f"{name} ({reason})" for name, reason in table.left_out.items())
        commas = any("decimal comma" in reason for reason in table.left_out.values())
        remedy = "read them with --decimal ," if commas else "name a column in --columns to use it"
        notes.append(f"left out: {', '.join(reasons)}; {remedy}")
    if not fitted.encoding.terms:
        notes.append("there are no other columns, so clients differ in their intercepts only")
    notes += [cells.describe() for cells in table.bad_cells]
    if table.incomplete:
        one = table.incomplete == 1
        rows = "1 row lacks" if one else f"{table.incomplete} rows lack"
        notes.append(f"{rows} a value in one of these columns and {'is' if one else 'are'} left out")
    if table.lost:
        clients = "client" if len(table.lost) == 1 else "clients"
        notes.append(f"left out, because every row lacks a value: {clients} {_shorten(table.lost)}")
    if table.formula:
        notes += [f"formula {table.formula.formula}", *table.formula.notes]
    for column in fitted.encoding.columns:
        if column.levels:
            rare = f"; other: {_shorten(column.rare)}" if column.rare else ""
            notes.append(f"{column.name} is text: {_shorten(column.levels[1:])}, each against {column.levels[0]}{rare}")
    if unfinished := [candidate.name for candidate in fitted.candidates if not candidate.converged]:
        notes.append(
            f"the fit with k = {', '.join(unfinished)} did not converge; a larger --ridge, fewer columns or a smaller "
            f"-k helps"
        )
    largest = max(candidate.k for candidate in fitted.candidates)
    if len(fitted.candidates) > 1 and fitted.best.k == largest < len(fitted.ids):
        more = ",".join(str(k) for k in range(largest, min(largest + 3, len(fitted.ids)) + 1))
        notes.append(f"k = {largest} is the largest that was tried; try more with -k {more}")
    return notes


def candidate_table(fitted: TableFit) -> PrintedTable:
    """One row per number of canonical models."""
    has_scores = all(candidate.held_out is not None for candidate in fitted.candidates)
    heads = ["held-out log-likelihood", "± to the best"] if has_scores else []
    table = _make_table("k", "log-likelihood", "BIC", "AIC", *heads)
    for candidate in fitted.candidates:
        cells = [
            candidate.name,
            *(f"{each:.1f}" for each in (candidate.log_likelihood, candidate.bic, candidate.aic)),
        ]
        if candidate.held_out is not None:
            cells += [f"{candidate.held_out:.4f}", f"{candidate.held_out_error or 0.0:.4f}"]
        table.add_row(*cells, style="bold" if candidate is fitted.best else None)
    return PrintedTable("How many canonical models", table, _explain_choice(fitted, has_scores=has_scores))


def _explain_choice(fitted: TableFit, *, has_scores: bool) -> str:
    k, candidates = fitted.best.name, fitted.candidates
    lowest = min(candidates, key=lambda candidate: candidate.bic).name
    if fitted.settings.choose == "bic" or not has_scores:
        return f"k = {k} has the lowest BIC and is used"
    best = max(candidates, key=lambda candidate: -math.inf if candidate.held_out is None else candidate.held_out).name
    note = f"k = {k} predicts held-out rows best and is used"
    if best != k:
        note = f"k = {k} is used, the smallest that predicts held-out rows about as well as k = {best}"
    return note + ("" if lowest == k else f"; k = {lowest} has the lowest BIC, which --choose bic goes by")


def coefficient_table(fitted: TableFit) -> PrintedTable:
    """One column per canonical model, the largest share first, and one for the pooled model."""
    target, terms = fitted.table.target, fitted.terms
    of_what = f" of {target.name} = {target.classes[1]}" if target.family == "bernoulli" else ""
    average = f"share{of_what}" if of_what else "class shares" if target.classes else "prediction"
    note = f"an average row: {average} where every column has its mean"
    note += "; (s): shared by all" if any(row.is_shared for row in terms.coefficients) else ""
    several = len(target.outcomes) > 1
    heads = [f"{letter(i)} {share:.0%}" for i, share in enumerate(fitted.shares)]
    table = _make_table(*([target.name] if several else []), "column", *heads, "one for all", left=1 + several)
    for outcome in target.outcomes:
        rows = [(row, bool(target.classes)) for row in terms.average if row.outcome == outcome]
        rows += [(row, False) for row in terms.coefficients if row.outcome == outcome]
        for i, (row, is_share) in enumerate(rows):
            first = ["" if i else outcome] if several else []
            name = row.name + (" (s)" if row.is_shared else "")
            is_last = several and i == len(rows) - 1
            table.add_row(*first, name, *_format_row(row, is_share=is_share), end_section=is_last)
    return PrintedTable(f"Coefficients{of_what}", table, note)


def membership_table(fitted: TableFit) -> PrintedTable:
    """The share of each canonical model, and the number of clients that mainly belong to it."""
    table = _make_table("model", "share", f"clients, at least {CLEAR:.0%}", left=1)
    for i, (share, clear) in enumerate(zip(fitted.shares, fitted.clear, strict=True)):
        table.add_row(letter(i), f"{share:.0%}", str(clear))
    note = f"{fitted.mixed} of {len(fitted.ids)} clients are mixed: less than {CLEAR:.0%} of any model"
    return PrintedTable("How the clients divide", table, note)


def score_table(fitted: TableFit) -> PrintedTable:
    """Held-out scores, the population first."""
    metrics = list(fitted.scores[0].figures)
    table = _make_table("method", *(_METRIC_NAMES[metric] for metric in metrics), "s", left=1)
    for score in fitted.scores:
        figures = [_format_score(metric, score.figures[metric]) for metric in metrics]
        table.add_row(score.label, *figures, f"{score.seconds:.2f}")
    return PrintedTable(f"Held out: {int(fitted.table.is_test.sum())} rows, a random part of each client's", table)


def _make_table(*names: str, left: int = 0) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for i, name in enumerate(names):
        table.add_column(name, justify="left" if i < left else "right", no_wrap=True)
    return table


def _format_score(metric: str, value: float) -> str:
    return show_score(metric, value) if metric == "accuracy" else f"{value:#.4g}"


def _format_row(row: CoefficientRow, *, is_share: bool) -> list[str]:
    values = [*row.values, row.pooled]
    return [f"{value:.1%}" for value in values] if is_share else format_same_decimals(values)


def _shorten(names: Sequence[str], most: int = 8) -> str:
    """The first names, and how many there are besides.

    >>> _shorten(("a", "b", "c"), 3), _shorten(("a", "b", "c", "d"), 3)
    ('a, b, c', 'a, b, c and 1 more')
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or NOTHING) + more
