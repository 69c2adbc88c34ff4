"""lr = "auto": a step size that nobody has to tune, found on training loss before the run.

The best step differs by a factor of 100 between problems (10 for a logistic population, 0.1 for a perceptron), far
more than their smoothness does, so it is tried rather than computed: a few rounds from the start for each lr, from
0.1 in half decades in the direction that improves, until it no longer does.
"""

from __future__ import annotations

import math
from collections import deque
from typing import TypeVar

from ..algorithms.contract import Algorithm, Problem
from ..algorithms.descent import LocalTraining
from ..data import Federation
from .chunks import Engine
from .evaluate import objective_value
from .train import begin, train

TRIAL_ROUNDS = 4  # the first of them may be a survey
FIRST = 0.1
RANGE = -8, 8  # half decades from FIRST: 1e-5 to 1e3

Method = TypeVar("Method", bound=Algorithm)


def with_chosen_lr(algorithm: Method, problem: Problem, federation: Federation, engine: Engine) -> Method:
    """The algorithm as it is, or with the lr that trains fastest where it says "auto"."""
    if not isinstance(algorithm, LocalTraining) or algorithm.lr != "auto":
        return algorithm
    short = problem._replace(rounds=TRIAL_ROUNDS)
    losses: dict[int, float] = {}

    def loss_at(exponent: int) -> float:
        if exponent not in losses:
            losses[exponent] = _loss_after_trial(algorithm.trial(_lr(exponent)), short, federation, engine)
        return losses[exponent]

    best = 0
    for direction in (1, -1):
        while RANGE[0] <= best + direction <= RANGE[1] and loss_at(best + direction) < loss_at(best):
            best += direction
        if best != 0:
            break
    return algorithm.model_copy(update={"lr": _lr(best)})


def _lr(exponent: int) -> float:
    return float(f"{FIRST * 10 ** (exponent / 2):.3g}")


def _loss_after_trial(method: Algorithm, problem: Problem, federation: Federation, engine: Engine) -> float:
    [(state, _)] = deque(train(method, problem, federation, engine, begin(method, problem)), maxlen=1)
    loss = objective_value(problem, method.personal(state.server, state.clients), federation, penalty=0.0)
    return loss if math.isfinite(loss) else math.inf
