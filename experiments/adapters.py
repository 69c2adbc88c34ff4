"""Adapters on FEMNIST: four canonical ones, one that all writers share, and one per writer, from the same network.

python experiments/adapters.py [--out results/adapters.md]        (needs PPFL_DATA with the folder femnist)

A small convolutional network is trained with FedAvg. Then low-rank adapters of its last two layers are trained, with
the same number of rounds and local steps for every method, while all its own weights stay as they are. Step sizes are
chosen on validation data, a fifth of each writer's training images, which no method trains on. Test images are looked
at once, with the chosen settings.
"""

import argparse
import os
import subprocess
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import mean, stdev

import torch
from torch import nn

from ppfl import PPFL, FedAlt, FedAvg, Federation, Fitted, Local, Population, Watch, fit, lora, with_adapters
from ppfl.algorithms import Method
from ppfl.data import read_femnist

K, SEEDS = 4, (0, 1, 2)
ADAPTERS = lora(rank=8, on=("hidden", "classifier"))
LEARNING_RATES = (0.03, 0.1, 0.3)


def make_network() -> nn.Module:
    """Two convolutions, a hidden layer and a classifier."""
    body = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.GroupNorm(4, 8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.GroupNorm(4, 16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
    )  # fmt: skip
    hidden = nn.Sequential(nn.Linear(784, 128), nn.ReLU())
    return nn.Sequential(OrderedDict(body=body, hidden=hidden, classifier=nn.Linear(128, 62)))


METHODS: dict[str, Callable[[float], Method]] = {
    "one shared adapter (FedAvg)": lambda lr: FedAvg(lr=lr),
    "one adapter per writer (Local)": lambda lr: Local(lr=lr),
    "A shared, B per writer (FedAlt)": lambda lr: FedAlt(lr=lr, personal_part="adapters.up"),
    f"{K} canonical adapters (PPFL)": lambda lr: PPFL(lr=lr),
}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, help="write the table here as well")
    parser.add_argument("--writers", type=int, default=100)
    parser.add_argument("--pretrain", type=int, default=60, help="rounds of FedAvg, a quarter of the writers in each")
    parser.add_argument("--rounds", type=int, default=12)
    asked = parser.parse_args()
    git = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, check=True).stdout.strip()
    folder = Path(os.environ["PPFL_DATA"]) / "femnist"
    federation = read_femnist(folder, clients=asked.writers).holdout(0.2, into="validation")
    blind = replace(federation, test=None)  # settings are chosen without test images
    print(federation.describe(), flush=True)

    torch.manual_seed(0)
    net, began = make_network(), time.perf_counter()
    watch = Watch(every=max(1, asked.pretrain // 4))
    pretrained = fit(
        Population(net, k=1),
        blind,
        FedAvg(lr=0.1, participation=0.25),
        rounds=asked.pretrain,
        watch=watch,
        progress=False,
    )
    net = pretrained.model(federation.ids[0])
    before = pretrained.evaluate(federation)
    print(f"pretrained: test {before.pooled:.4f}, {time.perf_counter() - began:.0f} s", flush=True)

    def trained(method: Method, seed: int) -> Fitted:
        adapted, rounds = with_adapters(net, ADAPTERS, seed), asked.rounds
        k, canonical = (K, "adapters.up") if method.name == "ppfl" else (1, "all")
        population = Population(adapted, k=k, canonical=canonical)
        return fit(population, blind, method, rounds=rounds, seed=seed, watch=Watch(every=rounds), progress=False)

    rows = [("pretrained network", "", f"{before.pooled:.2%}", f"{worst_tenth(before.per_client):.2%}", "0")]
    for label, make in METHODS.items():
        began = time.perf_counter()
        tried = {lr: trained(make(lr), seed=0) for lr in LEARNING_RATES}
        scores = {lr: found.evaluate(blind, "validation").pooled for lr, found in tried.items()}
        best = max(scores, key=scores.__getitem__)
        fits = [tried[best], *(trained(make(best), seed) for seed in SEEDS[1:])]
        tests = [found.evaluate(federation) for found in fits]
        sent = mean(found.history[-1]["bytes_up"] for found in fits) / federation.n_clients
        pooled, worst = [test.pooled for test in tests], mean(worst_tenth(test.per_client) for test in tests)
        spread = f"{mean(pooled):.2%} ± {stdev(pooled):.2%}"
        rows.append((label, f"lr {best:g}", spread, f"{worst:.2%}", f"{sent / 1000:.1f}"))
        validation = ", ".join(f"{lr:g}: {score:.4f}" for lr, score in scores.items())
        print(f"{label}: validation {validation}; {time.perf_counter() - began:.0f} s; {rows[-1]}", flush=True)
    table = as_table(rows)
    print(table)
    if asked.out is not None:
        asked.out.write_text(page(table, federation, asked, commit))


def worst_tenth(scores: torch.Tensor) -> float:
    """The mean accuracy of the tenth of the writers for whom it is lowest."""
    lowest = scores.sort().values
    return float(lowest[: max(1, len(lowest) // 10)].mean())


def as_table(rows: list[tuple[str, ...]]) -> str:
    head = ("", "chosen on validation data", "test accuracy", "worst tenth of writers", "kB sent per writer and round")
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def page(table: str, federation: Federation, asked: argparse.Namespace, commit: str) -> str:
    command = (
        f"python experiments/adapters.py --writers {asked.writers} --pretrain {asked.pretrain} --rounds {asked.rounds}"
    )
    return f"""# Low-rank adapters on FEMNIST

```sh
{command} --out results/adapters.md
```

Commit {commit}, {datetime.now(UTC):%Y-%m-%d}. {federation.describe()}.

A convolutional network (two convolutions, a hidden layer of 128, a classifier) is trained with FedAvg for
{asked.pretrain} rounds with a quarter of the writers in each. Then adapters of rank {ADAPTERS.rank} on the hidden layer
and the classifier are trained for {asked.rounds} rounds with all writers; the network's own weights stay as they are.
Settings are chosen on validation data (a fifth of each writer's training images) with seed 0, from lr
{", ".join(f"{lr:g}" for lr in LEARNING_RATES)}; all others are the defaults.
Accuracy is over all test images, mean and standard deviation over {len(SEEDS)} seeds of the adapters.

{table}
"""


if __name__ == "__main__":
    main()
