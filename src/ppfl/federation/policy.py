"""What a site allows, in code and in words.

A site trusts nobody but its owner. It takes part in experiments that its owner has approved, each by the SHA-256 of all
its settings but [data]; it reads them from its own copy, and a server sends no setting. Then it answers only the
requests that such an experiment makes: its method, its seeds, its rounds, its tasks, the clients whose turn it is. What
leaves is a sum over at least `min_clients` distinct clients, none of which outweighs the others, but for the rows that
both the experiment and the policy name. THREATS.md says what this keeps from a server, and what it does not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import torch
from pydantic import Field

from ..algorithms import PPFL, Method
from ..core.draws import hashed
from ..core.ids import Roster
from ..core.registry import python_names
from ..core.settings import Count, Positive, Settings
from ..data.column_sums import TARGET, Center, ColumnPlan
from ..data.preparation import GAP, Preparation, PreparationSettings
from ..errors import PPFLError, SettingError
from ..runs.experiment import Experiment
from ..runs.load import load_experiment
from ..server.loop import MAIN
from ..server.step_size import FIRST, RANGE, TRIAL_ROUNDS
from ..sites import Close, Describe, Evaluate, Setup, Train
from .messages import MOST_BYTES, ClientTable, PrepareRows, Refused, Reveal, SumColumns

SURVEY_CALLS = 12  # before the first round: to find the start, to join, and to prepare tables
_ROWS = {"membership": "memberships", "sketch": "sketches", "importance": "sketches", "length": "changes",
         "change": "changes"}  # fmt: skip
_TABLES = {"labels": ("label_counts",), "features": ("feature_means",), "nearest": ("feature_means",),
           "none": (), "uniform": ()}  # fmt: skip
_IN_WORDS = {
    "scores": "the scores of its own model on its own data",
    "memberships": "its membership, one number for each canonical model, in every round",
    "sketches": "a short sketch of its first gradient, and its number of samples",
    "changes": "the length of its update, and in some rounds the update itself",
    "label_counts": "how many samples of each class it has",
    "feature_means": "the mean of each of its columns",
}


class Policy(Settings):
    """`[policy]` of site.toml: what may leave the site. The defaults are strict.

    >>> Policy().min_clients, Policy().rows
    (5, ())
    """

    min_clients: Count = 5  # distinct clients behind every number that leaves, also effectively
    rows: tuple[str, ...] = ()  # what may leave client by client: scores, memberships, sketches, changes and so on
    client_names: Literal["hashed", "plain"] = "hashed"  # by a key that `ppfl site init` made; "plain" is for trials
    max_message_bytes: Annotated[int, Field(gt=0)] = MOST_BYTES
    max_seconds: Positive = 3600.0  # of work for one call
    max_exchanges: Count = 4  # for each round of an approved experiment and of its trials, repeats counted


class Approved(NamedTuple):
    """An experiment that the owner of a site has approved, once or several times."""

    experiment: Experiment
    hash: str
    times: int = 1

    @property
    def most_calls(self) -> int:
        """What there is of calls with work, in all runs of the experiment together, for one exchange per round."""
        experiment = self.experiment
        trials = (RANGE[1] - RANGE[0] + 1) * (TRIAL_ROUNDS + 1) if experiment.method.local.lr == "auto" else 0
        return self.times * len(experiment.seeds) * (experiment.rounds + trials + SURVEY_CALLS)


def over_sites(experiment: Experiment) -> Experiment:
    """The experiment as it runs over sites, where less is seen of single clients unless it says so: scores of clients
    are not reported, and a start is found from sums. An estimator is made of what single clients show."""
    watch, method = experiment.watch, experiment.method
    if experiment.estimator is not None:
        return experiment
    if "report_clients" not in watch.model_fields_set:
        watch = watch.model_copy(update={"report_clients": False})
    if isinstance(method, PPFL) and "start" not in method.model_fields_set:
        method = method.model_copy(update={"start": "sums"})
    return experiment.model_copy(update={"watch": watch, "method": method})


def experiment_hash(experiment: Experiment) -> str:
    """Of all settings but [data], as they are over sites."""
    settings = over_sites(experiment).model_dump(mode="json", exclude={"data"})
    return sha256(json.dumps(settings, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def as_settings(experiment: Experiment) -> dict[str, Any]:
    """The experiment as it runs over sites, for a file: `load_experiment` reads the same."""
    settings = over_sites(experiment).model_dump(mode="json")
    filled = () if experiment.estimator is None else ("model", "population", "method", "affinity")
    return {name: table for name, table in settings.items() if name not in filled}


def load_approved(folder: Path, base: Path | None = None) -> dict[str, Approved]:
    """The experiments in a folder of approvals, by their hashes. base: where modules are looked for first."""
    found: dict[str, Approved] = {}
    for file in sorted(folder.glob("*.toml")):
        experiment = over_sites(load_experiment(file, base=base))
        hash = experiment_hash(experiment)
        times = found[hash].times + 1 if hash in found else 1
        found[hash] = Approved(experiment, hash, times)
    return found


def rows_shown(experiment: Experiment) -> tuple[str, ...]:
    """What an experiment shows of single clients, by the names that a policy has for it."""
    method, watch = experiment.method, experiment.watch
    found = [_ROWS.get(name, name) for name in method.shows]
    if watch.report_clients and watch.share >= 1:
        found.append("scores")
    name = experiment.affinity.name
    if name == "auto":
        name = "labels" if method.uses_affinity else "none"
    return tuple(dict.fromkeys([*found, *_TABLES.get(name, ("label_counts", "feature_means"))]))


def refuse_unsupported(experiment: Experiment, *, secure: bool = False) -> None:
    """Refuse what cannot be done over sites, before anyone waits for them."""
    if experiment.newcomers:
        raise SettingError(
            "newcomers are held out of all clients before a run, and over sites there is no one place for that; leave "
            "newcomers out"
        )
    if experiment.start is not None and experiment.start.frozen:
        raise SettingError(
            "[start] with frozen parts is not possible over sites: what is frozen is never sent, and the sites do not "
            "have that run; leave frozen out"
        )
    if experiment.watch.output != "last":
        raise SettingError(
            f"output is {experiment.watch.output!r}, and over sites only 'last' is possible, as no site keeps the "
            f"states of another round; leave it out, and set fewer rounds"
        )
    if secure and (shown := rows_shown(over_sites(experiment))):
        raise SettingError(
            f"secure sums show totals alone, and the experiment shows {', '.join(shown)} of each client; set "
            f"report_clients = false under [watch], and for PPFL share_memberships = false and penalty = 0"
        )


class Known(NamedTuple):
    """What a site knows of a run when it judges a request."""

    approved: Approved
    seed: int
    roster: Roster  # of its own clients, by the names that the server knows
    splits: tuple[str, ...]
    importance: float  # of its clients together
    methods: Mapping[str, Method]  # by session
    rounds: Mapping[tuple[str, int], str]  # by session and round, who was asked before
    refused: Mapping[str, frozenset[str]]  # by session, clients whose updates were not counted


def check_request(known: Known, request: Any) -> None:
    """Raise Refused for a request that the approved experiment does not make."""
    check = _CHECKS.get(type(request))
    if check is None:
        raise _outside(f"a {type(request).__name__} is asked for")
    try:
        check(known, request)
    except Refused:
        raise
    except (PPFLError, TypeError, ValueError, AttributeError, LookupError, RuntimeError, ArithmeticError) as error:
        raise _outside(f"a {type(request).__name__} cannot be judged: {error}") from None


def who_was_asked(request: Train) -> str:
    """A short name for the clients of a request."""
    return "all" if request.who is None else sha256("\n".join(sorted(request.who)).encode()).hexdigest()


def _check_setup(known: Known, request: Setup) -> None:
    experiment = known.approved.experiment
    if not _is_text(request.session) or request.seed != known.seed or request.dropout != experiment.dropout:
        raise _outside("a session has another seed or dropout")
    importance = float(request.importance)
    if not (math.isfinite(importance) and importance >= known.importance * (1 - 1e-9)):
        raise _outside("the importance of all clients is less than that of the clients here")
    if not any(_same(request.method, method) for method in _methods(experiment.method, request.session)):
        raise _outside(f"session {request.session!r} has another method than the experiment")


def _methods(method: Method, session: str) -> list[Method]:
    """The methods of a session: the experiment's, with an lr of the trials where that is to be found; or in a trial,
    that of a trial."""
    lrs = [float(f"{FIRST * 10 ** (exponent / 2):.3g}") for exponent in range(RANGE[0], RANGE[1] + 1)]
    if session != MAIN:
        return [method.local.for_trial(lr) for lr in lrs] if method.local.lr == "auto" else []
    return [method.with_local(lr=lr) for lr in lrs] if method.local.lr == "auto" else [method]


def _same(one: Method, other: Method) -> bool:
    return type(one) is type(other) and one.model_dump(mode="json") == other.model_dump(mode="json")


def _check_train(known: Known, request: Train) -> None:
    experiment, method = known.approved.experiment, _method(known, request.session)
    rounds = experiment.rounds if request.session == MAIN else TRIAL_ROUNDS
    if not (_is_count(request.round) and request.round < rounds):
        raise _outside(f"round {request.round!r:.20} of {rounds}")
    if not all(map(_is_count, (request.exchange, request.merged, request.saved))):
        raise _outside("exchanges have no numbers")
    if request.who is not None:
        _check_draw(known, request)
    asked = who_was_asked(request)
    if request.keep_states and known.rounds.get((request.session, request.round), asked) != asked:
        raise _outside("other clients are asked in this round than before")
    tasks = method.possible_tasks(request.round, rounds, known.seed)
    if not request.keep_states:
        tasks = (_stationarity_task(experiment, method),)
    if not any(type(task) is type(request.task) and task == request.task for task in tasks):
        raise _outside(f"the task {request.task!r:.200} is not one of round {request.round}")
    _check_own(request.own, len(known.roster) if request.who is None else len(request.who))


def _stationarity_task(experiment: Experiment, method: Method) -> Any:
    """What may be asked without a change of states: a measurement, where the experiment makes it."""
    nobody: Any = None  # the methods that have such a task need no problem for it
    return method.stationarity_task(nobody) if experiment.watch.stationarity else None


def _check_draw(known: Known, request: Train) -> None:
    """Clients are drawn by the seed, the round and their names: those of a site that take part have its smallest
    draws."""
    who, roster = request.who, known.roster
    if not isinstance(who, tuple) or not all(isinstance(client, str) for client in who):
        raise _outside("clients are not named one by one")
    if strange := [client for client in who if client not in roster.position]:
        raise _outside(f"client {strange[0]!r:.80} is not here")
    if len(set(who)) < len(who):
        raise _outside("a client is named twice")
    draws = hashed(known.seed, "participants", request.round, roster.keys)
    first = {roster.ids[at] for at in draws.argsort()[: len(who)].tolist()}
    if set(who) != first:
        raise _outside("clients are named that are not drawn in this round")


def _check_own(own: Any, count: int) -> None:
    for name, leaf in own.items():
        if not isinstance(leaf, torch.Tensor) or leaf.dim() == 0 or len(leaf) != count:
            raise _outside(f"{name!r:.40} does not have one row for each of {count} clients")


def _check_evaluate(known: Known, request: Evaluate) -> None:
    watch = known.approved.experiment.watch
    _method(known, request.session)
    trial = request.session != MAIN
    splits = {"train"} if trial else {"test", "validation"} | ({"train"} if watch.objective else set())
    if not isinstance(request.splits, tuple) or not set(request.splits) <= splits & set(known.splits):
        raise _outside(f"scores of {request.splits!r:.80} are asked for")
    if request.hard or request.per_client not in (False, watch.report_clients and not trial):
        raise _outside("scores are asked for client by client, or by the max rule")
    if request.metrics != (() if trial else tuple(watch.with_functions().metrics)):
        raise _outside("other metrics are asked for")
    if request.share != (1.0 if trial else watch.share):
        raise _outside("another share of the clients is to be scored")
    refused = known.refused.get(request.session, frozenset()) if trial else frozenset()
    if not {*request.without} & {*known.roster.ids} <= refused:
        raise _outside("clients are left out of the scores whose updates were counted")
    _check_own(request.own, len(known.roster))


def _check_columns(known: Known, request: SumColumns) -> None:
    settings = _preparation(known)
    plan = ColumnPlan.model_validate(request.plan)
    if request.center:
        Center.model_validate(request.center)
    allowed = {name: (*levels, GAP) if settings.missing == "fill" and GAP not in levels else levels
               for name, levels in settings.levels.items()}  # fmt: skip
    wanted = settings.missing, settings.count_target, settings.standardise_target
    if (plan.missing, plan.count_target, TARGET in plan.numbers) != wanted:
        raise _outside("sums of columns by another rule")
    if any(levels != allowed.get(name) for name, levels in plan.levels.items()):
        raise _outside("counts of values that the experiment does not name")
    if len(set(plan.columns)) < len(plan.columns) or len(set(plan.numbers)) < len(plan.numbers):
        raise _outside("a column is named twice")


def _check_prepare(known: Known, request: PrepareRows) -> None:
    settings, found = _preparation(known), Preparation.read(request.preparation)
    allowed = {name: {*levels, GAP} for name, levels in settings.levels.items()}
    if any(column.levels and not {*column.levels} <= allowed.get(column.name, set()) for column in found.columns):
        raise _outside("columns of text have levels that the experiment does not name")
    if found.missing != settings.missing:
        raise _outside("missing values are treated in another way")


def _preparation(known: Known) -> PreparationSettings:
    settings = known.approved.experiment.preparation
    if settings is None:
        raise _outside("the experiment has no [preparation]")
    return settings


def _check_table(known: Known, request: ClientTable) -> None:
    if request.name not in rows_shown(known.approved.experiment) or request.name not in _TABLES_OF_CLIENTS:
        raise _outside(f"the table {request.name!r:.40} of clients is asked for")


def _check_close(known: Known, request: Close) -> None:
    if request.session == MAIN:
        raise _outside("the session of a run is to be closed")


def _method(known: Known, session: str) -> Method:
    if session not in known.methods:
        raise Refused("unknown-run", f"there is no session {session!r:.80}")
    return known.methods[session]


_TABLES_OF_CLIENTS = ("label_counts", "feature_means")
_CHECKS: dict[type, Any] = {
    Setup: _check_setup, Train: _check_train, Evaluate: _check_evaluate, SumColumns: _check_columns,
    PrepareRows: _check_prepare, ClientTable: _check_table, Close: _check_close,
    Describe: lambda known, request: None, Reveal: lambda known, request: None,
}  # fmt: skip


def _outside(text: str) -> Refused:
    return Refused("not-in-experiment", text)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 50 and value.isprintable()


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**53


# ---------------------------------------------------------------------- in words


def what_leaves(experiment: Experiment, policy: Policy, *, secure: bool = False) -> list[str]:
    """What leaves the site in a run of an experiment, and what never does, in sentences for its owner."""
    experiment = over_sites(experiment)
    shown, few = rows_shown(experiment), policy.min_clients
    others = "the server can read it only in a total over sites" if secure else "the server reads it"
    found = [
        f"In each of {experiment.rounds} rounds the site sends one sum for all its clients that take part: how "
        f"{experiment.method.title} changes the model. It is over at least {few} clients, and {others}.",
        f"With it go sums over at least {few} clients: training loss, scores and numbers of samples.",
        "The server gets the names of columns, the number of clients and samples, and "
        + ("client names as they are." if policy.client_names == "plain" else "client names as codes that only this "
           "site can read."),
    ]  # fmt: skip
    if experiment.preparation is not None:
        found.append("Of each column of numbers the site sends the count, the sum and the sum of squares, of each "
                     "column of text how often each value that the experiment names occurs.")  # fmt: skip
    found += [f"Of each client the server reads {_IN_WORDS.get(row, row)}." for row in shown]
    if shown and (lacking := [row for row in shown if row not in policy.rows]):
        found.append(f"The policy does not let out {', '.join(lacking)}: as it is, the site takes no part.")
    if own := python_names(experiment.model_dump(mode="json", exclude={"data"})):
        found.append(f"Code of {', '.join(own)} runs at the site. Read it before you approve.")
    most = policy.max_exchanges * Approved(experiment, "").most_calls
    found.append(f"The site answers at most {most:,} calls of the experiment; then it has to be approved again.")
    never = "rows of the data, values of text, " + ("" if "scores" in shown else "scores of single clients, ")
    found.append(f"Never sent are {never}and anything for an experiment that is not approved.")
    return found
