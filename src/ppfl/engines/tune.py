"""lr = "auto": a step size that nobody has to tune, found on training loss before the run.

Good steps differ by powers of ten between problems, so they are tried rather than guessed: a few rounds from the
start for each lr, from 0.1 in half decades in the direction that improves, until it no longer does. A step whose loss
rises on the way is refused: it is at the edge of stability, and early luck there does not last.
"""

from __future__ import annotations

import math
from typing import TypeVar

from ..algorithms.contract import Algorithm, Problem
from ..algorithms.descent import LocalTraining
from ..algorithms.finetune import FineTune
from ..data import Federation
from .chunks import Engine
from .evaluate import objective_value
from .ranks import Ranks
from .train import State, begin, train

TRIAL_ROUNDS = 6  # the first of them may be a survey
FIRST = 0.1
RANGE = -8, 8  # half decades from FIRST: 1e-5 to 1e3
RISE = 1.02  # a trial whose loss rises in any round is too bold, however low it was before

Method = TypeVar("Method", bound=Algorithm)


def with_chosen_lr(algorithm: Method, problem: Problem, federation: Federation, engine: Engine) -> Method:
    """The algorithm as it is, or with the lr that trains fastest where it says "auto"."""
    if isinstance(algorithm, FineTune):
        inner = with_chosen_lr(algorithm.method, problem, federation, engine)
        return algorithm.model_copy(update={"method": inner})
    if not isinstance(algorithm, LocalTraining) or algorithm.lr != "auto":
        return algorithm
    short = problem._replace(rounds=TRIAL_ROUNDS)
    losses: dict[int, float] = {}

    def loss_at(exponent: int) -> float:
        if exponent not in losses:
            losses[exponent] = _loss_after_trial(algorithm.trial(_lr(exponent)), short, federation, engine)
        return losses[exponent]

    best = 0
    while loss_at(best) == math.inf and best > RANGE[0]:
        best -= 1
    for direction in (1, -1):
        while RANGE[0] <= best + direction <= RANGE[1] and loss_at(best + direction) < loss_at(best):
            best += direction
    return algorithm.model_copy(update={"lr": _lr(best)})


def _lr(exponent: int) -> float:
    return float(f"{FIRST * 10 ** (exponent / 2):.3g}")


def _loss_after_trial(method: Algorithm, problem: Problem, federation: Federation, engine: Engine) -> float:
    start = begin(method, problem)
    now = _training_loss(method, problem, federation, start, engine.ranks)
    for state, _ in train(method, problem, federation, engine, start):
        before, now = now, _training_loss(method, problem, federation, state, engine.ranks)
        if not now <= RISE * before:  # nor where it is nan
            return math.inf
    return now


def _training_loss(method: Algorithm, problem: Problem, federation: Federation, state: State, ranks: Ranks) -> float:
    return objective_value(problem, method.personal(state.server, state.clients), federation, 0.0, ranks)
