"""Many registered clients, of which few take part in a round: seconds per round, memory and disk.

    python bench/registered.py                      # all cases, in processes of their own; some minutes
    python bench/registered.py --case logistic --clients 200000 --rounds 10

Samples are drawn from a seed and the client's number when a client takes part, and client states are in a file, so that
memory follows the clients at work. What is left per registered client are a few numbers: its key, weight and position
in the file, and at the server its membership, where the method shows it.
"""

import argparse
import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import memory
from lazy_population import lazy_population
from torch import nn

from ppfl import PPFL, Ditto, Federation, Population
from ppfl.algorithms import Method
from ppfl.server import InProcess, begin, make_problem, train
from ppfl.server.loop import MAIN
from ppfl.sites import Site, Stacked

MIB = 2**20
SHOWN = (1, 10, 25, 50)  # rounds whose memory is printed
FEATURES, CLASSES = 512, 10  # of ResNet-18's last layer on ten classes


class Case(NamedTuple):
    title: str
    clients: int
    per_round: int
    federation: Callable[[int], Federation]
    population: Callable[[], Population]
    method: Callable[[float], Method]  # by the share of clients that takes part


def _logistic_data(clients: int) -> Federation:
    return lazy_population(clients, samples=10, dim=20, k=5, test_points=0)


def _features(clients: int) -> Federation:
    """Drawn in place of what a frozen ResNet-18 would give: the same width, so that heads cost the same."""
    return lazy_population(clients, samples=20, dim=FEATURES, k=4, classes=CLASSES, scale=0.3, test_points=0)


CASES = {
    "logistic": Case(
        "logistic regressions, PPFL with 5 mixed predictions",
        10_000_000,
        10_000,
        _logistic_data,
        lambda: Population(nn.Linear(20, 1), k=5, mix="predictions", loss="logistic"),
        lambda share: PPFL(lr=0.3, participation=share),
    ),
    "heads": Case(
        "heads of ResNet-18 (512 features, 10 classes), PPFL with 4 mixed weights",
        100_000,
        1_000,
        _features,
        lambda: Population(nn.Linear(FEATURES, CLASSES), k=4, mix="weights"),
        lambda share: PPFL(lr=0.05, participation=share),
    ),
    "own-heads": Case(
        "heads of ResNet-18, Ditto: every client keeps a head of its own (20 KB)",
        100_000,
        1_000,
        _features,
        lambda: Population(nn.Linear(FEATURES, CLASSES), k=1),
        lambda share: Ditto(lr=0.05, participation=share),
    ),
}


def measure(name: str, clients: int | None, rounds: int) -> None:
    """Run one case and print its table."""
    case = CASES[name]
    clients = clients or case.clients
    before, clock = memory.resident(), time.perf_counter()
    population = case.population()
    site = Site(case.federation(clients), population, Stacked(), states_on_disk=True)
    transport = InProcess(site)
    problem = make_problem(population, transport, rounds=rounds)
    method = case.method(min(1.0, case.per_round / clients))
    state = begin(method, problem, transport)
    gc.collect()
    print(f"\n## {clients:,} registered, {case.per_round:,} per round: {case.title}\n")
    print(f"Before anything is registered {before / MIB:,.0f} MiB are resident. To register all takes", end=" ")
    print(f"{time.perf_counter() - clock:.0f} s and leaves {memory.resident() / MIB:,.0f} MiB.\n")
    print("| round | seconds | training loss | resident, MiB | peak so far, MiB | client states on disk, MiB |")
    print("|---|---|---|---|---|---|", flush=True)
    seconds = []
    for _, report in train(method, problem, transport, state):
        seconds.append(report.seconds)
        if report.round in (*SHOWN, rounds):
            sizes = memory.resident(), memory.most_resident(), site.sessions[MAIN].states.bytes_on_disk
            shown = " | ".join(f"{size / MIB:,.0f}" for size in sizes)
            print(f"| {report.round} | {report.seconds:.2f} | {report.loss:.4f} | {shown} |", flush=True)
    print(f"\nSeconds per round: median {statistics.median(seconds):.2f}, slowest {max(seconds):.2f}.", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description="Many registered clients, of which few take part in a round.")
    parser.add_argument("--case", choices=CASES)
    parser.add_argument("--clients", type=int)
    parser.add_argument("--rounds", type=int, default=SHOWN[-1])
    asked = parser.parse_args()
    if asked.case:
        measure(asked.case, asked.clients, asked.rounds)
        return
    for name in CASES:  # in processes of their own, as a peak of memory is a process's
        subprocess.run([sys.executable, __file__, "--case", name, "--rounds", str(asked.rounds)], check=True)


if __name__ == "__main__":
    main()
