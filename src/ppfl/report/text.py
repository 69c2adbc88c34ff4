"""What a page says in sentences: the setting, which method is best, who gains, and what kinds of clients there are."""

from __future__ import annotations

from collections.abc import Sequence

from ..runs.record import RunRecord
from .memberships import SortedMemberships, agreement, is_one_hot
from .method_runs import MethodRuns
from .results import Comparison
from .run_tables import refused_updates
from .theme import CLEAR, Metric, join_names, plural, show_share


def summary(found: Comparison) -> str:
    """All sentences that apply, as a paragraph."""
    shown = next(iter(found.memberships), None)
    sentences = [_setting(found.methods), _ranking(found), gains(found)]
    if shown is not None:
        sentences += [kinds(shown), _truth(found[shown.label], shown)]
    refused = refused_updates(found.records)
    sentences.append(f"{refused[0].upper()}{refused[1:]}." if refused else "")
    names = [method.label for method in found.methods if not method.finished]
    sentences.append(f"Not finished yet: {join_names(names)}." if names else "")
    return " ".join(sentence for sentence in sentences if sentence)


def _setting(methods: Sequence[MethodRuns]) -> str:
    clients = plural(len({id_ for method in methods for id_ in method.first.ids}), "client")
    rounds = {method.rounds for method in methods}
    length = f"{'up to ' if len(rounds) > 1 else ''}{plural(max(rounds), 'round')}"
    seeds = max(len(method.runs) for method in methods)
    length += f", with {seeds} seeds each" if seeds > 1 else ""
    if len(methods) == 1:
        return f"{clients} learned together with {methods[0].label} for {length}."
    return f"{clients} learned with {len(methods)} methods ({join_names([m.label for m in methods])}) for {length}."


def _ranking(found: Comparison) -> str:
    measured = found.metric
    scored = [(m, score) for m in found.methods if measured and (score := m.score(measured.name)) is not None]
    if measured is None or not scored:
        return "No run has been evaluated on test data yet."
    best, score = scored[0]
    shown, article = measured.show(score), "an" if measured.name[0] in "aeiou" else "a"
    if len(scored) == 1 or measured.higher_is_better is None:
        return f"{best.label} reaches {article} {measured.name} of {shown} on test data."
    level = [method.label for method, other in scored if measured.show(other) == shown]
    if len(level) > 1:
        return f"{join_names(level)} are level at the best {measured.name}, {shown} on test data."
    second, other = scored[1]
    spreads = [one.sd for m in (best, second) if (one := m.spread(lambda run: run.final(measured.name)))]
    unsure = any(sd is not None and sd >= abs(score - other) for sd in spreads)
    return (
        f"{best.label} is best with {article} {measured.name} of {shown} on test data, "
        f"{_distance(score, other, measured)} {second.label} ({measured.show(other)})"
        f"{', though seeds differ by as much' if unsure else ''}."
    )


def _distance(score: float, other: float, measured: Metric) -> str:
    if measured.higher_is_better:
        return f"{100 * (score - other):.1f} points above" if measured.is_share else "above"
    return f"{(other - score) / abs(other):.0%} below" if other else "below"


def gains(found: Comparison) -> str:
    """How many clients gain and lose with the best method, which a mean can hide."""
    measured, labels = found.metric, [*found.scores][:2]
    if len(labels) < 2 or measured is None or measured.higher_is_better is None:
        return ""
    first, second = (found.scores[label] for label in labels)
    both = [id_ for id_ in first if id_ in second]
    if not both:
        return ""
    better = sum(measured.better(first[id_], second[id_]) for id_ in both)
    worse = sum(measured.better(second[id_], first[id_]) for id_ in both)
    return (
        f"{better:,} of {plural(len(both), 'client')} have better scores with {labels[0]} "
        f"than with {labels[1]}, {f'{worse:,}' if worse else 'none'} worse."
    )


def kinds(shown: SortedMemberships) -> str:
    """How the clients divide over the canonical models."""
    if len(shown.ids) < 2:
        return ""
    used = [count for count in shown.counts if count]
    mixed = f"; {shown.mixed:,} are mixtures, with no membership of {show_share(CLEAR)}" if shown.mixed else ""
    subject = f"With its first seed, {shown.label}" if shown.seeds > 1 else shown.label
    if len(used) == 1:
        return f"{subject} found only one kind of clients, although it has {shown.k} canonical models{mixed}."
    which = shown.names[shown.counts.index(max(used))]
    return (
        f"{subject} found {len(used)} kinds of clients with {shown.k} canonical models, "
        f"the largest ({which}) with {plural(max(used), 'client')}{mixed}."
    )


def _truth(method: MethodRuns, shown: SortedMemberships) -> str:
    run = method.first
    found = agreement(run)
    if found is None or run.truth is None:
        return ""
    if is_one_hot(run.truth):
        right = round(found.share * len(shown.ids))
        return f"The true group is known here: {right:,} of {plural(len(shown.ids), 'client')} are in theirs."
    return f"The true mixtures are known here: the membership error is {found.distance:.3f}."


def run_line(run: RunRecord) -> str:
    """What was run, and how many rounds are done."""
    state = "finished" if run.finished else f"stopped or running, round {run.rounds_done} of {run.experiment['rounds']}"
    data = run.experiment["data"]["name"]
    line = f"{run.name}: {run.method} on {data}, {plural(len(run.ids), 'client')}, seed {run.seed}, {state}"
    if (found := agreement(run)) is not None:
        line += f"; {found.share:.1%} of the clients in their true group, membership error {found.distance:.3f}"
    return f"{line}; {refused}" if (refused := refused_updates([run])) else line
