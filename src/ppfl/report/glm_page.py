"""What a terminal and a page show of a fitted table: its canonical models, its clients, and how well it predicts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from ..glm.table import CRITERIA, CoefficientRow, TableFit
from ..io.files import make_folder, write_text
from ..runs import package_version
from . import charts
from .memberships import order_by_largest
from .page import PAGE, Clients, Section, render
from .run_tables import model_table
from .tables import Cell, Column, Shown, Table
from .theme import (
    CLEAR,
    NOTHING,
    join_names,
    metric,
    model_names,
    plural,
    same_decimals,
    show_share,
)

POOLED = "one model for all"
_LOG_MEAN = "the logarithm of the predicted mean"  # of all other families
_PREDICTORS = {
    "gaussian": "the predicted value",
    "heteroscedastic gaussian": "the predicted value",
    "bernoulli": "the log odds",
    "multinomial": "the log odds of the class, against the mean of all classes",
}


# ---------------------------------------------------------------------- tables


def tables(fitted: TableFit) -> list[Table]:
    """All tables, in the order in which they are shown."""
    found = [candidate_table(fitted)] if len(fitted.candidates) > 1 else []
    found.append(coefficient_table(fitted))
    found += [_model_table(fitted, "How the clients divide")] if fitted.best.k > 1 else []
    return found + ([score_table(fitted)] if fitted.scores else [])


def candidate_table(fitted: TableFit) -> Table:
    """One row per number of canonical models."""
    scored = all(candidate.held_out is not None for candidate in fitted.candidates)
    columns = [Column("K", text=True), Column("log-likelihood", show="{:,.1f}".format)]
    columns += [Column(name, show="{:,.1f}".format) for name in ("BIC", "AIC")]
    if scored:
        about = "mean over rows held out within clients"
        columns.append(Column("held-out log-likelihood", about, "{:.4f}".format))
        columns.append(Column("± to the best", "standard error of its difference to the best", "{:.4f}".format))
    columns.append(Column("used", text=True))
    rows = []
    for one in fitted.candidates:
        cells: list[Cell] = [one.name, one.log_likelihood, one.bic, one.aic]
        cells += [one.held_out, one.held_out_error or 0.0] if scored else []
        rows.append((*cells, "used" if one is fitted.best else ""))
    note = _explain_choice(fitted, scored=scored)
    return Table("How many canonical models", tuple(columns), tuple(rows), (note,))


def _explain_choice(fitted: TableFit, *, scored: bool) -> str:
    k, candidates = fitted.best.name, fitted.candidates
    lowest = min(candidates, key=lambda candidate: candidate.bic).name
    if fitted.settings.choose == "bic" or not scored:
        return f"K = {k} has the lowest BIC and is used."
    best = max(candidates, key=lambda candidate: -math.inf if candidate.held_out is None else candidate.held_out).name
    note = f"K = {k} predicts held-out rows best and is used"
    if best != k:
        note = f"K = {k} is used, the smallest that predicts held-out rows about as well as K = {best}"
    return note + ("." if lowest == k else f"; K = {lowest} has the lowest BIC, which choose=bic goes by.")


def coefficient_table(fitted: TableFit) -> Table:
    """One column per canonical model, the largest share first, and one for a single model for all."""
    target, terms, several = fitted.table.target, fitted.terms, len(fitted.table.target.outcomes) > 1
    heads = [f"{name} {show_share(share)}" for name, share in zip(_names(fitted), fitted.shares, strict=True)]
    columns = [*([Column(target.name, text=True)] if several else []), Column("column", text=True)]
    columns += [Column(head) for head in (*heads, POOLED)]
    rows = []
    for outcome in target.outcomes:
        own = [(row, bool(target.classes)) for row in terms.average if row.outcome == outcome]
        own += [(row, False) for row in terms.coefficients if row.outcome == outcome]
        rows += [((*([outcome] if several else []), *_coefficient_cells(row, is_share=share))) for row, share in own]
    of_what = f" of {target.name} = {target.classes[1]}" if target.family == "bernoulli" else ""
    notes = _effect_notes(fitted, of_what)
    return Table(f"Coefficients{of_what}", tuple(columns), tuple(rows), tuple(notes))


def _coefficient_cells(row: CoefficientRow, *, is_share: bool) -> list[Cell]:
    values = [*row.values, row.pooled]
    shown = [f"{value:.1%}" for value in values] if is_share else same_decimals(values)
    name = f"{row.name} (shared by all)" if row.is_shared and len(row.values) > 1 else row.name
    return [name, *(Shown(value, text.replace("-", "−")) for value, text in zip(values, shown, strict=True))]


def _effect_notes(fitted: TableFit, of_what: str) -> list[str]:
    target = fitted.table.target
    average = f"share{of_what}" if of_what else "class shares" if target.classes else "prediction"
    mixed = "a client's own coefficients are theirs, mixed by its membership"
    if fitted.settings.mix == "predictions":
        mixed = "a client's prediction is theirs, mixed by its membership"
    predictor = _PREDICTORS.get(target.family, _LOG_MEAN)
    return [
        f"Coefficients are in the units of the table: what one unit of a column adds to {predictor}{of_what}. "
        f"Canonical models go from the largest share of the population to the smallest; {mixed}.",
        f"An average row has the mean of every column: its numbers are the {average}.",
    ]


def _model_table(fitted: TableFit, title: str = "") -> Table:
    return model_table(fitted.memberships, fitted.ids, _names(fitted), title)


def score_table(fitted: TableFit) -> Table:
    """Scores on held-out rows, the population first."""
    names = list(fitted.scores[0].figures)
    columns = [Column("model", text=True)]
    for name in names:
        measured = metric(name)
        columns.append(Column(name, "", measured.show, higher_is_better=measured.higher_is_better))
    columns.append(Column("seconds", "to fit and to predict", "{:.2f}".format))
    rows: tuple[tuple[Cell, ...], ...] = tuple(
        (score.label, *(score.figures[name] for name in names), score.seconds) for score in fitted.scores
    )
    held_out = plural(int(fitted.table.is_test.sum()), "row")
    notes = ["A model for each client is fitted to the rows of that client only, with a ridge so that it stays finite."]
    return Table(f"Held out: {held_out}, a random part of each client's", tuple(columns), rows, tuple(notes))


def client_table(fitted: TableFit, order: Sequence[int]) -> Table:
    """One row per client, by its largest membership."""
    columns = [Column(fitted.settings.client, text=True), Column("rows", show="{:.0f}".format)]
    columns += [Column(name, show="{:.2f}".format) for name in _names(fitted)] if fitted.best.k > 1 else []
    c = fitted.memberships if fitted.best.k > 1 else [[]] * len(fitted.ids)
    rows: tuple[tuple[Cell, ...], ...] = tuple((fitted.ids[i], fitted.sizes[i], *c[i]) for i in order)
    return Table("Clients", tuple(columns), rows)


def _names(fitted: TableFit) -> list[str]:
    return model_names(fitted.best.k)


# ---------------------------------------------------------------------- text


def headline(fitted: TableFit, name: str) -> str:
    """The data, the target and the features, in one line."""
    features = fitted.table.features
    columns = ", ".join(features[:6]) + (f" and {len(features) - 6} more" if len(features) > 6 else "")
    return (
        f"{name}: {len(fitted.table.frame):,} rows of {plural(len(fitted.ids), 'client')} ({fitted.settings.client}); "
        f"{fitted.table.target.name} from {columns or 'the client alone'}"
    )


def notes(fitted: TableFit) -> list[str]:
    """What was guessed, left out or encoded, and which fits did not converge."""
    table, target = fitted.table, fitted.table.target
    which = f" ({target.classes[0]} or {target.classes[1]})" if target.family == "bernoulli" else ""
    guessed = f", guessed: {target.reason}; change it with --family" if target.reason else ""
    found = [f"family {target.family}{which}{guessed}"]
    if table.left_out:
        reasons = (f"{name} ({reason})" for name, reason in table.left_out.items())
        commas = any("decimal comma" in reason for reason in table.left_out.values())
        remedy = "read them with --decimal ," if commas else "name a column in --columns to use it"
        found.append(f"left out: {', '.join(reasons)}; {remedy}")
    if not fitted.encoding.terms:
        found.append("there are no other columns, so clients differ in their intercepts only")
    found += [cells.describe() for cells in table.bad_cells]
    if table.incomplete:
        one = table.incomplete == 1
        rows = "1 row lacks" if one else f"{table.incomplete:,} rows lack"
        found.append(f"{rows} a value in one of these columns and {'is' if one else 'are'} left out")
    if table.lost:
        clients = "client" if len(table.lost) == 1 else "clients"
        found.append(f"left out, because every row lacks a value: {clients} {_shorten(table.lost)}")
    if table.formula:
        found += [f"formula {table.formula.formula}", *table.formula.notes]
    for column in fitted.encoding.columns:
        if column.levels:
            rare = f"; other: {_shorten(column.rare)}" if column.rare else ""
            found.append(f"{column.name} is text: {_shorten(column.levels[1:])}, each against {column.levels[0]}{rare}")
    return found + _notes_on_k(fitted)


def _notes_on_k(fitted: TableFit) -> list[str]:
    found = []
    if unfinished := [candidate.name for candidate in fitted.candidates if not candidate.converged]:
        found.append(
            f"the fit with K = {', '.join(unfinished)} did not converge; a larger ridge, fewer columns or a smaller "
            f"-k helps"
        )
    largest = max(candidate.k for candidate in fitted.candidates)
    if len(fitted.candidates) > 1 and fitted.best.k == largest < len(fitted.ids):
        more = ",".join(str(k) for k in range(largest, min(largest + 3, len(fitted.ids)) + 1))
        found.append(f"K = {largest} is the largest that was tried; try more with -k {more}")
    return found


def _shorten(names: Sequence[str], most: int = 8) -> str:
    """The first names, and how many there are besides.

    >>> _shorten(("a", "b", "c"), 3), _shorten(("a", "b", "c", "d"), 3)
    ('a, b, c', 'a, b, c and 1 more')
    """
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(names[:most]) or NOTHING) + more


def summary(fitted: TableFit, name: str) -> str:
    """A paragraph that says what was found."""
    sentences = [f"{headline(fitted, name)}, family {fitted.table.target.family}.", _division(fitted)]
    if len(fitted.scores) > 1:
        measured = metric(next(iter(fitted.scores[0].figures)))
        ours, *others = ((score.label, score.figures[measured.name]) for score in fitted.scores)
        against = join_names([f"{measured.show(value)} with {label}" for label, value in others])
        rows = plural(int(fitted.table.is_test.sum()), "row")
        sentences.append(
            f"On {rows} held out of all clients, {measured.name} is {measured.show(ours[1])}, against {against}."
        )
    return " ".join(sentences)


def _division(fitted: TableFit) -> str:
    tried, chosen_by = len(fitted.candidates) > 1, _chosen_by(fitted)
    if fitted.best.k == 1:
        enough = f" by {chosen_by}: clients do not differ enough to tell kinds apart" if tried else ""
        return f"One model for all was {'chosen' if tried else 'fitted'}{enough}."
    shares = join_names([f"{n} {show_share(s)}" for n, s in zip(_names(fitted), fitted.shares, strict=True)])
    chosen = f", chosen by {chosen_by}," if tried else ""
    clear, mixed = sum(fitted.clear), fitted.mixed
    return (
        f"{fitted.best.k} canonical models{chosen} divide the population: {shares}. Of "
        f"{plural(len(fitted.ids), 'client')}, {clear or 'none'} {'is' if clear == 1 else 'are'} at least "
        f"{show_share(CLEAR)} one of them and {mixed or 'none'} {'is' if mixed == 1 else 'are'} mixed."
    )


def _chosen_by(fitted: TableFit) -> str:
    return str(CRITERIA["bic" if fitted.best.held_out is None else fitted.settings.choose])


# ---------------------------------------------------------------------- the page


def write_glm_report(fitted: TableFit, folder: Path, name: str, command: str) -> Path:
    """Writes the page into a folder, and returns its path."""
    k = fitted.best.k
    models = f"{k} canonical models" if k > 1 else POOLED
    title = f"{fitted.table.target.name} in {name}: {models}"
    order = order_by_largest(torch.tensor(fitted.memberships)).tolist()
    clients = Clients(client_table(fitted, order))
    if k > 1:
        clients = clients._replace(names=_names(fitted), c=np.asarray(fitted.memberships)[order])
    make_folder(folder)
    write_text(folder / PAGE, render(title, summary(fitted, name), _sections(fitted, order, command), clients))
    return folder / PAGE


def _sections(fitted: TableFit, order: Sequence[int], command: str) -> list[Section]:
    sections = [_coefficient_section(fitted)]
    if fitted.best.k > 1:
        c, ids = np.asarray(fitted.memberships)[order], [fitted.ids[i] for i in order]
        drawn = {"Between the canonical models": charts.simplex(c, ids), "Memberships": charts.memberships(c, ids)}
        text = (
            "The nearer a client is to a canonical model, the larger is its membership in it. Click one to choose it."
        )
        sections.append(Section("Who the clients are", text, drawn, [_model_table(fitted)]))
    if fitted.scores:
        first = metric(next(iter(fitted.scores[0].figures)))
        better = (
            "" if first.higher_is_better is None else f", {'higher' if first.higher_is_better else 'lower'} is better"
        )
        chart = charts.held_out_scores({score.label: score.figures[first.name] for score in fitted.scores}, first)
        sections.append(Section("How well it predicts", "", {f"{first.name} on held-out rows{better}": chart},
                                [score_table(fitted)]))  # fmt: skip
    if len(fitted.candidates) > 1:
        sections.append(Section("How many canonical models", tables=[candidate_table(fitted)._replace(title="")]))
    sections.append(Section("Client by client", clients=True))
    versions = f"ppfl {package_version('ppfl')}, torch {package_version('torch')}."
    about = Table("", (Column("command", text=True),), ((command,),), (*notes(fitted), versions))
    return [*sections, Section("What was run", tables=[about])]


def _coefficient_section(fitted: TableFit) -> Section:
    """Coefficients as a chart of what one standard deviation of each column adds, and as a table of numbers."""
    several = len(fitted.table.target.outcomes) > 1
    names = _names(fitted)
    rows = []
    for row in fitted.terms.coefficients:
        if row.reach is None:
            continue
        term = f"{row.outcome}: {row.name}" if several else row.name
        values = [("all", row.reach[0])] if row.is_shared else list(zip(names, row.reach, strict=True))
        rows += [{"term": term, "model": name, "value": value} for name, value in values]
        rows.append({"term": term, "model": POOLED, "value": row.pooled_reach})
    drawn = {"What one standard deviation of a column adds": charts.coefficients(rows, names)} if rows else {}
    return Section("What the canonical models say", "", drawn, [coefficient_table(fitted)._replace(title="")])
