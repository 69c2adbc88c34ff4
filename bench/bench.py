"""Seconds a round against a plain PyTorch loop and against the measured matmul limit, all taken in one run.

    make bench

The plain loop is written honestly: tensors in memory, no DataLoader, one optimizer a client. Timings are the
median of a few rounds after one that warms up, methods by turns, so that a noisy machine disturbs all alike.
"""

import copy
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from ppfl import PPFL, FedAvg, Federation, Population
from ppfl.engines import Stacked, begin, pose, train

BATCH, LR = 128, 0.1
ROUNDS = 5


def federation_of(sizes: list[int], dim: int, classes: int) -> Federation:
    """Random data: the arithmetic of a round does not depend on what the numbers are."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(sizes), dim, generator=generator)
    y = torch.randint(classes, (sum(sizes),), generator=generator)
    clients = [f"c{i:04d}" for i, size in enumerate(sizes) for _ in range(size)]
    return Federation.from_arrays(x, y, clients, test_fraction=0)


def plain_fedavg(net: nn.Module, federation: Federation) -> Callable[[], None]:
    """One round of FedAvg as one would write it by hand."""
    model = copy.deepcopy(net)
    data = [federation.train.client(i) for i in range(federation.n_clients)]

    def one_round() -> None:
        total = [torch.zeros_like(p) for p in model.parameters()]
        for p_i, own in zip(federation.weights, data, strict=True):
            mine = copy.deepcopy(model)
            optimizer = torch.optim.SGD(mine.parameters(), lr=LR, momentum=0.9)
            for index in torch.randperm(len(own)).split(BATCH):
                optimizer.zero_grad()
                nn.functional.cross_entropy(mine(own.x[index]), own.y[index]).backward()
                optimizer.step()
            with torch.no_grad():
                for into, p in zip(total, mine.parameters(), strict=True):
                    into.add_(p, alpha=float(p_i))
        with torch.no_grad():
            for into, p in zip(model.parameters(), total, strict=True):
                into.copy_(p)

    return one_round


def ours(method: FedAvg | PPFL, net: nn.Module, k: int, mix: str, federation: Federation) -> Callable[[], None]:
    problem = pose(Population(net, k=k, mix=mix), federation, None, rounds=10**6, seed=0)
    rounds = train(method, problem, federation, Stacked(), begin(method, problem))
    return lambda: next(rounds) and None


def matmul_limit(seconds: float = 1.0) -> float:
    """Float32 multiply-adds a second that this machine reaches now, in flop/s."""
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    best, until = 0.0, time.perf_counter() + seconds
    while time.perf_counter() < until:
        clock = time.perf_counter()
        a @ b
        best = max(best, 2 * 1024**3 / (time.perf_counter() - clock))
    return best


def flops_of_a_round(net: nn.Module, federation: Federation) -> float:
    """Forward, weight gradients, and input gradients for all but the first layer."""
    layers = [m for m in net.modules() if isinstance(m, nn.Linear)]
    a_sample = sum(2 * m.weight.numel() * (2 if i == 0 else 3) for i, m in enumerate(layers))
    return float(a_sample * len(federation.train))


def compare(name: str, net: nn.Module, federation: Federation, k: int) -> dict[str, object]:
    settings = {"lr": LR, "batch_size": BATCH, "schedule": "constant"}
    runners = {
        "plain FedAvg loop": plain_fedavg(net, federation),
        "ppfl FedAvg": ours(FedAvg(**settings), net, 1, "outputs", federation),
        f"ppfl PPFL weights K={k}": ours(PPFL(**settings, start="uniform"), net, k, "weights", federation),
        f"ppfl PPFL outputs K={k}": ours(PPFL(**settings, start="uniform"), net, k, "outputs", federation),
    }
    times: dict[str, list[float]] = {runner: [] for runner in runners}
    for round in range(ROUNDS + 1):
        for runner, one_round in runners.items():
            clock = time.perf_counter()
            one_round()
            if round > 0:
                times[runner].append(time.perf_counter() - clock)
    seconds = {runner: statistics.median(values) for runner, values in times.items()}
    plain, limit = seconds["plain FedAvg loop"], flops_of_a_round(net, federation) / matmul_limit()
    print(f"\n{name}: matmul limit of a FedAvg round {limit:.3f} s")
    for runner, value in seconds.items():
        print(f"  {runner:<26} {value:8.3f} s a round   {plain / value:6.1f} x the plain loop   {limit / value:6.1%}")
    return {"workload": name, "seconds": seconds, "limit_seconds": limit}


def main() -> None:
    sizes = torch.distributions.LogNormal(4.0, 2.0)
    torch.manual_seed(0)
    unequal = [int(min(50 + float(sizes.sample()), 1000)) for _ in range(300)]
    mlp = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
    results = [
        compare("MNIST-sized perceptron, 100 clients", mlp, federation_of([560] * 100, 784, 10), k=4),
        compare(
            "Synthetic-sized linear model, 300 unequal clients", nn.Linear(150, 2), federation_of(unequal, 150, 2), 3
        ),
    ]
    path = Path(__file__).with_name("results.json")
    machine = {"threads": torch.get_num_threads(), "torch": torch.__version__, "processor": platform.machine()}
    path.write_text(json.dumps({"machine": machine, "workloads": results}, indent=2) + "\n")
    print(f"\nwritten to {path}")


if __name__ == "__main__":
    main()
