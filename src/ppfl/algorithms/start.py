"""Where memberships start. Memberships that move before the canonical models differ freeze a wrong assignment
(lock-in), so the first round asks every client which way it would pull a common model, and starts from that.

All K canonical models begin with the same values, each client sends a short sketch of the gradient of its whole
loss there, and the server looks for K corners among the sketches: where clients are mixtures of K kinds, their
first gradients are mixtures of the K kinds' gradients, so they lie in a simplex with those corners.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..core.draws import hashed, name_keys
from ..core.population import Population
from ..core.shared import Shared
from ..core.simplex import inside
from .batches import LocalData

WIDTH = 256  # floats a client sends; distances between gradients are kept to about 10 %
TRUST = 0.9  # the rest is spread evenly: a start that no later step could leave would be lock-in again
ASKED = 20_000  # clients among whom corners are looked for, enough for K means, and rows in a block
SETTLED = 1e-12  # a membership that moves by less has arrived


def gradient_sketch(population: Population, shared: Shared, data: LocalData, seed: int) -> Tensor:
    """(C, s): the gradient of each client's mean loss for one canonical model, hashed to s = WIDTH numbers."""
    clients = len(data.weight)
    first = {name: theta[0] for name, theta in shared.canonical.items()}
    networks = Shared(shared.common, first).copies(clients, data.space)
    gradient = networks.room(data.space, "gradient")
    sketches: Tensor | None = None
    for batch in data.everything():
        n = len(batch.x)
        G = gradient.first(n)
        population.push_networks(networks.first(n), G, 0.0, *batch[:3], data.space)
        share = batch.real / data.sizes[:n].to(batch.real)
        rows = torch.cat([G.canonical[name].flatten(1) for name in sorted(G.canonical)], dim=1)
        sketch = share[:, None] * count_sketch(rows, seed)
        sketches = sketch.new_zeros(clients, sketch.shape[1]) if sketches is None else sketches
        sketches[:n] += sketch
    assert sketches is not None
    return sketches


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

    Principal directions, weighted by p_i since a small client's gradient is noisy; k-means there for the corners,
    among at most ASKED clients drawn by (seed, id); then each client as the nearest mixture of the corners.
    """
    by_name = torch.tensor(sorted(range(len(ids)), key=ids.__getitem__))
    p = weights.cpu()[by_name].double()
    p = p / p.sum()
    points = principal_points(sketches, p, by_name, max(1, k - 1))
    asked = torch.arange(len(ids))
    if len(ids) > ASKED:
        draws = hashed(seed, "corners", name_keys(ids))[by_name]
        asked = draws.argsort()[:ASKED].sort().values
    c = TRUST * nearest_mixtures(points, find_corners(points[asked], p[asked], k, seed)) + (1 - TRUST) / k
    in_order = torch.empty_like(c)
    in_order[by_name] = c
    return inside(in_order).to(sketches)


def principal_points(rows: Tensor, p: Tensor, order: Tensor, count: int) -> Tensor:
    """(M, count) float64: rows[order] from their mean, along their `count` main directions, both weighted by p.

    In blocks: all rows at once in double precision would take several times the memory of the rows.
    """
    blocks = torch.split(order, ASKED), torch.split(p, ASKED)

    def block(at: Tensor) -> Tensor:
        return rows[at.to(rows.device)].double().cpu()

    mean = torch.stack([share @ block(at) for at, share in zip(*blocks, strict=True)]).sum(0)
    moment = torch.zeros(rows.shape[1], rows.shape[1], dtype=torch.float64)
    for at, share in zip(*blocks, strict=True):
        centred = block(at) - mean
        moment += centred.T @ (share[:, None] * centred)
    main = torch.linalg.eigh(moment).eigenvectors[:, -count:]
    points = torch.empty(len(order), count, dtype=torch.float64)
    for at, part in zip(blocks[0], torch.split(points, ASKED), strict=True):
        torch.matmul(block(at) - mean, main, out=part)
    return points


def find_corners(points: Tensor, p: Tensor, k: int, seed: int) -> Tensor:
    """(K, d): the centres of k-means with weights p, the largest group first."""
    from sklearn.cluster import KMeans  # a second to load, and only this start needs it

    found = KMeans(n_clusters=k, n_init=20, random_state=seed % 2**32).fit(points.numpy(), sample_weight=p.numpy())
    size = torch.bincount(torch.from_numpy(found.labels_).long(), weights=p, minlength=k)
    return torch.from_numpy(found.cluster_centers_)[size.argsort(descending=True)]


def nearest_mixtures(points: Tensor, corners: Tensor, steps: int = 300) -> Tensor:
    """argmin over rows c on the simplex of |c corners - point|^2, by projected gradient. (M, K).

    A row is done when it moves no more, or after `steps` steps.
    """
    gram = corners @ corners.T
    longest_step = 1 / torch.linalg.eigvalsh(gram)[-1].clamp_min(1e-30)
    turn = torch.eye(len(corners)).to(gram) - longest_step * gram
    # columns are clients here: sums over K run along whole vectors, and a block stays in the cache
    blocks = [_settled(turn, longest_step * (corners @ block.T), steps).T for block in torch.split(points, 8192)]
    return torch.cat(blocks)


def _settled(turn: Tensor, push: Tensor, steps: int) -> Tensor:
    """The columns c = project(turn c + push), (K, B)."""
    c = torch.full_like(push, 1 / len(push))
    settled, moving = c.clone(), torch.arange(c.shape[1], device=c.device)
    for step in range(1, steps + 1):
        before, c = c, _project_columns(torch.addmm(push, turn, c))
        if step % 5 == 0 or step == steps:  # looking costs about as much as a step
            settled[:, moving] = c
            still = ((c - before).abs().amax(0) > SETTLED).nonzero().flatten()
            if len(still) == 0:
                break
            moving, c, push = moving[still], c[:, still], push[:, still]
    return settled


def _project_columns(v: Tensor) -> Tensor:
    """simplex.project of the columns of (K, B), without a sort: Newton's steps to the threshold, at most K."""
    v = v - v.amax(0)
    threshold = (v.sum(0) - 1) / len(v)
    above = (v - threshold).clamp_min_(0)
    for _ in range(len(v) - 1):
        excess = above.sum(0) - 1
        if float(excess.amax()) < SETTLED:
            break
        threshold += excess / (above > 0).sum(0)
        above = (v - threshold).clamp_min_(0)
    return above
