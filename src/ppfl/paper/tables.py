"""Tables of our results beside those of the paper, as text that a terminal and a page can both show."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from ..core.simplex import harden
from ..runs.record import RunRecord, group_agreement, mean_and_sd
from .convergence import Series, all_series
from .costs import Cost, mean_cost
from .published import PaperResult, paper_results
from .studies import Case, Study

NOTHING = "–"
Runs = Mapping[str, Sequence[RunRecord]]  # by method, one run per seed
_MB = 1e6
_MEMBERSHIPS_NOTE = (
    "In their group: share of clients whose largest membership is that of their largest true source. "
    "Off: mean total variation between memberships and the truth, canonical models matched. "
    "Told apart: share of clients whose membership is nearest to the mean membership of the others in their group."
)
_ROUNDS_SHOWN = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


class StudyTable(NamedTuple):
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def markdown(self) -> str:
        """The table in Markdown; the first column is left-aligned, numbers are right-aligned."""
        rule = ("---", *["---:"] * (len(self.columns) - 1))
        lines = [f"| {' | '.join(cells)} |" for cells in (self.columns, rule, *self.rows)]
        return "\n".join([f"**{self.title}**", "", *lines, *(["", self.note] if self.note else [])])


def study_tables(study: Study, runs: Mapping[str, Runs]) -> list[StudyTable]:
    """All tables of a study, from the runs of its cases."""
    return VIEWS[study.view].tables(study, runs)


def _scores(study: Study, case: Case, runs: Runs) -> list[StudyTable]:
    published = paper_results(*(case.paper or (study.name, case.name)))
    target = case.targets[0] if case.targets else None
    seeds_differ = len({len(method_runs) for method_runs in runs.values()}) > 1
    columns = [
        "method",
        *(["seeds"] if seeds_differ else []),
        *(["ours", "paper", "difference"] if published else ["accuracy"]),
    ]
    columns += ["client mean", "worst 10%", "s", "MB up", "MB down"]
    if target is not None:
        columns += [f"rounds to {target:.1%}", "s to it", "MB up to it", "MB down to it"]
    rows = []
    for label, method_runs in runs.items():
        result = published.get(label.split(", ")[0] if case.paper else label)
        scores = [100 * run.scores["accuracy"] for run in method_runs]
        row = [label, *([str(len(method_runs))] if seeds_differ else []), mean_and_sd(scores)]
        if published:
            row += [_paper_cell(result), f"{fmean(scores) - result.accuracy:+.2f}" if result else NOTHING]
        for part in ("mean", "worst_tenth"):
            row.append(mean_and_sd([100 * run.scores[f"accuracy_{part}"] for run in method_runs]))
        row += _cost_cells(_total_cost(method_runs))[1:]
        if target is not None:
            row += _cost_cells(mean_cost(method_runs, target))
        rows.append(tuple(row))
    sources = ", ".join(dict.fromkeys(result.source for result in published.values()))
    return [StudyTable(_title(study, case, runs), tuple(columns), tuple(rows), f"Paper: {sources}." if sources else "")]


def _costs(study: Study, case: Case, runs: Runs) -> list[StudyTable]:
    columns = ("method", "accuracy", "kB up per round", "kB down per round", "rounds", "s", "MB up", "MB down")
    tables = []
    for target in case.targets:
        rows = []
        for label, method_runs in runs.items():
            total = _total_cost(method_runs)
            per_round = [f"{value / total.rounds / 1e3:.4g}" for value in (total.bytes_up, total.bytes_down)]
            scores = [100 * run.scores["accuracy"] for run in method_runs]
            rows.append((label, mean_and_sd(scores), *per_round, *_cost_cells(mean_cost(method_runs, target))))
        title = f"{_title(study, case, runs)}: cost per client to reach an accuracy of {target:.1%}"
        tables.append(StudyTable(title, columns, tuple(rows)))
    return tables


def _recovery(study: Study, case: Case, runs: Runs) -> list[StudyTable]:
    """The distance of memberships from the truth by round, as means over seeds."""
    known = {label: found for label, method_runs in runs.items() if (found := _agreement_by_round(method_runs))}
    rounds = sorted({t for found in known.values() for t in found})
    shown = [t for t in rounds if t in _ROUNDS_SHOWN or t == rounds[-1]]
    columns = ["round", *(f"{label}: {what}" for label in known for what in ("in their group", "off", "told apart"))]
    rows = [(str(t), *(cell for found in known.values() for cell in found.get(t, (NOTHING, NOTHING)))) for t in shown]
    return [StudyTable(_title(study, case, runs), tuple(columns), tuple(rows), _MEMBERSHIPS_NOTE)] if rows else []


def _participation(study: Study, case: Case, runs: Runs) -> list[StudyTable]:
    """Scores on validation and test data, the cost to a target, and memberships beside the truth."""
    (target,) = case.targets
    columns = ["share of clients, rule", "validation", "test", "worst 10%", "s", f"rounds to {target:.1%}"]
    columns += ["MB up to it", "MB down to it", "in their group", "off", "told apart"]
    rows = []
    for label, of_method in runs.items():
        last = max(run.metrics[-1]["round"] for run in of_method)
        parts = ("validation_accuracy", "accuracy", "accuracy_worst_tenth")
        scores = [_score_cell([run.scores.get(part) for run in of_method]) for part in parts]
        cost = _cost_cells(mean_cost(of_method, target))
        agreement = _agreement_by_round(of_method).get(last, (NOTHING,) * 3)
        seconds = f"{_total_cost(of_method).seconds:.1f}"
        rows.append((label, *scores, seconds, cost[0], *cost[2:], *agreement))
    return [StudyTable(_title(study, case, runs), tuple(columns), tuple(rows), _MEMBERSHIPS_NOTE)]


def _score_cell(scores: Sequence[float | None]) -> str:
    known = [100 * score for score in scores if score is not None]
    return mean_and_sd(known) if known else NOTHING


def _agreement_by_round(runs: Sequence[RunRecord]) -> dict[int, tuple[str, str, str]]:
    truth = runs[0].truth
    if truth is None:
        return {}
    common = set.intersection(*(set(run.memberships_by_round) for run in runs))
    found = {}
    for t in common:
        each = [group_agreement(run.memberships_by_round[t], truth) for run in runs]
        apart = fmean(nearest_group_accuracy(run.memberships_by_round[t], truth) for run in runs)
        found[t] = (f"{fmean(a.share for a in each):.1%}", f"{fmean(a.distance for a in each):.3f}", f"{apart:.1%}")
    return found


def nearest_group_accuracy(memberships: Tensor, truth: Tensor) -> float:
    """The share of clients whose membership is nearest to the mean membership of the others in their true group.

    Groups can be told apart by their memberships also where each mixes several canonical models.

    >>> truth = torch.eye(2)[[0, 0, 1, 1]]
    >>> memberships = torch.tensor([[0.9, 0.1], [0.8, 0.2], [0.6, 0.4], [0.6, 0.4]])
    >>> nearest_group_accuracy(memberships, truth), group_agreement(memberships, truth).share
    (1.0, 0.5)
    """
    c, group = memberships.double().cpu(), harden(truth.double().cpu())
    sizes, sums = group.sum(0), group.T @ c
    others = sums - group[:, :, None] * c[:, None]  # (M, Kt, K): sums without the client itself
    left = sizes - group
    distance = (others / left[:, :, None] - c[:, None]).norm(dim=2)
    distance[left == 0] = torch.inf  # nobody else is in that group
    near = distance.min(dim=1, keepdim=True)
    return float((group.gather(1, near.indices) * near.values.isfinite()).mean())


def _rates(study: Study, runs: Mapping[str, Runs]) -> list[StudyTable]:
    """The mean of the measure by horizon with its slope, and the bounds of the theorems."""
    found = all_series(study, runs)
    horizons = sorted({T for series in found for T in series.means})
    names = [f"{series.promise.theorem}, {series.promise.about}: {series.label}" for series in found]
    measured = [
        (name, f"{series.eta:.3g}", *(f"{series.means[T]:.2e}" if T in series.means else NOTHING for T in horizons),
         _slope(series), _exponent(series.promise.exponent))
        for name, series in zip(names, found, strict=True)
    ]  # fmt: skip
    bounds = [
        (name, *(f"{series.bounds[T]:.2e}" if T in series.bounds else NOTHING for T in horizons))
        for name, series in zip(names, found, strict=True)
    ]
    each_T = [f"T = {T:,}" for T in horizons]
    columns = ("runs", "eta at the largest T", *each_T, "slope", "promised")
    title = f"{study.title}: mean of the stationarity measure over T rounds"
    return [
        StudyTable(title, columns, tuple(measured), _promises_kept(found)),
        StudyTable("The bounds of the theorems for the same runs", ("runs", *each_T), tuple(bounds)),
    ]


def _promises_kept(found: Sequence[Series]) -> str:
    """One sentence per theorem: what it promises, and what was measured."""
    sentences = []
    for promise in dict.fromkeys(series.promise for series in found):
        own = [series for series in found if series.promise == promise]
        slopes = ", ".join(f"T^{_slope(series)} ({series.label})" for series in own)
        promised = f"T^{promise.exponent:g}" if promise.exponent else "no rate, as the noise of a constant step stays"
        least = min(series.bounds[T] / series.means[T] for series in own for T in series.means)
        sentences.append(
            f"{promise.theorem} ({promise.about}) promises {promised}; measured {slopes}, "
            f"at least {least:.0f} times below its bound."
        )
    return "\n".join(f"- {sentence}" for sentence in sentences)


def _slope(series: Series) -> str:
    return NOTHING if math.isnan(series.slope) else f"{series.slope:.2f}"


def _exponent(value: float) -> str:
    return f"{value:g}" if value else "to a floor"


class View(NamedTuple):
    """How a study is shown."""

    tables: Callable[[Study, Mapping[str, Runs]], list[StudyTable]]
    about: str  # what the numbers are


def _for_each_case(tables: Callable[[Study, Case, Runs], list[StudyTable]]) -> View:
    about = "Accuracies are in per cent, ± standard deviation over seeds; MB are per client over all rounds."
    return View(lambda study, runs: [t for case in study.cases for t in tables(study, case, runs[case.name])], about)


VIEWS = {
    "scores": _for_each_case(_scores),
    "costs": _for_each_case(_costs),
    "recovery": _for_each_case(_recovery),
    "participation": _for_each_case(_participation),
    "rates": View(
        _rates,
        "The stationarity measure of Section 3.2 is the squared norm of grad_theta F and of (C - C₊) / eta, with C₊ "
        "the mirror step on the full gradient. E is the number of local steps; slopes are fitted to the logarithms.",
    ),
}


def _title(study: Study, case: Case, runs: Runs) -> str:
    before = [f"{e.rounds} of {label}" for label, e in case.experiments.items() if label not in case.compared]
    rounds = " after ".join([f"{case.experiments[case.compared[0]].rounds} rounds", *before])
    clients = len(next(iter(runs.values()))[0].ids)
    seeds = {len(method_runs) for method_runs in runs.values()}
    many = f"{min(seeds)} to {max(seeds)} seeds" if len(seeds) > 1 else f"{min(seeds)} seed{'s' * (min(seeds) > 1)}"
    title = f"{study.title}, {case.name}: {clients} clients, {rounds}, {many}"
    return f"{title}; {case.scale}" if case.scale else title


def _total_cost(runs: Sequence[RunRecord]) -> Cost:
    totals = [fmean(run.total(key) for run in runs) for key in ("seconds", "bytes_up", "bytes_down")]
    return Cost(runs[0].rounds_done, totals[0], *(sent / len(runs[0].ids) for sent in totals[1:]))


def _cost_cells(cost: Cost | None) -> list[str]:
    if cost is None:
        return [NOTHING] * 4
    return [f"{cost.rounds:.0f}", f"{cost.seconds:.1f}", *(f"{b / _MB:.3g}" for b in (cost.bytes_up, cost.bytes_down))]


def _paper_cell(result: PaperResult | None) -> str:
    if result is None:
        return NOTHING
    return f"{result.accuracy:.2f}" + (f" ± {result.sd:.2f}" if result.sd is not None else "")
