"""What is measured: a method's round as a function to call, and the arithmetic it cannot do without."""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from plain import PPFL_LOOPS, Descent, FedAvgLoop
from ppfl.engines import Stacked, begin, pose, train
from workloads import Workload

from ppfl import PPFL, FedAvg, Population
from ppfl.algorithms.contract import Algorithm

LR, MEMBERSHIP_LR, SEED = 0.05, 0.5, 0
NEVER = 1e-12  # probability of a theta round, where Algorithm 1 is to draw membership rounds alone
SIDE = 1024  # of the matrices that show what the machine can do


class Cost(NamedTuple):
    """What a round of ppfl reports of itself."""

    up: float  # bytes a client
    down: float
    loss: float


Round = Callable[[], Cost | None]


class Passes(NamedTuple):
    """How many models run over all the data in a round: a percent of the matmul limit is of these."""

    forward: int = 0
    both: int = 0  # forward and backward


def settings_of(workload: Workload) -> dict[str, Any]:
    asked = {"batch_size": workload.batch_size, "participation": workload.participation}
    return {"lr": LR, "schedule": "constant", **asked}


def fedavg(workload: Workload) -> Round:
    return _rounds(FedAvg(**settings_of(workload)), workload, k=1, mix="outputs")


def ppfl(workload: Workload, k: int, mix: str, theta: bool, steps: int, start: str = "uniform") -> Round:
    """Rounds of both blocks, of theta alone (steps = 0) or of memberships alone (theta = False).

    Memberships alone are Algorithm 1, which draws the block of a round, with the draw all but decided.
    """
    blocks = {"order": "alternating"} if theta else {"order": "random", "block_probability": NEVER}
    memberships = {"membership_steps": steps, "membership_lr": MEMBERSHIP_LR, "penalty": workload.penalty}
    method = PPFL(**settings_of(workload), **blocks, **memberships, start=start, warmup=0)
    return _rounds(method, workload, k, mix)


def plain_fedavg(workload: Workload) -> Round:
    descent = Descent(LR, batch_size=workload.batch_size)
    return FedAvgLoop(workload.net, workload.federation, descent, workload.participation)


def plain_ppfl(workload: Workload, k: int, mix: str, steps: int) -> Round:
    start = Population(workload.net, k=k).initial(SEED, distinct=True).canonical
    descent = Descent(LR, batch_size=workload.batch_size)
    return PPFL_LOOPS[mix](workload.net, workload.federation, descent, start, steps, MEMBERSHIP_LR)


def _rounds(method: Algorithm, workload: Workload, k: int, mix: str) -> Round:
    population = Population(workload.net, k=k, mix=mix, loss=workload.loss)
    problem = pose(population, workload.federation, workload.affinity, rounds=10**6, seed=SEED)
    running = train(method, problem, workload.federation, Stacked(), begin(method, problem))

    def one_round() -> Cost:
        _, report = next(running)
        return Cost(report.bytes_up / report.participants, report.bytes_down / report.participants, report.loss)

    return one_round


ROUNDS: dict[str, Callable[..., Round]] = {
    method.__name__: method for method in (fedavg, ppfl, plain_fedavg, plain_ppfl)
}


def passes(k: int = 1, mix: str = "outputs", theta: bool = True, steps: int = 0, start: str = "") -> Passes:
    """Mixed weights train one model whatever K is; memberships need its gradient, or one run of the K models."""
    weights = mix == "weights"
    trained = theta * (1 if weights else k) + (steps if weights else 0)
    return Passes(forward=k if steps and not weights else 0, both=trained)


def products(seconds: float = 0.3) -> float:
    """Flop/s in float32 of the fastest of some large matrix products, all threads at work."""
    a, b, into = (torch.randn(SIDE, SIDE) for _ in range(3))
    fastest, until = 0.0, time.perf_counter() + seconds
    while (clock := time.perf_counter()) < until:
        torch.mm(a, b, out=into)
        fastest = max(fastest, 2 * SIDE**3 / (time.perf_counter() - clock))
    return fastest
