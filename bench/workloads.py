"""What is measured on: a network and random data of a known shape. The cost of a round does not depend on the values,
except where a start has to find groups; those data have groups."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from logistic_population import logistic_population
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from ppfl import Federation, affinity
from ppfl.core.affinity import Affinity
from ppfl.data import Samples


class Workload(NamedTuple):
    net: nn.Module
    federation: Federation
    batch_size: int | None
    loss: str = "cross_entropy"
    affinity: Affinity | None = None
    penalty: float = 0.0
    participation: float = 1.0


def perceptron(clients: int = 100, hidden: int = 128) -> Workload:
    """MNIST-sized."""
    with _seeded():
        net = nn.Sequential(nn.Linear(784, hidden), nn.ReLU(), nn.Linear(hidden, 10))
        return Workload(net, _random_federation([560] * clients, (784,), classes=10), batch_size=128)


def small_rounds(clients: int = 1000) -> Workload:
    """MNIST cut into many small clients, of which one in a hundred takes part: the cost besides matrix products."""
    with _seeded():
        net = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
        federation = _random_federation([56] * clients, (784,), classes=10)
        return Workload(net, federation, batch_size=128, participation=0.01)


def linear(clients: int = 300) -> Workload:
    """Synthetic-sized, clients of 50 to 1000 samples."""
    with _seeded():
        drawn = torch.distributions.LogNormal(4.0, 2.0).sample((clients,))
        sizes = [int(min(50 + size, 1000)) for size in drawn.tolist()]
        return Workload(nn.Linear(150, 2), _random_federation(sizes, (150,), classes=2), batch_size=128)


def convolutions(clients: int = 20) -> Workload:
    """CIFAR-sized images, 71,000 parameters."""
    with _seeded():
        net = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1), nn.MaxPool2d(2), nn.ReLU(),
            nn.Flatten(), nn.Linear(32 * 8 * 8, 32), nn.ReLU(), nn.Linear(32, 10),
        )  # fmt: skip
        return Workload(net, _random_federation([250] * clients, (3, 32, 32), classes=10), batch_size=50)


def logistic(clients: int) -> Workload:
    """Very many small clients, mixtures of five kinds; clients with similar labels are neighbours."""
    federation = logistic_population(clients, samples=10, dim=20, k=5, test_points=0)
    likeness = affinity.from_labels(federation.label_counts(), federation.ids)
    with _seeded():
        # the penalty is a sum over all pairs, so that its pull on a client grows with M^2 in its own scale
        return Workload(nn.Linear(20, 1), federation, None, "logistic", likeness, penalty=0.1 / clients**2)


WORKLOADS: dict[str, Callable[..., Workload]] = {
    workload.__name__: workload for workload in (perceptron, small_rounds, linear, convolutions, logistic)
}


class Flops(NamedTuple):
    """Of the matrix products when one model runs over the data of all clients that take part."""

    forward: float
    both: float  # forward and backward


def flops(workload: Workload) -> Flops:
    """Counted on a few samples: what PyTorch multiplies and adds, without input gradients for the first layer."""
    x = workload.federation.train.x[:8]
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        workload.net(x)
    with FlopCounterMode(display=False) as both:
        workload.net(x).sum().backward()
    workload.net.zero_grad()
    scale = workload.participation * len(workload.federation.train) / len(x)
    return Flops(forward.get_total_flops() * scale, both.get_total_flops() * scale)


def _random_federation(sizes: Sequence[int], shape: tuple[int, ...], classes: int) -> Federation:
    return _federation(torch.randn(sum(sizes), *shape), torch.randint(classes, (sum(sizes),)), sizes)


def _federation(x: Tensor, y: Tensor, sizes: Sequence[int]) -> Federation:
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    return Federation(tuple(f"c{i:07d}" for i in range(len(sizes))), Samples(x, y, offsets))


@contextmanager
def _seeded() -> Iterator[None]:
    """The same draws in every process, and torch's global generator stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        yield
