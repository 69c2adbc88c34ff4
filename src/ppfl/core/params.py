"""Parameters by name.

Of one network: leaves (...). Of K canonical models with their common part: canonical leaves (K, ...). Of a chunk of
clients: the same with a leading dimension C.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Params = dict[str, Tensor]


def map_params(f: Callable[..., Tensor], params: Params, *others: Params) -> Params:
    """f of every leaf, together with the leaf of the same name of others."""
    return {name: f(leaf, *(other[name] for other in others)) for name, leaf in params.items()}


def first_clients(params: Params, clients: int) -> Params:
    """The leaves (C, ...) of the first so many clients."""
    return {name: leaf[:clients] for name, leaf in params.items()}


def expand(params: Params, clients: int) -> Params:
    """The same values for each of `clients` clients, without copying."""
    return {name: leaf.expand(clients, *leaf.shape) for name, leaf in params.items()}


def subtract_(ends: Params, start: Params) -> Params:
    """ends - start, in place on the ends, whose leaves may have a dimension C more."""
    return map_params(Tensor.sub_, ends, start)


def per_client(scalar: Tensor, like: Tensor) -> Tensor:
    """(C,) shaped to multiply (C, ...)."""
    return scalar.reshape(-1, *(1 for _ in like.shape[1:]))


def accumulate_(velocity: Params, momentum: float, gradient: Params) -> None:
    """velocity <- momentum velocity + gradient, in place, for the leaves that have a gradient; with momentum 0 velocity
    may hold anything."""
    for name, leaf in gradient.items():
        velocity[name].mul_(momentum).add_(leaf) if momentum else velocity[name].copy_(leaf)


def weighted_sum(c: Tensor, values: Tensor) -> Tensor:
    """sum_k c_k value_k over the first dimension of `values`, for c (K,) or for each row of c (C, K)."""
    mixed: Tensor = torch.tensordot(c, values, dims=1)
    return mixed
