"""What is measured: one round of a method as a function, and the matrix products that the round cannot do without."""

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from convolution_limit import convolutions_alone
from plain import PPFL_LOOPS, Descent, FedAvgLoop, clients_of
from plain_processes import FedAvgProcesses
from steps_alone import passes_alone, steps_alone
from workloads import Workload

from ppfl import PPFL, FedAvg, Population
from ppfl.algorithms import Method
from ppfl.server import InProcess, RoundReport, ServerState, begin, make_problem, train
from ppfl.sites import Engine, Site, Stacked

LR, MEMBERSHIP_LR, SEED = 0.05, 0.5, 0
NEVER = 1e-12  # probability of a theta round, where Algorithm 1 is to draw membership rounds alone
SIDE = 1024  # rows and columns of the matrices whose product shows how fast the machine is


class Cost(NamedTuple):
    """What ppfl reports of a round."""

    up: float  # bytes per client
    down: float  # bytes per client
    loss: float


Round = Callable[[], Cost | None]


class Passes(NamedTuple):
    """How many models run over all data in a round. The percentage of the matmul limit counts these alone."""

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
    return FedAvgLoop(workload.net, clients_of(workload.federation), descent, workload.participation)


def plain_processes(workload: Workload) -> Round:
    descent = Descent(LR, batch_size=workload.batch_size)
    return FedAvgProcesses(workload.net, workload.federation, descent, workload.participation)


def plain_ppfl(workload: Workload, k: int, mix: str, steps: int) -> Round:
    start = Population(workload.net, k=k).initial_models(SEED, distinct=True)
    descent = Descent(LR, batch_size=workload.batch_size)
    return PPFL_LOOPS[mix](workload.net, workload.federation, descent, start, steps, MEMBERSHIP_LR)


def local_steps(workload: Workload, k: int = 1, mix: str = "weights", steps: int = 0) -> Round:
    return _costless(steps_alone(workload, LR, MEMBERSHIP_LR, k, mix, steps))


def memory_passes(workload: Workload) -> Round:
    return _costless(passes_alone(workload))


def _costless(work: Callable[[], object]) -> Round:
    """Work that sends nothing."""

    def one_round() -> None:
        work()

    return one_round


def rounds_in_process(
    method: Method, workload: Workload, engine: Engine, k: int = 1, mix: str = "outputs"
) -> Iterator[tuple[ServerState, RoundReport]]:
    """Rounds of a method on one site in this process, as many as are asked for."""
    population = Population(workload.net, k=k, mix=mix, loss=workload.loss)
    transport = InProcess(Site(workload.federation, population, engine))
    problem = make_problem(population, transport, workload.affinity, rounds=10**6, seed=SEED)
    return train(method, problem, transport, begin(method, problem, transport))


def _rounds(method: Method, workload: Workload, k: int, mix: str) -> Round:
    running = rounds_in_process(method, workload, Stacked(), k, mix)

    def one_round() -> Cost:
        _, report = next(running)
        return Cost(report.bytes_up / report.participants, report.bytes_down / report.participants, report.loss)

    return one_round


METHODS = (fedavg, ppfl, local_steps, memory_passes, plain_fedavg, plain_processes, plain_ppfl, convolutions_alone)
ROUNDS: dict[str, Callable[..., Round]] = {method.__name__: method for method in METHODS}


def passes(k: int = 1, mix: str = "outputs", theta: bool = True, steps: int = 0, start: str = "") -> Passes:
    """With mixed weights a client trains one model, whatever K is. Its membership needs the gradient of that model,
    or else the outputs of all K models."""
    weights = mix == "weights"
    trained = theta * (1 if weights else k) + (steps if weights else 0)
    return Passes(forward=k if steps and not weights else 0, both=trained)


def matmul_speed(seconds: float = 0.3) -> float:
    """Flop/s in float32 of the fastest of several large matrix products, with all threads."""
    a, b, into = (torch.randn(SIDE, SIDE) for _ in range(3))
    fastest, until = 0.0, time.perf_counter() + seconds
    while (clock := time.perf_counter()) < until:
        torch.mm(a, b, out=into)
        fastest = max(fastest, 2 * SIDE**3 / (time.perf_counter() - clock))
    return fastest
