"""Weighted k-means, many runs side by side: every step of all of them is one matrix product.

Runs start by greedy k-means++ on a part of the points, the best of them go on with all points until nothing changes.
Draws are keyed by the seed and depend on nothing else, so the same points give the same centres.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ...core.draws import uniform

RESTARTS = 20
FEW_POINTS = 2048  # of the points on which all runs start; at least 64 per centre
FIRST_STEPS = 15  # of all runs on these
REFINED = 2  # runs that go on with all points ...
MOST_STEPS = 300  # ... for so many steps at most, or until ...
LEAST_GAIN = 1e-4  # ... a step gains less than this part of the spread


def kmeans(points: Tensor, weight: Tensor, k: int, seed: int) -> tuple[Tensor, Tensor]:
    """Centres (K, d) and the cell of each of the points (N, d), with weights (N,), the heaviest cell first.

    >>> two = torch.tensor([[0.0], [0.2], [5.0]], dtype=torch.float64)
    >>> centres, cells = kmeans(two, torch.ones(3), k=2, seed=0)
    >>> centres.flatten().tolist(), cells.tolist()
    ([0.1, 5.0], [0, 0, 1])
    """
    weight = weight.to(points)
    few: slice | Tensor = slice(None)
    if len(points) > (count := max(FEW_POINTS, 64 * k)):
        few = uniform(seed, "k-means points", torch.arange(len(points))).argsort()[:count].sort().values
    some, their_weight = points[few].float(), weight[few].float()
    centres = plus_plus(some, their_weight, k, seed)
    for _ in range(FIRST_STEPS):
        centres, _, spread = lloyd_step(some, their_weight, centres)
    best = spread.argsort(stable=True)[:REFINED]
    centres, least = centres[best].to(points), math.inf
    for _ in range(MOST_STEPS):
        centres, cells, spread = lloyd_step(points, weight, centres)
        before, least = least, float(spread.sum())
        if before - least <= LEAST_GAIN * least:
            break
    at = int(spread.argmin())
    size = torch.bincount(cells[at], weights=weight, minlength=k)
    order = size.argsort(descending=True, stable=True)
    return centres[at, order], order.argsort()[cells[at]]


def plus_plus(points: Tensor, weight: Tensor, k: int, seed: int) -> Tensor:
    """(R, K, d): each next centre is a point, drawn in proportion to its weighted squared distance from those before;
    of a few candidates the one that leaves least."""
    tries = 2 + int(math.log(k))
    draws = uniform(seed, "k-means", torch.arange(RESTARTS * k * tries)).to(points).reshape(k, RESTARTS, tries)
    squares = points.square().sum(1)
    first = _drawn(weight.expand(RESTARTS, -1), draws[0, :, :1])[:, 0]
    chosen = [first]
    left = _squared_distances(points, squares, first)  # (R, N), from the nearest centre
    for at in range(1, k):
        candidates = _drawn(left * weight, draws[at])  # (R, T)
        distance = _squared_distances(points, squares, candidates.flatten()).reshape(RESTARTS, tries, -1)
        closer = torch.minimum(distance, left[:, None])
        best = (closer @ weight).argmin(1)
        chosen.append(candidates.gather(1, best[:, None])[:, 0])
        left = closer[torch.arange(RESTARTS), best]
    return points[torch.stack(chosen, dim=1)]


def lloyd_step(points: Tensor, weight: Tensor, centres: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """New centres (R, K, d) of R runs, the cells (R, N) of the old ones, and their spread (R,) around the new ones.

    A centre without points stays where it is.
    """
    restarts, k, d = centres.shape
    flat = centres.reshape(-1, d)
    cost = torch.addmm(flat.square().sum(1), points, flat.T, alpha=-2).reshape(-1, restarts, k)
    cells = cost.argmin(-1)  # (N, R)
    cells = cells.T.contiguous()
    members = points.new_zeros(restarts, k, len(points))
    members = members.scatter_(1, cells[:, None], weight.expand(restarts, 1, -1)).flatten(0, 1)  # (R K, N)
    size = members.sum(1)
    mean = members @ points / size.clamp_min(torch.finfo(points.dtype).tiny)[:, None]
    found = torch.where(size[:, None] > 0, mean, flat)
    total = weight @ points.square().sum(1)
    spread = total - (size * found.square().sum(1)).reshape(restarts, k).sum(1)
    return found.reshape(restarts, k, d), cells, spread


def _squared_distances(points: Tensor, squares: Tensor, at: Tensor) -> Tensor:
    """(A, N) from the points at these positions (A,)."""
    return (squares[at, None] + squares - 2 * points[at] @ points.T).clamp_min_(0)


def _drawn(mass: Tensor, draws: Tensor) -> Tensor:
    """Positions (R, T) in proportion to mass (R, N), for draws (R, T) in [0, 1)."""
    upto = mass.double().cumsum(1)
    return torch.searchsorted(upto, draws.double() * upto[:, -1:], right=True).clamp_max_(mass.shape[1] - 1)
