"""Ours beside the paper's, as sheets of text that a terminal and a page can both show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

from ..runs.agreement import group_agreement
from ..runs.record import RunRecord, mean_and_sd
from .costs import Cost, mean_cost
from .figures import Figure, paper_figures
from .studies import Case, Study

NOTHING = "–"
Runs = Mapping[str, Sequence[RunRecord]]  # by method, a run a seed
_MB = 1e6
_ROUNDS_SHOWN = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


class Sheet(NamedTuple):
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def markdown(self) -> str:
        """The first column to the left, figures to the right."""
        rule = ("---", *["---:"] * (len(self.columns) - 1))
        lines = [f"| {' | '.join(cells)} |" for cells in (self.columns, rule, *self.rows)]
        return "\n".join([f"**{self.title}**", "", *lines, *(["", self.note] if self.note else [])])


def sheets_of(study: Study, runs: Mapping[str, Runs]) -> list[Sheet]:
    """What the study is to show of the runs of its cases."""
    return [sheet for case in study.cases for sheet in _VIEWS[study.view](study, case, runs[case.name])]


def _scores(study: Study, case: Case, runs: Runs) -> list[Sheet]:
    figures, target = paper_figures(study.name, case.name), case.targets[0] if case.targets else None
    uneven = len({len(of_label) for of_label in runs.values()}) > 1
    columns = ["method", *(["seeds"] if uneven else []), "ours", "paper", "difference", "client mean", "worst 10%"]
    columns += ["s", "MB up", "MB down"]
    if target is not None:
        columns += [f"rounds to {target:.1%}", "s to it", "MB up to it", "MB down to it"]
    rows = []
    for label, of_label in runs.items():
        figure = figures.get(label)
        scores = [100 * run.scores["accuracy"] for run in of_label]
        difference = f"{fmean(scores) - figure.accuracy:+.2f}" if figure else NOTHING
        row = [label, *([str(len(of_label))] if uneven else []), mean_and_sd(scores), _of_paper(figure), difference]
        for part in ("mean", "worst_tenth"):
            row.append(mean_and_sd([100 * run.scores[f"accuracy_{part}"] for run in of_label]))
        row += _cost(_whole_cost(of_label))[1:]
        if target is not None:
            row += _cost(mean_cost(of_label, target))
        rows.append(tuple(row))
    sources = ", ".join(dict.fromkeys(figure.source for figure in figures.values()))
    return [Sheet(_title(study, case, runs), tuple(columns), tuple(rows), f"Paper: {sources}." if sources else "")]


def _costs(study: Study, case: Case, runs: Runs) -> list[Sheet]:
    columns = ("method", "accuracy", "kB up a round", "kB down a round", "rounds", "s", "MB up", "MB down")
    sheets = []
    for target in case.targets:
        rows = []
        for label, of_label in runs.items():
            whole = _whole_cost(of_label)
            a_round = [f"{value / whole.rounds / 1e3:.4g}" for value in (whole.bytes_up, whole.bytes_down)]
            scores = [100 * run.scores["accuracy"] for run in of_label]
            rows.append((label, mean_and_sd(scores), *a_round, *_cost(mean_cost(of_label, target))))
        title = f"{_title(study, case, runs)}: what a client pays until accuracy is {target:.1%}"
        sheets.append(Sheet(title, columns, tuple(rows)))
    return sheets


def _recovery(study: Study, case: Case, runs: Runs) -> list[Sheet]:
    """Memberships against the truth by round, means over seeds."""
    known = {label: found for label, of_label in runs.items() if (found := _agreement_by_round(of_label))}
    rounds = sorted({t for found in known.values() for t in found})
    shown = [t for t in rounds if t in _ROUNDS_SHOWN or t == rounds[-1]]
    columns = ["round", *(f"{label}: {what}" for label in known for what in ("in their group", "off"))]
    rows = [(str(t), *(cell for found in known.values() for cell in found.get(t, (NOTHING, NOTHING)))) for t in shown]
    note = "In their group: share of clients whose largest membership is that of their largest true source. "
    note += "Off: mean total variation between memberships and the truth, canonical models matched."
    return [Sheet(_title(study, case, runs), tuple(columns), tuple(rows), note)] if rows else []


def _agreement_by_round(runs: Sequence[RunRecord]) -> dict[int, tuple[str, str]]:
    truth = runs[0].truth
    if truth is None:
        return {}
    common = set.intersection(*(set(run.memberships_by_round) for run in runs))
    found = {}
    for t in common:
        each = [group_agreement(run.memberships_by_round[t], truth) for run in runs]
        found[t] = (f"{fmean(a.share for a in each):.1%}", f"{fmean(a.distance for a in each):.3f}")
    return found


_VIEWS = {"scores": _scores, "costs": _costs, "recovery": _recovery}


def _title(study: Study, case: Case, runs: Runs) -> str:
    experiment = next(iter(case.experiments.values()))
    clients = len(next(iter(runs.values()))[0].ids)
    seeds = {len(of_label) for of_label in runs.values()}
    many = f"{min(seeds)} to {max(seeds)} seeds" if len(seeds) > 1 else f"{min(seeds)} seed{'s' * (min(seeds) > 1)}"
    title = f"{study.title}, {case.name}: {clients} clients, {experiment.rounds} rounds, {many}"
    return f"{title}; {case.scale}" if case.scale else title


def _whole_cost(runs: Sequence[RunRecord]) -> Cost:
    totals = [fmean(run.total(key) for run in runs) for key in ("seconds", "bytes_up", "bytes_down")]
    return Cost(runs[0].rounds_done, totals[0], *(total / len(runs[0].ids) for total in totals[1:]))


def _cost(cost: Cost | None) -> list[str]:
    if cost is None:
        return [NOTHING] * 4
    return [f"{cost.rounds:.0f}", f"{cost.seconds:.1f}", *(f"{b / _MB:.3g}" for b in (cost.bytes_up, cost.bytes_down))]


def _of_paper(figure: Figure | None) -> str:
    if figure is None:
        return NOTHING
    return f"{figure.accuracy:.2f}" + (f" ± {figure.sd:.2f}" if figure.sd is not None else "")
