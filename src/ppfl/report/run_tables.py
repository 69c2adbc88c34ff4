"""The tables of runs that every view shows: results, clients, canonical models, gains, rounds, settings."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..runs.record import RunRecord
from .memberships import agreement
from .method_runs import MethodRuns
from .tables import Cell, Column, Spread, Table
from .theme import CLEAR, MB, NOTHING, Metric, evenly, metric, plural, shorten, show_score, show_seconds, show_share

if TYPE_CHECKING:
    from .results import Comparison

_CLIENT_MEAN, _WORST = "_mean", "_worst_tenth"

_MAIN, _MEAN, _TENTH = "", "client mean", "worst tenth"
ABOUT = {
    _MEAN: "every client counts the same",
    _TENTH: "mean over the tenth of the clients with the worst scores",
    "in true group": "share of clients whose largest membership is that of their true group, after matching",
    "membership error": "mean distance of memberships from the true ones, after matching (total variation)",
    "refused": "updates that were left out",
    "seconds": "time to train, all rounds together",
    "MB up": "sent by a client, all rounds together",
    "MB down": "received by a client, all rounds together",
}


def result_table(found: Comparison, title: str = "Results") -> Table:
    """One row per method: scores of the state it returned, agreement with the truth, and cost."""
    labels = [m.label if m.finished else f"{m.label} (unfinished, round {m.rounds})" for m in found.methods]
    return _result_rows(title, "method", labels, found.methods, found.metric)


def seed_table(found: Comparison) -> Table:
    """One row per seed of the only method."""
    (method,) = found.methods
    each = [MethodRuns(str(run.seed), (run,)) for run in method.runs]
    if len(each) > 1:
        each.append(MethodRuns("mean ± sd", method.runs))
    return _result_rows("", "seed", [one.label for one in each], each, found.metric, best=False)


def _result_rows(
    title: str,
    heading: str,
    labels: Sequence[str],
    methods: Sequence[MethodRuns],
    metric: Metric | None,
    *,
    best: bool = True,
) -> Table:
    measures: list[tuple[Column, Callable[[RunRecord], float | None]]] = []

    def add(column: Column, measure: Callable[[RunRecord], float | None]) -> None:
        measures.append((column if best else column._replace(higher_is_better=None), measure))

    if metric is not None:
        add(_score_column(metric, metric.name, _direction(metric)), lambda run: run.final(metric.name))
        add(_score_column(metric, _MEAN, ABOUT[_MEAN]), lambda run: run.final(metric.name + _CLIENT_MEAN))
        add(_score_column(metric, _TENTH, ABOUT[_TENTH]), lambda run: run.final(metric.name + _WORST))
    for other in _other_metrics(methods, metric):
        add(_score_column(other, other.name, _direction(other)), lambda run, name=other.name: run.final(name))  # type: ignore[misc]
    add(_cost_column("in true group", "{:.1%}".format, True), lambda run: (a := agreement(run)) and a.share)
    add(_cost_column("membership error", "{:.3f}".format, False), lambda run: (a := agreement(run)) and a.distance)
    if any(run.total("refused") for method in methods for run in method.runs):
        add(_cost_column("refused"), lambda run: run.total("refused"))
    add(_cost_column("seconds", show_seconds), lambda run: run.total("seconds"))
    for name, key in (("MB up", "bytes_up"), ("MB down", "bytes_down")):
        add(_cost_column(name), lambda run, key=key: run.total(key) / max(1, len(run.ids)) / MB)  # type: ignore[misc]
    rows = [(label, *(m.spread(measure) for _, measure in measures)) for label, m in zip(labels, methods, strict=True)]
    columns = (Column(heading, text=True), *(column for column, _ in measures))
    runs = {id(run): run for method in methods for run in method.runs}  # each once, whatever rows it is in
    refused = refused_updates(list(runs.values()))
    shown = tuple(_without_sd_of_costs(columns, row) for row in rows)
    return Table(title, columns, shown, (refused,) if refused else ()).without_empty_columns()


def _without_sd_of_costs(columns: Sequence[Column], row: Sequence[Cell]) -> tuple[Cell, ...]:
    costs = {"seconds", "MB up", "MB down", "refused"}
    return tuple(cell.mean if isinstance(cell, Spread) and column.name in costs else cell
                 for column, cell in zip(columns, row, strict=True))  # fmt: skip


def _direction(metric: Metric) -> str:
    ends = "" if metric.higher_is_better is None else f"; {'higher' if metric.higher_is_better else 'lower'} is better"
    return f"over all test samples, each client with its own model{ends}"


def _score_column(metric: Metric, name: str, about: str) -> Column:
    return Column(name, about, metric.show, metric.show_spread, metric.higher_is_better)


def _cost_column(name: str, show: Callable[[float], str] = "{:.3g}".format, better: bool | None = None) -> Column:
    return Column(name, ABOUT[name], show, higher_is_better=better)


def _other_metrics(methods: Sequence[MethodRuns], main: Metric | None) -> list[Metric]:
    """Further metrics of test data that were asked for with `[watch] metrics`."""
    keys = dict.fromkeys(key for method in methods for run in method.runs for row in (run.scores, *run.metrics[-1:])
                         for key in row if key.endswith(_WORST))  # fmt: skip
    names = [key.removesuffix(_WORST) for key in keys]
    return [metric(name) for name in names if not name.startswith("validation_") and main and name != main.name]


def client_table(found: Comparison) -> Table:
    """One row per client, in the order of the chart: its memberships, the truth, and its score with each method."""
    shown = next(iter(found.memberships), None)
    scores = found.scores
    every = dict.fromkeys(id_ for method in found.methods for id_ in method.first.ids)
    ids = list(dict.fromkeys([*(shown.ids if shown else ()), *every]))
    columns, cells = [Column("client", text=True)], [ids]
    if shown is not None:
        place = {id_: at for at, id_ in enumerate(shown.ids)}
        rows = shown.memberships.tolist()
        for k, name in enumerate(shown.names):
            columns.append(Column(name, show="{:.2f}".format))
            cells.append([rows[place[id_]][k] if id_ in place else None for id_ in ids])  # type: ignore[misc]
        if shown.truth is not None:
            columns.append(Column("truth", text=True))
            cells.append([shown.true_name(place[id_]) if id_ in place else NOTHING for id_ in ids])
    measured = found.metric or metric("score")
    for label, score in scores.items():
        columns.append(_score_column(measured, f"{measured.name}, {label}" if len(scores) > 1 else measured.name, ""))
        cells.append([score.get(id_) for id_ in ids])  # type: ignore[misc]
    plain = tuple(column._replace(higher_is_better=None) for column in columns)
    return Table("Clients", plain, tuple(zip(*cells, strict=True)))


def model_table(c: Any, ids: Sequence[str], names: Sequence[str], title: str = "") -> Table:
    """One row per canonical model: its share, the clients that clearly are it, and the most typical ones. c: (M, K)."""
    c = np.asarray(c, dtype=float)
    columns = (
        Column("model", text=True),
        Column("share", "mean membership over all clients", show_share),
        Column("clear clients", f"at least {show_share(CLEAR)} this model", "{:.0f}".format),
        Column("largest for", "clients whose largest membership it is", "{:.0f}".format),
        Column("most typical clients", text=True),
    )
    clear, largest = (c >= CLEAR).sum(0), np.bincount(c.argmax(1), minlength=len(names))
    rows: list[tuple[Cell, ...]] = []
    for k, name in enumerate(names):
        typical = np.argsort(-c[:, k], kind="stable")[:3]
        named = ", ".join(f"{ids[i]} ({show_share(c[i, k])})" for i in typical)
        rows.append((name, float(c[:, k].mean()), int(clear[k]), int(largest[k]), named))
    mixed, clients = len(c) - int(clear.sum()), plural(len(c), "client")
    note = f"{mixed:,} of {clients} are mixed: less than {show_share(CLEAR)} of any model."
    return Table(title, columns, tuple(rows), (note,))


def gain_table(found: Comparison, best: str) -> Table:
    """How many clients gain and lose with one method against each of the others, which a mean can hide."""
    columns = (
        Column("compared with", text=True),
        *(Column(name, show="{:.0f}".format) for name in ("better", "equal", "worse")),
        Column("loses most", text=True),
    )
    rows = []
    ours, measured = found.scores[best], found.metric or metric("score")
    for other, theirs in found.scores.items():
        if other == best:
            continue
        both = [id_ for id_ in ours if id_ in theirs]
        better = sum(measured.better(ours[id_], theirs[id_]) for id_ in both)
        worse = sum(measured.better(theirs[id_], ours[id_]) for id_ in both)
        sign = 1 if measured.higher_is_better else -1
        last = min(both, key=lambda id_: sign * (ours[id_] - theirs[id_]), default=None)
        lost = (
            "" if not worse or last is None else f"{last}: {measured.show(theirs[last])} to {measured.show(ours[last])}"
        )
        rows.append((other, better, len(both) - better - worse, worse, lost))
    return Table("", columns, tuple(rows))


def round_table(run: RunRecord, most: int = 12) -> Table:
    """Evaluated rounds, at even steps from the first to the last."""
    shown = [run.evaluated[i] for i in evenly(len(run.evaluated), most)]
    keys = {"loss": "training loss"}
    if (name := run.metric) is not None:
        keys |= {name: name, name + _CLIENT_MEAN: _MEAN, name + _WORST: _TENTH}
        keys |= {other.name: other.name for other in _other_metrics([MethodRuns("", (run,))], metric(name))}
    keys |= {key: key for key in ("objective", "stationarity") if any(key in row for row in shown)}
    columns = [Column(title, show=metric(_base(key)).show) for key, title in keys.items()]
    rows = tuple((int(row["round"]), *(row.get(key) for key in keys)) for row in shown)
    return Table("", (Column("round", show="{:.0f}".format), *columns), rows)


def _base(key: str) -> str:
    return key.removesuffix(_CLIENT_MEAN).removesuffix(_WORST)


def settings_tables(found: Comparison) -> list[Table]:
    """Settings and versions: those in which methods differ, one column per method, then those they share."""
    sources = [flatten_settings(_settings(method)) for method in found.methods]
    keys = dict.fromkeys(key for source in sources for key in source)
    rows = [(key, *(source.get(key, NOTHING) for source in sources)) for key in keys]
    names = ["setting", *(method.label for method in found.methods)]
    differ, shared = ([row for row in rows if (len({*row[1:]}) > 1) == wanted] for wanted in (True, False))
    tables = [
        ("Settings that differ", names, differ),
        ("Settings of all", ["setting", "value"], [r[:2] for r in shared]),
    ]
    return [Table(title, tuple(Column(name, text=True) for name in columns), tuple(body))
            for title, columns, body in tables if body]  # fmt: skip


def _settings(method: MethodRuns) -> dict[str, Any]:
    run = method.first
    seeds = [seed for repeat in method.runs for seed in repeat.experiment.get("seeds", [])]
    return {**run.experiment, **({"seeds": seeds} if seeds else {}), "versions": run.versions}


def flatten_settings(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as a flat mapping with dotted names.

    >>> flatten_settings({"method": {"name": "ppfl", "lr": 0.1}, "seed": 3})
    {'method.name': 'ppfl', 'method.lr': '0.1', 'seed': '3'}
    """
    found: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found |= flatten_settings(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value if isinstance(value, str) else json.dumps(value, default=str)
    return found


def preparation_table(preparation: Mapping[str, Any]) -> Table:
    """How the columns of a table were prepared, one row per column, from what a run folder holds."""
    note = f"Means, deviations and levels are those of all {preparation['rows']:,} training rows."
    if preparation["dropped"]:
        note += f" {preparation['dropped']:,} rows were left out, as a value was missing."
    columns = (Column("column", text=True), Column("became", text=True), Column("missing", show="{:.0f}".format))
    rows = tuple((each["name"], describe_column(each), each["missing"]) for each in preparation["columns"])
    return Table("How the columns were prepared", columns, rows, (note,))


def describe_column(column: Mapping[str, Any]) -> str:
    """What became of a column.

    >>> age = {"levels": [], "mean": [40.0], "scale": [9.5], "fill": 40.0, "rare": []}
    >>> describe_column(age), describe_column(age | {"scale": [0.0]})
    ('(x - 40) / 9.5, and 40 where it was missing', 'one value: 0')
    >>> describe_column({"levels": ["a", "b", "other"], "rare": ["c", "d"]})
    'indicators of b, other; the reference is a; c, d became other'
    """
    if column["levels"]:
        first, *others = column["levels"]
        found = f"indicators of {', '.join(others)}; the reference is {first}" if others else f"one level, {first}"
        return found + (f"; {', '.join(column['rare'])} became other" if column["rare"] else "")
    (mean,), (scale,) = column["mean"], column["scale"]
    if not scale:
        return "one value: 0"
    found = "x as it is" if (mean, scale) == (0, 1) else f"(x - {mean:.6g}) / {scale:.6g}"
    return found if column["fill"] is None else f"{found}, and {column['fill']:.6g} where it was missing"


def trials_table(found: Mapping[str, Sequence[Any]]) -> Table:
    """The best trial of every method of `ppfl tune`, and the score of its original settings."""
    columns = (
        Column("method", text=True), Column("best settings", text=True), Column("score", text=True),
        Column("original score", text=True), Column("trials", show="{:.0f}".format),
    )  # fmt: skip
    rows: list[tuple[Cell, ...]] = []
    for label, trials in found.items():
        best, own = trials[0], next(trial for trial in trials if not trial.changes)
        scores = (show_score(trial.metric, trial.score) for trial in (best, own))
        rows.append((label, changed_settings(best), *scores, len(trials)))
    return Table("", columns, tuple(rows), ("Scores on validation samples of the clients' training data.",))


def changed_settings(trial: Any) -> str:
    return ", ".join(f"{name} = {value}" for name, value in trial.changes.items()) or "original settings"


def refused_updates(records: Sequence[RunRecord]) -> str:
    """How many updates were refused, and whose; empty if none was."""
    refusals = [refusal for run in records for refusal in run.refusals]
    if not refusals:
        return ""
    reasons, most = dict(refusals), Counter(client for client, _ in refusals).most_common()
    named = [f"{count:,} of client {shorten(repr(client), 40)}" for client, count in most[:3]]
    named += [f"{sum(count for _, count in most[3:]):,} of others"] if len(most) > 3 else []
    return (
        f"{plural(len(refusals), 'update')} refused: {', '.join(named)} ({reasons[most[0][0]]}); look at the data there"
    )
