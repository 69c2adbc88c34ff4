"""Clients that were never seen in training: what a run's models are worth to them, before and after they adapt.

A newcomer finds its place in the exchanges of the method's `newcomer_plans`, with what the trained server sends and its
own training samples. What it would upload is thrown away: no model changes.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..algorithms.contract import Method, Problem, Rows
from ..core.draws import name_keys, uniform
from ..core.trees import Tree
from ..data import Federation
from ..data.arrays import quoted
from ..data.sample_spec import SampleSpec
from ..errors import DataError, SettingError
from ..sites import Describe, Evaluate, Restore, SavedStates
from ..sites.messages import join_rows, number
from .evaluation import Evaluation, read_evaluation
from .loop import MAIN, RefusedUpdateWarning, ServerState, ask_clients, client_states, make_request, setup_sites
from .transports import Transport


class NewcomerScores(NamedTuple):
    """Scores of newcomers on their own test data."""

    before: Evaluation  # with the models they are sent
    after: Evaluation  # after a few rounds of their own


def part_newcomers(federation: Federation, fraction: float, seed: int) -> tuple[Federation, Federation | None]:
    """Clients to train with, and newcomers, drawn by their ids."""
    if fraction == 0:
        return federation, None
    new = (uniform(seed, "newcomers", name_keys(federation.ids)) < fraction).tolist()
    known, unknown = (
        [c for c, is_new in zip(federation.ids, new, strict=True) if is_new == one] for one in (False, True)
    )
    if not known or not unknown:
        raise SettingError(
            f"newcomers = {fraction} leaves {len(known)} clients to train with and {len(unknown)} newcomers "
            f"of {federation.n_clients}; choose a fraction that leaves some of both"
        )
    return federation.select(known), federation.select(unknown)


def score_newcomers(method: Method, problem: Problem, server: Tree, newcomers: Transport) -> NewcomerScores:
    """Score the clients of `newcomers` with a trained server state, before and after they find their place."""
    ids = tuple(newcomers.roster.ids)

    def score() -> Evaluation:
        shared, own = method.send(problem, server, ids, None)
        (reply,) = newcomers.ask([Evaluate(MAIN, ("test",), shared, own)])
        return read_evaluation(reply, ("test",), newcomers, problem.population.loss).splits["test"]

    method = _setup_newcomers(method, problem, newcomers)
    before = score()
    _find_places(method, problem, server, newcomers)
    return NewcomerScores(before, score())


def adapt_clients(
    method: Method, problem: Problem, server: Tree, clients: Transport, states: SavedStates | None = None
) -> Rows:
    """The states of clients after they have found their place with the models as they are; no model changes.

    They start as newcomers, or from `states`.
    """
    method = _setup_newcomers(method, problem, clients)
    if states is not None:
        clients.ask([Restore(MAIN, 0, states)])
    exchanges = _find_places(method, problem, server, clients)
    return client_states(clients, ServerState(0, exchanges, server)).rows


def refuse_other_data(spec: SampleSpec, federation: Federation) -> None:
    """Samples and classes must be those that the models were trained on."""
    found = SampleSpec.of(federation)
    if found.preparation != spec.preparation:
        advice = "leave prepared out" if spec.preparation is None else "use prepared=fitted.spec.preparation"
        raise DataError(
            f"{federation.name} is not prepared as the training data were, with the same means and levels; in "
            f"DataTable.federation {advice}"
        )
    if found.features and spec.features and found.features != spec.features:
        raise DataError(
            f"{federation.name} has the columns {quoted(found.features)}; the models were trained on "
            f"{quoted(spec.features)}: give the same in this order"
        )
    if found.shape != spec.shape or found.dtype != spec.dtype:
        raise DataError(
            f"{federation.name} has samples of shape {found.shape}, {found.dtype}; the models were trained on "
            f"{spec.shape}, {spec.dtype}: prepare the data as before"
        )
    if (found.classes is None) != (spec.classes is None) or (
        found.classes and spec.classes and found.classes != spec.classes[: len(found.classes)]
    ):
        raise DataError(
            f"{federation.name} has {_described(found.classes)}; the models were trained on "
            f"{_described(spec.classes)}: pass the same classes=... to Federation.from_arrays"
        )


def _described(classes: Sequence[str] | None) -> str:
    if classes is None:
        return "real targets"
    shown = ", ".join(map(repr, classes[:5]))
    return f"the classes {shown}" + (f" and {len(classes) - 5} more" if len(classes) > 5 else "")


def replace_rows(before: Rows, clients: Sequence[str], after: Rows) -> Rows:
    """Rows with those of these clients replaced by others; all rows name their clients."""
    replaced = set(clients)
    stay = [at for at, client in enumerate(before.ids or ()) if client not in replaced]
    if not stay:
        return after
    ids = tuple((before.ids or ())[at] for at in stay)
    rows = Rows(ids, {name: leaf[torch.tensor(stay, device=leaf.device)] for name, leaf in before.values.items()})
    return join_rows([rows, after])


def _setup_newcomers(method: Method, problem: Problem, clients: Transport) -> Method:
    """Sites that are ready for these clients, and the method with all of them in every exchange."""
    method = method.with_local(participation=1.0)
    (described,) = clients.ask([Describe()])
    setup_sites(method, problem._replace(importance=number(described, "importance")), clients)
    return method


def _find_places(method: Method, problem: Problem, server: Tree, clients: Transport) -> int:
    """The exchanges in which clients find their place, and how many there were."""
    ids, plans = tuple(clients.roster.ids), method.newcomer_plans(problem, server)
    for exchange, plan in enumerate(plans, start=1):
        round = max(1, problem.rounds - len(plans) + exchange - 1)
        reply = ask_clients(clients, make_request(method, problem, server, plan._replace(who=ids), round, exchange))
        for client, reason in reply.refused:
            said = f"client {client!r} was left as it was: {reason}; look at its data"
            warnings.warn(said, RefusedUpdateWarning, stacklevel=5)
    return len(plans)
