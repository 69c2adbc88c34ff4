"""How much each idea behind the stacked engine saves on this machine: the same work in two ways, in turns.

.venv/bin/python bench/why.py
"""

import copy
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from methods import SEED, rounds_in_process, settings_of
from tables import table
from torch import nn
from workloads import Workload, linear, perceptron

from ppfl import FedAvg, Population
from ppfl.core import loss_by_name
from ppfl.core.trees import Tree
from ppfl.data import SampleSpec
from ppfl.networks.images import cnn
from ppfl.server import InProcess, begin, evaluate, make_problem, train
from ppfl.server.evaluation import Measured
from ppfl.sites import Site, Stacked

TURNS = 15
CLIENTS, BATCH, WIDE, HIDDEN, CLASSES = 25, 128, 784, 128, 10


class Pair(NamedTuple):
    idea: str
    plain: Callable[[], object]
    ours: Callable[[], object]


def main() -> None:
    rows, cores = [], torch.get_num_threads()
    for count, ideas in ((1, ON_ONE_CORE), (cores, ON_ALL_CORES)):
        torch.set_num_threads(count)
        for pair in (idea() for idea in ideas):
            before, after = seconds(pair)
            rows.append((pair.idea, f"{1e3 * before:.2f}", f"{1e3 * after:.2f}", f"{before / after:.1f}"))
    print(table(("idea", "plain ms", "ours ms", "times"), rows))


def seconds(pair: Pair) -> tuple[float, float]:
    """Medians; the two have turns one after the other."""
    found: tuple[list[float], list[float]] = ([], [])
    for _ in range(TURNS):
        for into, work in zip(found, (pair.plain, pair.ours), strict=True):
            clock = time.perf_counter()
            work()
            into.append(time.perf_counter() - clock)
    return statistics.median(found[0]), statistics.median(found[1])


def gathers() -> Pair:
    x, rows = torch.randn(56_000, WIDE), torch.randperm(56_000)[: CLIENTS * BATCH * 4]
    buffer = torch.empty(len(rows), WIDE)
    return Pair(
        "gather into memory that is used again",
        lambda: x[rows],
        lambda: torch.index_select(x, 0, rows, out=buffer),
    )


def softmaxes() -> Pair:
    rows, columns = torch.randn(CLIENTS, BATCH, CLASSES), torch.randn(CLIENTS, CLASSES, BATCH)
    return Pair("softmax with one column per sample", lambda: rows.log_softmax(2), lambda: columns.log_softmax(1))


def thin_products() -> Pair:
    x, weight, bias = torch.randn(CLIENTS, BATCH, 150), torch.randn(CLIENTS, 2, 150), torch.randn(CLIENTS, 2)
    return Pair(
        "outputs of a linear model, one column per sample",
        lambda: torch.baddbmm(bias[:, None], x, weight.transpose(1, 2)),
        lambda: torch.baddbmm(bias[:, :, None], weight, x.transpose(1, 2)),
    )


def velocities() -> Pair:
    x, slope = torch.randn(CLIENTS, BATCH, WIDE), torch.randn(CLIENTS, HIDDEN, BATCH)
    velocity = torch.zeros(CLIENTS, HIDDEN, WIDE)
    return Pair(
        "gradient added to the velocity in one operation",
        lambda: velocity.mul_(0.9).add_(torch.bmm(slope, x)),
        lambda: torch.baddbmm(velocity, slope, x, beta=0.9, out=velocity),
    )


def shuffles() -> Pair:
    draws = torch.randint(-(2**62), 2**62, (300, 500))
    return Pair("shuffle by one sort of numbers", lambda: draws.argsort(1), lambda: np.sort(draws.numpy(), axis=1))


def images() -> Pair:
    net = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4096, 10))
    x, y = torch.randn(50, 3, 32, 32), torch.randint(10, (50,))
    last = x.contiguous(memory_format=torch.channels_last)
    return Pair(
        "images with the channels last",
        lambda: F.cross_entropy(net(x), y).backward(),
        lambda: F.cross_entropy(net(last), y).backward(),
    )


def filters() -> Pair:
    """Images of one channel look the same in both layouts, so that the filters decide."""
    names = tuple(map(str, range(62)))
    spec = SampleSpec(shape=(1, 28, 28), dtype=torch.float32, target_dtype=torch.int64, classes=names)
    net = cnn(spec, loss_by_name("cross_entropy"), channels=(16, 32), hidden=(128,))
    last = copy.deepcopy(net).to(memory_format=torch.channels_last)
    x, y = torch.randn(32, 1, 28, 28), torch.randint(62, (32,))
    return Pair(
        "filters with the channels last, one channel",
        lambda: F.cross_entropy(net(x), y).backward(),
        lambda: F.cross_entropy(last(x), y).backward(),
    )


def threads() -> Pair:
    """A round of FedAvg on the perceptron: all cores on one chunk after the other, or one chunk on each core."""
    workload = perceptron()
    method = FedAvg(**settings_of(workload))
    one, many = (rounds_in_process(method, workload, Stacked(25, threads=n)) for n in (1, torch.get_num_threads()))
    next(one), next(many)
    return Pair("(perceptron) a round with one chunk per core", lambda: next(one), lambda: next(many))


def evaluations(build: Callable[[], Workload]) -> Pair:
    """What ppfl does not do: evaluate a round in a thread of its own while the next round runs."""
    workload = build()
    federation, population = workload.federation.holdout(0.2), Population(workload.net, k=1)
    method = FedAvg(**settings_of(workload))
    transport = InProcess(Site(federation, population, Stacked()))
    problem = make_problem(population, transport, rounds=10**6, seed=SEED)
    rounds = train(method, problem, transport, begin(method, problem, transport))
    next(rounds)
    beside = ThreadPoolExecutor(1, initializer=lambda: (torch.set_num_threads(1), torch.get_num_threads()))
    cores = torch.get_num_threads()
    beside.submit(int).result()
    torch.set_num_threads(cores)

    def score(server: Tree) -> Measured:
        return evaluate(method, problem, transport, server)

    def after() -> None:
        for _ in range(3):
            score(next(rounds)[0].server)

    def at_once() -> None:
        for running in [beside.submit(score, next(rounds)[0].server) for _ in range(3)]:
            running.result()

    return Pair(f"({build.__name__}) evaluation during the next round", after, at_once)


ON_ONE_CORE = (gathers, softmaxes, thin_products, velocities, shuffles, images, filters)
ON_ALL_CORES = (threads, partial(evaluations, perceptron), partial(evaluations, linear))

if __name__ == "__main__":
    main()
