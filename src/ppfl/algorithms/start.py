"""Where memberships start. Memberships that move before the canonical models differ freeze a wrong assignment
(lock-in), so the first round asks every client which way it would pull a common model, and starts from that.

All K canonical models begin with the same values, each client sends a short sketch of the gradient of its whole
loss there, and the server looks for K corners among the sketches: where clients are mixtures of K kinds, their
first gradients are mixtures of the K kinds' gradients, so they lie in a simplex with those corners.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.draws import hashed
from ..core.population import Population, Shared
from ..core.simplex import inside, project
from .batches import LocalData
from .descent import spread

WIDTH = 256  # floats a client sends; distances between gradients are kept to about 10 %
TRUST = 0.9  # the rest is spread evenly: a start that no later step could leave would be lock-in again


def gradient_sketch(population: Population, shared: Shared, data: LocalData, seed: int) -> Tensor:
    """(C, s): the gradient of each client's mean loss for one canonical model, hashed to s = WIDTH numbers."""
    clients = len(data.weight)
    first = {name: theta[0] for name, theta in shared.canonical.items()}
    total: Tensor | float = 0.0
    for batch in data.everything():
        networks = spread(Shared(shared.common, first), clients)
        (_, G), _ = population.network_gradients(networks, batch.x, batch.y, batch.weight)
        share = batch.weight.sum(dim=1) / data.sizes.to(batch.weight)
        total = total + share[:, None] * torch.cat([G[name].flatten(1) for name in sorted(G)], dim=1)
    assert isinstance(total, Tensor)
    return count_sketch(total, seed)


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


def memberships_from_sketches(sketches: Tensor, weights: Tensor, ids: tuple[str, ...], k: int, seed: int) -> Tensor:
    """(M, K) start memberships, rows in the order of ids, whatever that order is.

    Principal directions, weighted by p_i since a small client's gradient is noisy; k-means there for the corners;
    then each client as the nearest mixture of the corners.
    """
    from sklearn.cluster import KMeans  # a second to load, and only this start needs it

    by_name = torch.tensor(sorted(range(len(ids)), key=ids.__getitem__))
    rows, p = sketches[by_name].double().cpu(), weights[by_name].double().cpu()
    p = p / p.sum()
    centred = rows - p @ rows
    _, directions = torch.linalg.eigh(centred.T @ (p[:, None] * centred))
    points = centred @ directions[:, -max(1, k - 1) :]
    found = KMeans(n_clusters=k, n_init=20, random_state=seed % 2**32).fit(points.numpy(), sample_weight=p.numpy())
    corners = torch.from_numpy(found.cluster_centers_)
    largest_first = torch.bincount(torch.from_numpy(found.labels_).long(), weights=p, minlength=k).argsort(
        descending=True
    )
    c = TRUST * nearest_mixtures(points, corners[largest_first]) + (1 - TRUST) / k
    in_order = torch.empty_like(c)
    in_order[by_name] = c
    return inside(in_order).to(sketches)


def nearest_mixtures(points: Tensor, corners: Tensor, steps: int = 300) -> Tensor:
    """argmin over rows c on the simplex of |c corners - point|^2, by projected gradient. (M, K)."""
    gram, target = corners @ corners.T, points @ corners.T
    longest_step = 1 / torch.linalg.eigvalsh(gram)[-1].clamp_min(1e-30)
    c = torch.full_like(target, 1 / len(corners))
    for _ in range(steps):
        c = project(c - longest_step * (c @ gram - target))
    return c
