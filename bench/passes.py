"""A step of four clients' networks in float32, in bfloat16 and with checkpointed activations, on one core.

    python bench/passes.py

bfloat16 runs here also on processors that have no instructions for it, where the library refuses it.
"""

import statistics
import time

import torch
from torch import nn

from ppfl.core.backends import Autograd, Batch, Passes, passes
from ppfl.core.population import Population

CLIENTS, BATCH, WIDTH, CLASSES, STEPS = 4, 32, 512, 10, 5
WAYS = {
    "float32": Passes(),
    "bfloat16": Passes(precision="bfloat16"),
    "checkpoint_activations": Passes(checkpoint_activations=True),
}


def _block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    has_it = passes._computes_bfloat16(torch.device("cpu"))
    passes._computes_bfloat16 = lambda device: True
    population = Population(nn.Sequential(_block(), _block(), _block(), nn.Linear(WIDTH, CLASSES)), k=1)
    x, y = torch.randn(CLIENTS, BATCH, WIDTH), torch.randint(CLASSES, (CLIENTS, BATCH))
    share, real = torch.full((CLIENTS, BATCH), 1 / BATCH), torch.full((CLIENTS,), float(BATCH))
    batch = Batch(x, y, share, real, torch.arange(CLIENTS * BATCH).view(CLIENTS, BATCH), None)
    networks = {name: torch.stack([p] * CLIENTS) for name, p in population.initial_network().items()}
    velocity = {name: torch.zeros_like(leaf) for name, leaf in networks.items()}
    backends = {name: Autograd(population, x[0], y[0], CLASSES, way) for name, way in WAYS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    with torch.no_grad():
        for _ in range(STEPS + 1):
            for name, backend in backends.items():
                start = time.process_time()
                backend.add_gradients(networks, velocity, 0.0, batch)
                seconds[name].append(time.process_time() - start)
    print(f"The processor {'has' if has_it else 'has no'} instructions for bfloat16.\n")
    print("| passes | ms of CPU per step | times float32 |\n|---|---|---|")
    medians = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    for name, median in medians.items():
        print(f"| {name} | {1e3 * median:.0f} | {median / medians['float32']:.1f} |")


if __name__ == "__main__":
    main()
