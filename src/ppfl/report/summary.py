"""A paragraph that summarises the runs in plain sentences."""

from collections import Counter
from collections.abc import Iterable, Sequence

from ppfl.runs.record import RunRecord

from .markup import shorten
from .methods import MethodRuns, spread
from .metric import Metric
from .sorted_memberships import MIXED_BELOW, SortedMemberships, TruthAgreement, letter, truth_agreement

_MOST_NAMED, _MAX_ID_LENGTH = 3, 40


def summary(methods: Sequence[MethodRuns], metric: Metric, shown: SortedMemberships | None) -> str:
    """All sentences that apply; methods are sorted from best to worst."""
    sentences = [_setting(methods), _ranking(methods, metric), _clients(methods, metric)]
    if shown is not None:
        run = next(method.first for method in methods if method.label == shown.label)
        sentences += [_kinds(shown), _truth(truth_agreement(run), shown)]
    sentences += [_refused(methods), _unfinished(methods)]
    return " ".join(sentence for sentence in sentences if sentence)


def plural(count: int, noun: str) -> str:
    """
    >>> plural(1, "client"), plural(40, "client")
    ('1 client', '40 clients')
    """
    return f"{count} {noun}{'' if count == 1 else 's'}"


def join_names(names: Sequence[str]) -> str:
    """
    >>> join_names(["A", "B", "C"]), join_names(["A, small", "A, large", "B"])
    ('A, B and C', 'A, small; A, large and B')
    """
    between = "; " if any("," in name for name in names) else ", "
    return " and ".join([between.join(names[:-1]), names[-1]] if len(names) > 1 else names)


def _setting(methods: Sequence[MethodRuns]) -> str:
    clients = len({id_ for method in methods for id_ in method.first.ids})
    rounds = {method.rounds for method in methods}
    length = f"{'up to ' if len(rounds) > 1 else ''}{plural(max(rounds), 'round')}"
    seeds = max(len(method.runs) for method in methods)
    length += f", with {seeds} seeds each" if seeds > 1 else ""
    names = join_names([method.label for method in methods])
    if len(methods) == 1:
        return f"{plural(clients, 'client')} learned together with {names} for {length}."
    return f"{plural(clients, 'client')} learned with {len(methods)} methods ({names}) for {length}."


def _ranking(methods: Sequence[MethodRuns], metric: Metric) -> str:
    scored = [(method, score) for method in methods if (score := method.score(metric)) is not None]
    if not scored:
        return "No run has been evaluated on test data yet."
    best, score = scored[0]
    if len(scored) == 1:
        return f"{best.label} reaches {_article(metric)} of {metric.show(score)} on test data."
    level = [method.label for method, other in scored if metric.show(other) == metric.show(score)]
    if len(level) > 1:
        return f"{join_names(level)} are level at the best {metric.full_name}, {metric.show(score)} on test data."
    second, other = scored[1]
    spreads = [spread(method.values(lambda run: run.final(metric.name))) for method in (best, second)]
    unsure = any(s is not None and s >= abs(score - other) for s in spreads)
    return (
        f"{best.label} is best with {_article(metric)} of {metric.show(score)} on test data, "
        f"{_distance(score, other, metric)} {second.label} ({metric.show(other)})"
        f"{', though seeds differ by as much' if unsure else ''}."
    )


def _article(metric: Metric) -> str:
    return f"{'an' if metric.full_name[0] in 'aeiou' else 'a'} {metric.full_name}"


def _distance(score: float, other: float, metric: Metric) -> str:
    if metric.higher_is_better:
        return f"{100 * (score - other):.1f} points above"
    return f"{(other - score) / abs(other):.0%} below" if other else "below"


def _clients(methods: Sequence[MethodRuns], metric: Metric) -> str:
    """How many clients gain and lose with the best method, which a mean can hide."""
    scored = [method for method in methods if method.per_client()][:2]
    if len(scored) < 2:
        return ""
    first, second = (method.per_client() for method in scored)
    both = [id_ for id_ in first if id_ in second]
    if not both:
        return ""
    better = sum(metric.better(first[id_], second[id_]) for id_ in both)
    worse = sum(metric.better(second[id_], first[id_]) for id_ in both)
    return (
        f"{better} of {plural(len(both), 'client')} have better scores with {scored[0].label} "
        f"than with {scored[1].label}, {worse or 'none'} worse."
    )


def _kinds(shown: SortedMemberships) -> str:
    if len(shown.ids) < 2:
        return ""
    found = [(count, j) for j, count in enumerate(shown.counts) if count]
    largest, which = max(found, key=lambda pair: pair[0])
    mixed = f"; {shown.mixed} are mixtures, no membership above {MIXED_BELOW:.0%}" if shown.mixed else ""
    subject = f"With its first seed, {shown.label}" if shown.seeds > 1 else shown.label
    if len(found) == 1:
        return f"{subject} found only one kind of clients, although it has {shown.k} canonical models{mixed}."
    return (
        f"{subject} found {len(found)} kinds of clients with {shown.k} canonical models, "
        f"the largest ({letter(which)}) with {plural(largest, 'client')}{mixed}."
    )


def _truth(found: TruthAgreement | None, shown: SortedMemberships) -> str:
    if found is None:
        return ""
    if found.groups:
        right = round(found.value * len(shown.ids))
        return f"The true group is known here: {right} of {plural(len(shown.ids), 'client')} are in theirs."
    return f"The true mixtures are known here: the memberships overlap with them by {found.value:.0%}."


def _refused(methods: Sequence[MethodRuns]) -> str:
    found = refused_updates(run for method in methods for run in method.runs)
    return f"{found[0].upper()}{found[1:]}." if found else ""


def refused_updates(runs: Iterable[RunRecord]) -> str:
    """How many updates were refused, and whose; empty if none was."""
    refusals = [refusal for run in runs for refusal in run.refusals]
    if not refusals:
        return ""
    reasons = dict(refusals)
    most = Counter(client for client, _ in refusals).most_common()
    named = [f"{count} of client {shorten(repr(client), _MAX_ID_LENGTH)}" for client, count in most[:_MOST_NAMED]]
    named += [f"{sum(count for _, count in most[_MOST_NAMED:])} of others"] if len(most) > _MOST_NAMED else []
    return f"updates refused: {', '.join(named)} ({reasons[most[0][0]]}); look at the data there"


def _unfinished(methods: Sequence[MethodRuns]) -> str:
    names = [method.label for method in methods if not method.finished]
    return f"Not finished yet: {join_names(names)}." if names else ""
