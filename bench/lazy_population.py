"""A synthetic population of any size, whose samples are drawn when a client takes part: an example of a lazy source.

In an experiment file beside it: name = "lazy_population:lazy_population".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from scipy.special import gammaincinv
from torch import Tensor

from ppfl.core.draws import hashed, uniform
from ppfl.core.ids import NumberedIds
from ppfl.data.federation import Federation
from ppfl.data.lazy import LazySamples
from ppfl.errors import DataError

_NUMBERS_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class MixedClassifiers:
    """Clients whose labels follow a mixture of k linear classifiers: P(y | x) = softmax(x . sum_k c_ik theta_k).

    c_i ~ Dirichlet(alpha); x ~ U(-1, 1)^dim; theta_k is normal with standard deviation `scale`, one row per class. All
    draws are hashes of (seed, number of the client), so that a client is the same whenever it comes.

    >>> source = MixedClassifiers(seed=0, dim=3, k=2, classes=2, alpha=0.3, scale=2.0)
    >>> one, _ = source.draw(torch.tensor([7]), "train", 4)
    >>> many, _ = source.draw(torch.tensor([2, 7]), "train", 4)
    >>> torch.equal(one[0], many[1])
    True
    """

    seed: int
    dim: int
    k: int
    classes: int
    alpha: float
    scale: float

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.dim,)

    @cached_property
    def models(self) -> Tensor:
        """theta (k, classes, dim), float64."""
        rng = np.random.default_rng(self.seed)
        return torch.from_numpy(self.scale * rng.standard_normal((self.k, self.classes, self.dim)))

    def memberships(self, clients: Tensor) -> Tensor:
        """(C, k) of the clients with these numbers, float64: gamma variates, each from one draw, over their sum."""
        draws = uniform(self.seed, "lazy membership", clients[:, None], torch.arange(self.k)) + 2.0**-54
        gamma = torch.from_numpy(gammaincinv(self.alpha, draws.numpy())).clamp_min(1e-300)
        return gamma / gamma.sum(1, keepdim=True)

    def draw(self, clients: Tensor, split: str, count: int) -> tuple[Tensor, Tensor]:
        x = torch.empty(len(clients), count, self.dim)
        y = torch.empty(len(clients), count, dtype=torch.int64)
        for at in torch.split(torch.arange(len(clients)), max(1, _NUMBERS_AT_ONCE // (count * self.dim))):
            x[at], y[at] = self._draw(clients[at], split, count)
        return x, y

    def _draw(self, clients: Tensor, split: str, count: int) -> tuple[Tensor, Tensor]:
        keys = hashed(self.seed, "lazy samples", split, clients[:, None, None])
        bits = hashed("x", torch.arange(count * self.dim).reshape(count, self.dim), after=keys)
        x = bits.bitwise_right_shift_(40).bitwise_and_(2**24 - 1).float().mul_(2.0**-23).sub_(1)  # [-1, 1)
        # float64: a score that depends on how many clients are drawn together would change labels
        by_model = (x.double().reshape(-1, self.dim) @ self.models.flatten(0, 1).T).reshape(*x.shape[:2], self.k, -1)
        scores = torch.einsum("ck,cnkl->cnl", self.memberships(clients), by_model)
        low_53 = hashed("y", torch.arange(count * self.classes).reshape(count, self.classes), after=keys) & (2**53 - 1)
        noise = -(-((low_53.double() + 0.5) * 2.0**-53).log()).log()  # Gumbel's: the largest sum follows the softmax
        return x, (scores + noise).argmax(2)


def lazy_population(
    n_clients: int = 1000,
    samples: int = 10,
    dim: int = 20,
    k: int = 5,
    classes: int = 2,
    alpha: float = 0.3,
    scale: float = 2.0,
    test_points: int = 5,
    seed: int = 0,
) -> Federation:
    """Clients with mixed linear classifiers (`MixedClassifiers`), drawn when they take part: any number of clients may
    be registered. `federation.select(ids).in_memory()` has the data of some of them in tensors.

    >>> few, many = lazy_population(n_clients=100), lazy_population(n_clients=10_000_000)
    >>> many.describe()
    'lazy: 10000000 clients, 100000000 train / 50000000 test samples (10-10 per client), x (20,), 2 classes'
    >>> torch.equal(few.client("c42")["train"].x, many.client("c0000042")["train"].x)
    True
    """
    counts = {"n_clients": n_clients, "samples": samples, "dim": dim, "k": k, "classes - 1": classes - 1}
    for name, count in counts.items():
        if count < 1:
            raise DataError(f"{name} is {count}; a population needs at least 1")
    if alpha <= 0 or scale < 0 or test_points < 0:
        raise DataError(
            f"alpha {alpha}, scale {scale}, test_points {test_points}; expected alpha > 0, scale >= 0, test_points >= 0"
        )
    source = MixedClassifiers(seed, dim, k, classes, alpha, scale)
    test = LazySamples(source, "test", n_clients, test_points) if test_points else None
    names = tuple(map(str, range(classes)))
    train = LazySamples(source, "train", n_clients, samples)
    return Federation(NumberedIds(n_clients), train, test, name="lazy", classes=names)
