"""Synthetic populations with known truth."""

from typing import Any, Literal

import numpy as np
import torch

from ppfl.core.settings import Count, CountOrZero, NonNegative, Positive, Seed, Settings
from ppfl.data.federation import Federation, Truth
from ppfl.data.files import check_limit
from ppfl.data.load import DATASETS
from ppfl.data.partitions import client_names
from ppfl.data.samples import Samples
from ppfl.errors import DataError

_Floats = np.ndarray[Any, np.dtype[np.float32]]
_Ints = np.ndarray[Any, np.dtype[np.int64]]


@DATASETS.register("synthetic", base=Settings)
def synthetic_classification(
    n_clients: Count = 300,
    dim: Count = 150,
    sources: Count = 3,
    alpha: Positive = 0.4,
    noise: NonNegative = 0.1,
    test_points: CountOrZero = 5000,
    seed: Seed = 0,
    min_size: Count = 50,
    max_size: Count = 1000,
) -> Federation:
    """The Synthetic data of the paper: the points of a client come from linear sources, in its own proportions.

    theta_k ~ U(-1, 1)^dim; alpha_i ~ Dirichlet(alpha); n_i = min(min_size + lognormal(4, 2), max_size); each
    point has source k with probability alpha_ik, x ~ U(-1, 1)^dim and y = 1[x . theta_k + e > 0], where e is normal
    with standard deviation `noise`. The truth contains the alpha_i and the theta_k. The default test data need 900 MB:
    use fewer `test_points` if that is too much.

    >>> f = synthetic_classification(n_clients=4, dim=6, test_points=10)
    >>> f.n_classes, f.truth.memberships.shape, f.truth.sources.shape
    (2, torch.Size([4, 3]), torch.Size([3, 6]))
    """
    _check(n_clients, dim, sources, min_size + test_points)
    if noise < 0 or alpha <= 0 or max_size < min_size:
        raise DataError(
            f"noise {noise}, alpha {alpha}, sizes {min_size}..{max_size}; expected noise >= 0, alpha > 0, min <= max"
        )
    # one random stream per part, so that the number of test points does not change the training data
    source_rng, client_rng, train_rng, test_rng = np.random.default_rng(seed).spawn(4)
    theta = _uniform(source_rng, sources, dim)
    mixtures = client_rng.dirichlet(np.full(sources, alpha), n_clients)
    sizes = np.minimum(min_size + client_rng.lognormal(4, 2, n_clients), max_size).astype(np.int64)
    _check(n_clients, dim, sources, int(sizes.mean()) + test_points)

    def draw(rng: np.random.Generator, sizes: _Ints) -> Samples:
        source = _categorical(rng, np.repeat(mixtures, sizes, axis=0))
        x = _uniform(rng, len(source), dim)
        score = (x @ theta.T)[np.arange(len(source)), source]
        y = score + noise * rng.standard_normal(len(source), dtype=np.float32) > 0
        return _samples(x, y.astype(np.int64), sizes)

    truth = Truth(torch.from_numpy(mixtures).float(), "source", torch.from_numpy(theta), noise)
    train = draw(train_rng, sizes)
    test = draw(test_rng, np.full(n_clients, test_points)) if test_points else None
    return Federation(client_names(n_clients), train, test, truth=truth, name="synthetic", classes=("0", "1"))


@DATASETS.register("synthetic_groups", base=Settings)
def synthetic_groups(
    n_clients: Count = 12,
    groups: Count = 3,
    dim: Count = 8,
    samples: Count = 40,
    test_points: CountOrZero = 20,
    noise: NonNegative = 0.05,
    task: Literal["classification", "regression"] = "classification",
    seed: Seed = 0,
) -> Federation:
    """Clients in groups, each group with its own linear model; the models are orthogonal and easy to tell apart.

    Client i is in group i mod groups. x is standard normal. The target is x . theta_g + normal(0, noise), or for
    classification whether that is positive.

    >>> synthetic_groups().truth.memberships.argmax(1)[:4]
    tensor([0, 1, 2, 0])
    """
    _check(n_clients, dim, groups, samples + test_points)
    if dim < groups:
        raise DataError(f"{groups} orthogonal models need {groups} dimensions, found dim={dim}; raise dim")
    rng = np.random.default_rng(seed)
    theta = np.linalg.qr(rng.standard_normal((dim, groups)))[0].T.astype(np.float32) * 2
    memberships = np.eye(groups, dtype=np.float32)[np.arange(n_clients) % groups]
    train, test = _linear(rng, memberships @ theta, noise, samples, test_points, task)
    truth = Truth(torch.from_numpy(memberships), "group", torch.from_numpy(theta), noise)
    classes = ("0", "1") if task == "classification" else None
    return Federation(client_names(n_clients), train, test, truth=truth, name=f"groups ({task})", classes=classes)


@DATASETS.register("synthetic_linear", base=Settings)
def synthetic_linear(
    n_clients: Count = 50,
    dim: Count = 5,
    k: Count = 3,
    alpha: Positive = 0.5,
    samples: Count = 40,
    test_points: CountOrZero = 20,
    noise: NonNegative = 0.1,
    seed: Seed = 0,
) -> Federation:
    """A linear Gaussian population: y = x . sum_k c_ik theta_k + normal(0, noise).

    c_i ~ Dirichlet(alpha); x and theta_k are standard normal.

    >>> f = synthetic_linear(n_clients=4, noise=0.0)
    >>> own = f.truth.memberships @ f.truth.sources
    >>> torch.allclose((f.train.x * own[f.train.client_of()]).sum(1), f.train.y, atol=1e-5)
    True
    """
    _check(n_clients, dim, k, samples + test_points)
    rng = np.random.default_rng(seed)
    theta = rng.standard_normal((k, dim), dtype=np.float32)
    memberships = rng.dirichlet(np.full(k, alpha), n_clients).astype(np.float32)
    train, test = _linear(rng, memberships @ theta, noise, samples, test_points, "regression")
    truth = Truth(torch.from_numpy(memberships), "canonical model", torch.from_numpy(theta), noise)
    return Federation(client_names(n_clients), train, test, truth=truth, name="linear")


def _linear(
    rng: np.random.Generator, own: _Floats, noise: float, samples: int, test_points: int, task: str
) -> tuple[Samples, Samples | None]:
    def draw(rng: np.random.Generator, count: int) -> Samples:
        sizes = np.full(len(own), count)
        x = rng.standard_normal((sizes.sum(), own.shape[1]), dtype=np.float32)
        y = np.einsum("nd,nd->n", x, np.repeat(own, sizes, axis=0))
        y += noise * rng.standard_normal(len(y), dtype=np.float32)
        return _samples(x, (y > 0).astype(np.int64) if task == "classification" else y, sizes)

    train_rng, test_rng = rng.spawn(2)
    return draw(train_rng, samples), draw(test_rng, test_points) if test_points else None


def _uniform(rng: np.random.Generator, n: int, dim: int) -> _Floats:
    """U(-1, 1) in single precision and in place, because the default test data are large."""
    x = np.empty((n, dim), dtype=np.float32)
    rng.random(out=x, dtype=np.float32)
    x *= 2
    x -= 1
    return x


def _categorical(rng: np.random.Generator, probabilities: np.ndarray[Any, Any]) -> _Ints:
    """One category for each row of probabilities (n, k)."""
    above = rng.random(len(probabilities))[:, None] >= probabilities.cumsum(1)[:, :-1]
    source: _Ints = above.sum(1)
    return source


def _samples(x: _Floats, y: np.ndarray[Any, Any], sizes: _Ints) -> Samples:
    offsets = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    return Samples(torch.from_numpy(x), torch.from_numpy(y), torch.from_numpy(offsets))


def _check(n_clients: int, dim: int, sources: int, points: int) -> None:
    """There is something to draw, and it fits into memory: the points, the memberships, the models."""
    if min(n_clients, dim, sources, points) < 1:
        raise DataError(
            f"n_clients is {n_clients}, with {dim} features, {sources} models and {points} points per client; expected "
            f"at least 1 of each"
        )
    numbers = n_clients * points * (dim + 1) + 2 * n_clients * sources + (n_clients + sources) * dim
    size = numbers * np.dtype(np.float32).itemsize
    what = f"{n_clients:,} clients with {points:,} points of {dim:,} features need {size:,} bytes"
    check_limit("clients", n_clients, f"there are {n_clients:,} clients")
    check_limit("bytes", size, what, "draw less, or ")
