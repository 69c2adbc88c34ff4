"""How far a client is from a stationary point of F, the measure of Section 3.2, on full gradients."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...core.simplex import inside, mirror_step
from ...core.trees import Params, expand, first_clients
from ...io.codec import message
from ..contract import Sum, Upload
from .batches import LocalData
from .memberships import client_membership_gradient


@message
class Stationarity(NamedTuple):
    """The task of measuring it."""

    membership_lr: float


def stationarity_upload(
    task: Stationarity,
    models: Params,
    own: dict[str, Tensor],
    c: Tensor,
    data: LocalData,
    penalty: float,
) -> Upload:
    """The gradient for theta in a sum, and how far a mirror step would take each membership (C, K)."""
    backend = data.backend
    slopes, gradient = torch.zeros_like(c), data.space.empty_like(expand(models, len(c)))
    for leaf in gradient.values():
        leaf.zero_()
    for batch in data.everything(backend.samples_per_block(len(c), backend.population.k)):
        n = len(batch.x)
        part = batch.real / data.sizes[:n].to(batch.real)  # of its client's data
        slope, _ = backend.membership_gradients(models, c[:n], batch)
        slopes[:n] += part[:, None] * slope
        of_all = batch._replace(share=batch.share * part[:, None])
        backend.add_model_gradients(expand(models, n), first_clients(gradient, n), 1.0, c[:n], of_all)
    degree = own.get("degree", torch.zeros_like(data.weight))
    neighbours = own.get("neighbours", torch.zeros_like(c))
    G = client_membership_gradient(slopes, c, data.weight, degree, neighbours, penalty)
    moved = (c - inside(mirror_step(c, G, task.membership_lr))).abs().sum(1)
    return Upload({"gradient": Sum(None, gradient)}, metrics={"moved": moved})
