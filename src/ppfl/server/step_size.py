"""lr = "auto": a step size that needs no tuning, found on training loss before the run.

Good steps differ by powers of ten between problems, so they are tried rather than guessed: a few rounds from the
start for each lr, from 0.1 in half decades in the direction that improves, until it no longer does. A step whose loss
rises on the way is refused, however low it was before: so long a step is not stable.
"""

from __future__ import annotations

import math
import warnings
from typing import TypeVar

from ..algorithms.contract import Method, Problem
from ..core.trees import Tree
from .evaluation import evaluate
from .loop import DivergedError, RefusedUpdateWarning, begin, close, train
from .transports import Transport

TRIAL_ROUNDS = 6  # the first of them may be a survey
FIRST = 0.1
RANGE = -8, 8  # half decades from FIRST: 1e-5 to 1e3
RISE = 1.02  # by which the loss may rise in a round of a trial; more means that the step is too long
TRIAL_CLIENTS = 100_000  # about so many are evaluated at most: a mean over more would choose the same
TRIAL = "trial"  # the session of trials at the sites

AnyMethod = TypeVar("AnyMethod", bound=Method)


def choose_lr(method: AnyMethod, problem: Problem, transport: Transport, dropout: float = 0.0) -> AnyMethod:
    """The method as it is, or with the lr that trains fastest where it says "auto"."""
    if method.local.lr != "auto":
        return method
    short = problem._replace(rounds=TRIAL_ROUNDS)
    losses: dict[int, float] = {}

    def loss_at(exponent: int) -> float:
        if exponent not in losses:
            losses[exponent] = _loss_after_trial(method.local.for_trial(_lr(exponent)), short, transport, dropout)
        return losses[exponent]

    best = 0
    while loss_at(best) == math.inf and best > RANGE[0]:
        best -= 1
    for direction in (1, -1):
        while RANGE[0] <= best + direction <= RANGE[1] and loss_at(best + direction) < loss_at(best):
            best += direction
    close(transport, TRIAL)
    return method.with_local(lr=_lr(best))


def _lr(exponent: int) -> float:
    return float(f"{FIRST * 10 ** (exponent / 2):.3g}")


def _loss_after_trial(method: Method, problem: Problem, transport: Transport, dropout: float) -> float:
    state = begin(method, problem, transport, session=TRIAL, dropout=dropout)
    now = _training_loss(method, problem, transport, state.server)
    refused: set[str] = set()  # a client whose updates do not count must not decide on the step size either
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RefusedUpdateWarning)  # the run itself reports them
            for later, report in train(method, problem, transport, state, TRIAL):
                refused |= {client for client, _ in report.refusals}
                before, now = now, _training_loss(method, problem, transport, later.server, tuple(sorted(refused)))
                if not now <= RISE * before:  # nor where it is nan
                    return math.inf
    except DivergedError:
        return math.inf
    return now


def _training_loss(
    method: Method, problem: Problem, transport: Transport, server: Tree, without: tuple[str, ...] = ()
) -> float:
    """sum_i p_i f_i over clients whose loss is finite; nan where that is less than half of them."""
    found = evaluate(
        method, problem, transport, server, ("train",),
        session=TRIAL, per_client=False, without=without, share=min(1.0, TRIAL_CLIENTS / problem.n_clients),
    )  # fmt: skip
    loss = found.splits["train"].loss
    return math.nan if loss.sums["not_finite"] > loss.sums["clients"] else loss.weighted
