"""Where memberships start. Memberships that move before the canonical models differ freeze a wrong assignment
(lock-in), so the first round asks clients which way they would pull a common model, and starts from that.

All K canonical models begin with the same values, and each client makes a short sketch of the gradient of its whole
loss there. Where clients are mixtures of K kinds, their first gradients are mixtures of the K kinds' gradients, so the
sketches lie in a simplex; its corners are looked for by k-means along the main directions of the sketches. Either the
server sees the sketches (`start_from_sketches`), or they stay with the clients and every step is a sum over
clients (`PrivateStart`).
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from ...core.draws import hashed, name_keys, uniform
from ...core.simplex import inside, nearest_mixtures
from ...core.trees import Params, first_clients
from ...io.codec import message
from .batches import LocalData

WIDTH = 256  # numbers in a sketch; distances between gradients are kept to about 10 %
TRUST = 0.9  # the rest is spread evenly: a start that no later step could leave would be lock-in again
MOST_POINTS = 20_000  # clients among whom corners are looked for, enough for K means, and rows in a block
RUNS = 20  # of k-means, of which the best one counts
RESTARTS = 64  # k-means runs side by side, where each step is a message
STEPS = 8  # of k-means: with one message before them and one after them that makes ten


def gradient_sketch(models: Params, data: LocalData) -> tuple[Tensor, Tensor]:
    """(C, s): the gradient of each client's mean loss for one canonical model, hashed to s = WIDTH numbers; and that
    loss (C,)."""
    backend = data.backend
    clients, canonical = len(data.weight), backend.population.canonical_names
    networks = data.space.copies({name: v[0] if name in canonical else v for name, v in models.items()}, clients)
    gradient = data.space.empty_like(networks)
    sketches: Tensor | None = None
    losses = torch.zeros_like(data.weight)
    for batch in data.everything(backend.samples_per_block(clients)):
        n = len(batch.x)
        G = first_clients(gradient, n)
        loss = backend.add_gradients(first_clients(networks, n), G, 0.0, batch, only=canonical)
        share = batch.real / data.sizes[:n].to(batch.real)
        rows = torch.cat([G[name].flatten(1) for name in sorted(canonical)], dim=1)
        sketch = share[:, None] * count_sketch(rows, data.seed)
        sketches = sketch.new_zeros(clients, sketch.shape[1]) if sketches is None else sketches
        sketches[:n] += sketch
        losses[:n] += share * loss
    assert sketches is not None
    return sketches, losses


def count_sketch(rows: Tensor, seed: int, width: int = WIDTH) -> Tensor:
    """(C, d) to (C, width), inner products kept on average: each column goes to a random place, with a random sign.

    >>> count_sketch(torch.ones(2, 1000), seed=0).shape
    torch.Size([2, 256])
    """
    if rows.shape[1] <= width:
        return rows
    draws = hashed(seed, "sketch", torch.arange(rows.shape[1])).to(rows.device)
    sign = ((draws & 1) * 2 - 1).to(rows)
    return rows.new_zeros(len(rows), width).index_add_(1, (draws >> 1) % width, rows * sign)


# ---------------------------------------------------------------------- sketches that the server sees


@message
class Start(NamedTuple):
    """What places a client: where its sketch is along the main directions of all, and the corners there."""

    mean: Tensor  # (s,), of the sketches, float64 as all of these
    directions: Tensor  # (s, d)
    corners: Tensor  # (K, d)

    def memberships(self, sketches: Tensor) -> Tensor:
        """(C, K) start memberships of clients with these sketches (C, s)."""
        return start_memberships((sketches.double() - self.mean) @ self.directions, self.corners).to(sketches)


def start_from_sketches(
    sketches: Tensor, weights: Tensor, ids: Sequence[str], k: int, seed: int
) -> tuple[Start, Tensor]:
    """The start that the sketches of these clients give, and their memberships (M, K), whatever their order is.

    Principal directions, weighted by p_i since a small client's gradient is noisy; k-means there for the corners,
    among at most MOST_POINTS clients drawn by (seed, id); then each client as the nearest mixture of the corners.
    """
    by_name = torch.tensor(sorted(range(len(ids)), key=ids.__getitem__))
    p = weights.cpu()[by_name].double()
    p = p / p.sum()
    mean, directions, points = principal_points(sketches, p, by_name, max(1, k - 1))
    asked = torch.arange(len(ids))
    if len(ids) > MOST_POINTS:
        draws = hashed(seed, "corners", name_keys(ids))[by_name]
        asked = draws.argsort()[:MOST_POINTS].sort().values
    corners = find_corners(points[asked], p[asked], k, seed)
    c = start_memberships(points, corners)
    in_order = torch.empty_like(c)
    in_order[by_name] = c
    return Start(mean, directions, corners), in_order.to(sketches)


def start_memberships(points: Tensor, corners: Tensor) -> Tensor:
    """(C, K): every point as the nearest mixture of the corners, and a part that is spread evenly."""
    return inside(TRUST * nearest_mixtures(points, corners) + (1 - TRUST) / len(corners))


def principal_points(rows: Tensor, p: Tensor, order: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The mean of the rows, their `count` main directions, and (M, count) where rows[order] are along these, float64.
    Mean and directions are weighted by p.

    In blocks: all rows at once in double precision would take several times the memory of the rows.
    """
    blocks = torch.split(order, MOST_POINTS), torch.split(p, MOST_POINTS)

    def block(at: Tensor) -> Tensor:
        return rows[at.to(rows.device)].double().cpu()

    mean = torch.stack([share @ block(at) for at, share in zip(*blocks, strict=True)]).sum(0)
    moment = torch.zeros(rows.shape[1], rows.shape[1], dtype=torch.float64)
    for at, share in zip(*blocks, strict=True):
        centred = block(at) - mean
        moment += centred.T @ (share[:, None] * centred)
    main = torch.linalg.eigh(moment).eigenvectors[:, -count:]
    points = torch.empty(len(order), count, dtype=torch.float64)
    for at, part in zip(blocks[0], torch.split(points, MOST_POINTS), strict=True):
        torch.matmul(block(at) - mean, main, out=part)
    return mean, main, points


def find_corners(points: Tensor, p: Tensor, k: int, seed: int) -> Tensor:
    """(K, d): the centres of k-means on points (N, d) with weights p (N,), the heaviest group first.

    On one thread: with more of them scikit-learn adds up in any order, and no two runs would have the same bits.

    >>> two = torch.tensor([[0.0], [0.2], [5.0]], dtype=torch.float64)
    >>> find_corners(two, torch.ones(3), k=2, seed=0).flatten().round(decimals=9).tolist()
    [0.1, 5.0]
    """
    from sklearn.cluster import KMeans  # takes a second, and most processes have no survey
    from sklearn.exceptions import ConvergenceWarning
    from threadpoolctl import threadpool_limits

    runs = KMeans(k, n_init=RUNS, tol=0, random_state=int(hashed(seed, "k-means")) % 2**32)
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # fewer than K different points have equal corners
        found = runs.fit(points.numpy(), sample_weight=p.numpy())
    groups = found.labels_.tolist()
    weight = torch.bincount(torch.tensor(groups), weights=p / p.sum(), minlength=k).tolist()
    by_first_client = [*dict.fromkeys([*groups, *range(k)])]  # the order of groups whose weights are equal
    order = sorted(by_first_client, key=lambda group: -round(weight[group], 9))
    return torch.from_numpy(found.cluster_centers_)[order]


# ---------------------------------------------------------------------- sketches that stay with the clients


class PrivateStart(NamedTuple):
    """The same from sums over clients alone: their moments, then steps of k-means, many runs of it side by side."""

    mean: Tensor  # (s,), of the sketches
    directions: Tensor  # (s, d), main directions of the sketches
    centres: Tensor  # (R, K, d), float64
    step: int = 0

    @classmethod
    def from_moments(cls, weight: Tensor, first: Tensor, second: Tensor, k: int, seed: int) -> PrivateStart:
        """From sum p_i, sum p_i s_i and sum p_i s_i s_i'. Centres start as draws of a normal distribution."""
        mean = first.double() / weight
        moment = second.double() / weight - torch.outer(mean, mean)
        values, vectors = torch.linalg.eigh(moment)
        count = max(1, k - 1)
        spread = values[-count:].clamp_min(0).sqrt()
        draws = [uniform(seed, "centres", side, torch.arange(RESTARTS * k * count)) for side in (0, 1)]
        normal = (-2 * (1 - draws[0]).log()).sqrt() * (2 * torch.pi * draws[1]).cos()  # Box and Muller's
        centres = normal.reshape(RESTARTS, k, count).to(spread) * spread
        return cls(mean, vectors[:, -count:], centres)

    def points(self, sketches: Tensor) -> Tensor:
        """(C, d) of a client's sketches: where they are along the main directions."""
        return ((sketches.double() - self.mean) @ self.directions).to(sketches.dtype)

    def moved(self, weight: Tensor, points: Tensor, squares: Tensor) -> PrivateStart:
        """After one step of k-means, from the sums of each cell (R K,) of p_i, p_i x_i and p_i |x_i|^2.

        After the last step, `centres` are those of the best run, the largest group first, as (1, K, d).
        """
        restarts, k, _ = self.centres.shape
        weight, points = weight.double().reshape(restarts, k), points.double().reshape(restarts, k, -1)
        found = points / weight.clamp_min(1e-300)[..., None]
        centres = torch.where(weight[..., None] > 0, found, self.centres)
        if self.step + 1 == STEPS:
            around = squares.double().reshape(restarts, k) - weight * found.square().sum(-1)
            best = int(around.sum(1).argmin())
            centres = centres[best, weight[best].argsort(descending=True)][None]
        return self._replace(centres=centres, step=self.step + 1)

    @property
    def corners(self) -> Tensor | None:
        """(K, d) once they are found."""
        return self.centres[0] if self.step == STEPS else None


def nearest_cells(points: Tensor, centres: Tensor) -> Tensor:
    """(C, R K) one-hot for each of R runs: the nearest of its K centres (R, K, d) to every point (C, d)."""
    restarts, k, d = centres.shape
    distance = torch.cdist(points.double(), centres.reshape(-1, d).double()).reshape(-1, restarts, k)
    return one_hot(distance.argmin(-1), k).flatten(1).to(points.dtype)
