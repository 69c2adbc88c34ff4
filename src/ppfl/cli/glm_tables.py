"""A fitted table for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from ..glm.table_fit import CLEAR, TableFit
from ..glm.table_terms import Term
from ..report.effects import format_same_decimals
from ..report.sorted_memberships import letter
from .run_tables import NOTHING, show_score


class Part(NamedTuple):
    """Of what is printed."""

    title: str
    table: Table
    note: str = ""


_WORDS = {"rmse": "RMSE", "deviance": "mean deviance", "accuracy": "accuracy"}


def head_lines(fitted: TableFit, name: str) -> Iterator[str]:
    """What was fitted to what."""
    table, settings = fitted.table, fitted.settings
    columns = ", ".join(table.features[:6]) + (
        f" and {len(table.features) - 6} more" if len(table.features) > 6 else ""
    )
    yield (
        f"{name}: {len(table.frame)} rows of {len(fitted.ids)} clients ({settings.client}); "
        f"{table.target.name} from {columns}"
    )
    yield from table_notes(fitted)


def table_notes(fitted: TableFit) -> list[str]:
    """What was guessed, left out, encoded, or went wrong."""
    table, target = fitted.table, fitted.table.target
    which = f" ({target.classes[0]} or {target.classes[1]})" if target.family == "bernoulli" else ""
    guessed = f", guessed: {target.reason}; change it with --family" if target.reason else ""
    notes = [f"family {target.family}{which}{guessed}"]
    if table.left_out:
        reasons = (f"{name} ({reason})" for name, reason in table.left_out.items())
        notes.append(f"left out: {', '.join(reasons)}; --columns brings back what it names")
    if table.incomplete:
        notes.append(f"{table.incomplete} rows lack a value in one of these columns and are left out")
    for column in fitted.encoding.columns:
        if column.levels:
            rare = f"; other: {_few(column.rare)}" if column.rare else ""
            notes.append(f"{column.name} is text: {_few(column.levels[1:])}, each against {column.levels[0]}{rare}")
    if open_ends := [str(tried.k) for tried in fitted.candidates if not tried.converged]:
        notes.append(f"k = {', '.join(open_ends)} stopped before it converged; a larger --ridge helps")
    return notes


def trial_table(fitted: TableFit) -> Part:
    """Numbers of canonical models that were tried."""
    metric = next(iter(fitted.best.score.figures)) if fitted.best.score else None
    table = _table("k", "BIC", "AIC", *([f"held-out {_WORDS[metric]}"] if metric else []))
    for tried in fitted.candidates:
        cells = [str(tried.k), f"{tried.bic:.1f}", f"{tried.aic:.1f}"]
        cells += [_figure(metric, tried.score.figures[metric])] if metric and tried.score else []
        table.add_row(*cells, style="bold" if tried is fitted.best else None)
    note = f"k = {fitted.best.k} has the lowest BIC and is taken"
    if metric:
        foremost = min(fitted.candidates, key=lambda tried: tried.score.figures[metric] if tried.score else 0.0)
        note += "" if foremost is fitted.best else f"; k = {foremost.k} predicts held-out rows best"
    return Part("How many canonical models", table, note)


def coefficient_table(fitted: TableFit) -> Part:
    """Canonical models by share of the population, one model for all beside them."""
    target, terms = fitted.table.target, fitted.terms
    of_what = f" of {target.name} = {target.classes[1]}" if target.family == "bernoulli" else ""
    average = f"share{of_what}" if of_what else "class shares" if target.classes else "prediction"
    note = f"an average row: {average} where every column has its mean"
    note += "; (s): shared by all" if any(line.is_shared for line in terms.coefficients) else ""
    several = len(target.outcomes) > 1
    heads = [f"{letter(at)} {share:.0%}" for at, share in enumerate(fitted.shares)]
    table = _table(*([target.name] if several else []), "column", *heads, "one for all", left=1 + several)
    for outcome in target.outcomes:
        lines = [(line, bool(target.classes)) for line in terms.average if line.outcome == outcome]
        lines += [(line, False) for line in terms.coefficients if line.outcome == outcome]
        for at, (line, is_share) in enumerate(lines):
            first = [Text("" if at else outcome)] if several else []
            name = Text(line.name + (" (s)" if line.is_shared else ""))
            table.add_row(*first, name, *_shown(line, is_share=is_share), end_section=several and at == len(lines) - 1)
    return Part(f"Coefficients{of_what}", table, note)


def division_table(fitted: TableFit) -> Part:
    """How clients divide."""
    table = _table("model", "share", f"clients, at least {CLEAR:.0%}", left=1)
    for at, (share, clear) in enumerate(zip(fitted.shares, fitted.clear, strict=True)):
        table.add_row(letter(at), f"{share:.0%}", str(clear))
    note = f"{fitted.mixed} of {len(fitted.ids)} clients are mixed: less than {CLEAR:.0%} of any model"
    return Part("How the clients divide", table, note)


def score_table(fitted: TableFit) -> Part:
    """Held-out rows, ours first."""
    metrics = list(fitted.scores[0].figures)
    table = _table("predicted by", *(_WORDS[metric] for metric in metrics), "s", left=1)
    for score in fitted.scores:
        figures = [_figure(metric, score.figures[metric]) for metric in metrics]
        table.add_row(score.label, *figures, f"{score.seconds:.2f}")
    return Part(f"Held out: {int(fitted.table.is_test.sum())} rows, a part of each client's", table)


def _table(*names: str, left: int = 0) -> Table:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), show_edge=False)
    for at, name in enumerate(names):
        table.add_column(Text(name), justify="left" if at < left else "right", no_wrap=True)
    return table


def _figure(metric: str, value: float) -> str:
    return show_score(metric, value) if metric == "accuracy" else f"{value:#.4g}"


def _shown(line: Term, *, is_share: bool) -> list[str]:
    values = [*line.values, line.pooled]
    return [f"{value:.1%}" for value in values] if is_share else format_same_decimals(values)


def _few(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or NOTHING) + more
