"""The page: one self-contained file that asks no network for anything. It has sections with charts and tables, and a
table of all clients to search and sort, in which a client is chosen to see it in every chart."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..errors import SettingError
from ..io.files import make_folder, write_text
from ..io.text import visible
from . import charts
from .memberships import SortedMemberships
from .results import Comparison
from .run_tables import client_table, gain_table, model_table, preparation_table, round_table, settings_tables
from .tables import Column, Table, number
from .text import summary
from .theme import chart_config, evenly, metric, model_colour, plural

if TYPE_CHECKING:
    from jinja2 import Environment

PAGE, CLIENTS = "report.html", "clients.csv"
MAX_CLIENTS = 100_000  # listed on the page; of more, an even sample and the worst tenth
_MAX_HISTORY = 300  # clients whose memberships by round are on the page
_AT_FIRST = 50  # rows of clients that are there without a script
_OTHER_CURVES = {
    "loss": "Training loss",
    "objective": "Objective on all training data",
    "stationarity": "Stationarity: 0 where no step improves the objective",
}
Charts = Mapping[str, charts.Chart]


class Section(NamedTuple):
    """A part of the page: a title, sentences, charts by their captions, and tables."""

    title: str
    text: str = ""
    charts: Charts = {}
    tables: Sequence[Table] = ()
    collapsed: bool = False
    clients: bool = False  # whether the table of all clients stands here


class Clients(NamedTuple):
    """What the page knows of every client."""

    table: Table  # the first column has the ids; in the order of the charts
    names: Sequence[str] = ()  # of canonical models, which are columns of the table
    c: Any = None  # (M, K), rows in the order of the charts
    rounds: Sequence[int] = ()
    history: Any = None  # (T, M, K)
    labels: Sequence[str] = ()  # of methods, by column of scores
    pair: tuple[str, str] | None = None  # the methods of the chart of gains


# ---------------------------------------------------------------------- writing


@cache
def environment() -> Environment:
    """Templates that escape everything, and show what cannot be seen."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    made = Environment(
        loader=PackageLoader("ppfl.report"), autoescape=True, undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, finalize=lambda value: visible(value) if type(value) is str else value,
    )  # fmt: skip
    made.globals["model_colour"] = model_colour
    return made


@cache
def _vega() -> str:
    """The library that draws the charts, as a script."""
    import vl_convert

    return str(vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")).replace("</script", "<\\/script")


def render(title: str, text: str, sections: Sequence[Section], clients: Clients | None = None) -> str:
    """The page as HTML."""
    drawn = {f"{i}-{j}": _spec(chart) for i, section in enumerate(sections)
             for j, chart in enumerate(section.charts.values())}  # fmt: skip
    folder = Path(__file__).parent / "templates"
    return environment().get_template("page.html.j2").render(
        title=title, summary=text, sections=sections, clients=clients, first_rows=_AT_FIRST,
        data=_json({"charts": drawn, "clients": None if clients is None else _columns(clients)}),
        style=(folder / "style.css").read_text("utf-8"), script=(folder / "page.js").read_text("utf-8"), vega=_vega(),
    )  # fmt: skip


def _spec(chart: charts.Chart) -> dict[str, Any]:
    """The chart for the page: as wide as it can be, in the colours of the page."""
    spec: dict[str, Any] = chart.properties(width="container").to_dict()
    spec["config"] = chart_config("currentColor")
    spec["autosize"] = {"type": "fit-x", "contains": "padding"}
    shown: dict[str, Any] = _shown(spec)
    return shown


def _shown(value: Any) -> Any:
    """All text in nested values made visible."""
    if isinstance(value, str):
        return visible(value)
    if isinstance(value, dict):
        return {key: _shown(one) for key, one in value.items()}
    return [_shown(one) for one in value] if isinstance(value, list | tuple) else value


def _json(value: Any) -> str:
    """JSON that can stand in a script: no text in it can end the script."""
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _columns(clients: Clients) -> dict[str, Any]:
    """The table of clients by column, with numbers of three digits, and what marks a client in the charts."""
    table = clients.table
    columns = [
        {"name": visible(column.name), "kind": _kind(column),
         "values": [_value(row[at], _kind(column)) for row in table.rows]}
        for at, column in enumerate(table.columns)
    ]  # fmt: skip
    found: dict[str, Any] = {"columns": columns, "models": list(clients.names), "labels": _shown(list(clients.labels)),
                             "colours": [model_colour(k) for k in range(len(clients.names))]}  # fmt: skip
    found["pair"] = None if clients.pair is None else [visible(label) for label in clients.pair]
    if clients.c is not None and len(clients.names) > 1:
        found["corners"] = np.round(charts.corners(len(clients.names)), 4).tolist()
    if clients.history is not None and 0 < len(table.rows) <= _MAX_HISTORY and len(clients.rounds) > 1:
        steps = evenly(len(clients.rounds), charts.MAX_STEPS)
        found["rounds"] = [clients.rounds[at] for at in steps]
        found["history"] = np.round(np.asarray(clients.history)[steps], 2).tolist()
    return found


def _kind(column: Column) -> str:
    if column.text:
        return "text"
    sample = column.show(0.123456789)
    return "percent" if sample.endswith("%") else "share" if sample == "0.12" else "number"


def _value(cell: Any, kind: str) -> str | float | None:
    if kind == "text":
        return visible(cell)
    value = number(cell)
    return None if value is None else float(f"{value:.4g}") if kind != "share" else round(value, 3)


# ---------------------------------------------------------------------- the page of runs


def write_report(found: Comparison, folder: Path, title: str) -> Path:
    """Writes the page, and of very many clients a csv file of all, into a folder; the path of the page."""
    clients = clients_of(found)
    make_folder(folder)
    if len(clients.table.rows) > MAX_CLIENTS:
        write_text(folder / CLIENTS, clients.table.to_csv())
        clients = sampled(clients, found)
    write_text(folder / PAGE, render(title, summary(found), sections_of(found, clients), clients))
    return folder / PAGE


def sections_of(found: Comparison, clients: Clients) -> list[Section]:
    """What the page of runs has, in order; a section without content is left out."""
    shown = found.memberships
    found_by_first = _memberships(shown[0]) if shown else []
    sections = [
        Section("Results", tables=[found.table._replace(title="")]),
        *found_by_first,
        *_client_sections(found, clients),
    ]
    sections += _rounds(found)
    if len(shown) > 1:
        others = {one.label: charts.of_sorted(one) for one in shown[1:4]}
        sections.append(Section("Memberships found by other methods", charts=others, collapsed=True))
    prepared = next((run.preparation for run in found.records if run.preparation is not None), None)
    if prepared is not None:
        sections.append(Section("How the columns were prepared", tables=[preparation_table(prepared)], collapsed=True))
    sections.append(Section("What was run", tables=settings_tables(found), collapsed=True))
    return sections


def _memberships(shown: SortedMemberships) -> list[Section]:
    c = shown.memberships.numpy()
    which = f"{shown.label}, the first of {shown.seeds} seeds" if shown.seeds > 1 else shown.label
    text = (
        f"Found by {which}. Each bar is a client, each colour is a canonical model that clients share, and its height "
        f"is the membership of the client in it. Click a bar to choose the client everywhere on this page."
    )
    if len(shown.ids) > charts.MAX_BARS:
        text += " There are many clients, so each bar is the mean of several neighbours."
    drawn: dict[str, charts.Chart] = {"Memberships": charts.of_sorted(shown)}
    drawn["Between the canonical models"] = charts.simplex(c, shown.ids, names=shown.names)
    if len(shown.rounds) > 1:
        by_round = dict(zip(shown.rounds, shown.history.numpy(), strict=True))
        drawn["How the memberships moved"] = charts.membership_history(by_round, shown.ids, names=shown.names)
        drawn["Share of each canonical model over the rounds"] = charts.shares(by_round, names=shown.names)
    return [
        Section("Who the clients are", text, drawn),
        Section("The canonical models", tables=[model_table(c, shown.ids, shown.names)]),
    ]


def _client_sections(found: Comparison, clients: Clients) -> list[Section]:
    drawn: dict[str, charts.Chart] = {}
    tables = []
    scores = found.scores
    measured = found.metric or metric("score")
    text = "Every client has a model of its own, so a mean can hide who gains and who loses."
    if scores:
        drawn["One dot for each client; the line is the median client"] = charts.client_scores(scores, measured)
    if clients.pair is not None:
        ours, theirs = clients.pair
        caption = f"Who gains and who loses: {ours} compared with {theirs}"
        drawn[caption] = charts.gains(scores[ours], scores[theirs], measured, clients.pair)
        tables.append(gain_table(found, ours)._replace(title=f"{ours} compared with the others"))
    return [Section("Client by client", text if scores else "", drawn, tables, clients=True)]


def _rounds(found: Comparison) -> list[Section]:
    drawn: dict[str, charts.Chart] = {}
    if found.metric is not None:
        name = found.metric.name
        if curves := found.curves(name):
            drawn[f"{name.capitalize()} on test data"] = charts.history(curves, found.metric, ours=found.ours)
        if curves := found.curves(name, over_traffic=True):
            x = "MB sent and received by a client"
            caption = f"{name.capitalize()} by what a client has sent and received"
            drawn[caption] = charts.history(curves, found.metric, x=x, ours=found.ours)
    for key, caption in _OTHER_CURVES.items():
        if curves := found.curves(key):
            drawn[caption] = charts.history(curves, metric(key), ours=found.ours)
    tables = [round_table(found.methods[0].first)] if len(found.methods) == 1 and found.methods[0].rounds else []
    return [Section("Round by round", charts=drawn, tables=tables)] if drawn or tables else []


def clients_of(found: Comparison) -> Clients:
    """What the page knows of every client of these runs."""
    shown = next(iter(found.memberships), None)
    table, labels = client_table(found), [*found.scores]
    pair = _pair(found, shown)
    if shown is None:
        return Clients(table, labels=labels, pair=pair)
    return Clients(table, shown.names, shown.memberships.numpy(), shown.rounds, shown.history.numpy(), labels, pair)


def _pair(found: Comparison, shown: SortedMemberships | None) -> tuple[str, str] | None:
    """The method whose memberships are shown and the best of the others, where both have scores of clients."""
    labels = [*found.scores]
    if len(labels) < 2 or found.metric is None or found.metric.higher_is_better is None:
        return None
    ours = next((label for label in labels if shown is not None and label == shown.label), labels[0])
    theirs = next(label for label in labels if label != ours)
    return (ours, theirs) if found.scores[ours].keys() & found.scores[theirs].keys() else None


def sampled(clients: Clients, found: Comparison) -> Clients:
    """Of very many clients, an even sample and the worst tenth of it with the first method."""
    rows = clients.table.rows
    tenth = MAX_CLIENTS // 10
    kept = {*evenly(len(rows), MAX_CLIENTS - tenth)}
    if found.scores:
        at, sign = len(rows[0]) - len(clients.labels), 1 if found.metric and found.metric.higher_is_better else -1
        values = {i: value for i, row in enumerate(rows) if (value := number(row[at])) is not None}
        kept |= {*sorted(values, key=lambda i: sign * values[i])[:tenth]}
    order = sorted(kept)
    note = f"{plural(len(order), 'client')} of {len(rows):,}: an even sample and the worst; all are in {CLIENTS}."
    table = clients.table._replace(rows=tuple(rows[at] for at in order), notes=(note,))
    return clients._replace(table=table, c=None if clients.c is None else clients.c[order], history=None)


def export(found: Comparison, folder: Path, figures: Sequence[str], tables: Sequence[str]) -> list[Path]:
    """Writes every chart and table of the page as a file of its own, in each of these formats."""
    from ..io.files import folder_name, writing

    clients = clients_of(found)
    views = {"csv": Table.to_csv, "md": Table.to_markdown, "tex": Table.to_latex}
    kinds = {"figures": ("svg", "png", "pdf"), "tables": tuple(views)}
    for option, wanted in (("figures", figures), ("tables", tables)):
        if odd := [each for each in wanted if each not in kinds[option]]:
            raise SettingError(f"--{option} is {odd[0]!r}; choose from {', '.join(kinds[option])}")
    written = []
    make_folder(folder)
    for section in sections_of(found, clients):
        for caption, chart in section.charts.items():
            for ending in figures:
                place = folder / f"{folder_name(caption[:60], 'chart')}.{ending}"
                with writing(place):
                    chart.save(str(place))
                written.append(place)
        own = [*section.tables, *([clients.table] if section.clients else [])]
        for table in own:
            for ending in tables:
                place = folder / f"{folder_name(table.title or section.title, 'table')}.{ending}"
                write_text(place, views[ending](table) + "\n")
                written.append(place)
    return written
