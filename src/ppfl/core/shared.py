"""theta: parameters by name, of one client or, with a leading dimension, of a chunk of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .workspace import Workspace

Params = dict[str, Tensor]


class Shared(NamedTuple):
    """What all clients share. A chunk of clients in the middle of local work has (C, ...) leaves."""

    common: Params
    canonical: Params  # leaves (K, ...)

    def map(self, f: Callable[..., Tensor], *others: Shared) -> Shared:
        """f of every leaf, together with the same leaf of others; much faster than a pytree's."""
        both = zip(self, *others, strict=True)
        return Shared(
            *({name: f(leaf, *(o[name] for o in rest)) for name, leaf in part.items()} for part, *rest in both)
        )

    def leaves(self) -> list[Tensor]:
        """Common ones first."""
        return [*self.common.values(), *self.canonical.values()]

    def by_name(self) -> Params:
        """All of them, as a network has them."""
        return {**self.common, **self.canonical}

    def first(self, clients: int) -> Shared:
        """The leaves (C, ...) of the first so many clients."""
        return self.map(lambda leaf: leaf[:clients])

    def spread(self, clients: int) -> Shared:
        """The same values for each of `clients` clients, without copying."""
        return self.map(lambda leaf: leaf.expand(clients, *leaf.shape))

    def room(self, space: Workspace | None, purpose: str) -> Shared:
        """Tensors of the same shapes with any values, from the workspace where there is one."""
        if space is None:
            return self.map(lambda leaf: torch.empty(leaf.shape, dtype=leaf.dtype, device=leaf.device))
        return Shared(
            *({n: space.take(f"{purpose} {n}", tuple(leaf.shape), leaf) for n, leaf in part.items()} for part in self)
        )

    def copies(self, clients: int, space: Workspace | None) -> Shared:
        """The same values for each of `clients` clients, to be written to."""
        return self.spread(clients).room(space, "values").map(Tensor.copy_, self)

    def push(self, momentum: float, gradient: Shared) -> None:
        """velocity <- momentum velocity + gradient, in place; with momentum 0 it may hold anything."""
        for v, g in zip(self.leaves(), gradient.leaves(), strict=True):
            v.mul_(momentum).add_(g) if momentum else v.copy_(g)

    def scale_canonical(self, scale: Tensor | None) -> Shared:
        """The canonical leaves (C, ...) times scale (C,), in place; None leaves them."""
        if scale is not None:
            for leaf in self.canonical.values():
                leaf.mul_(scale.reshape(-1, *(1 for _ in leaf.shape[1:])))
        return self


def mixed_weights(canonical: Params, c: Tensor, space: Workspace | None = None) -> Params:
    """W = sum_k c_k theta_k for c (K,), or W_i for each row of c (C, K)."""
    if space is None:
        return {name: weighted_sum(c, theta) for name, theta in canonical.items()}
    W = Shared({}, {name: theta[0] for name, theta in canonical.items()}).spread(len(c)).room(space, "mixed").canonical
    for name, theta in canonical.items():
        torch.mm(c, theta.flatten(1), out=W[name].view(len(c), -1))
    return W


def weighted_sum(c: Tensor, values: Tensor) -> Tensor:
    """sum_k c_k value_k over the first dimension of `values`, for c (K,) or for each row of c (C, K)."""
    mixed: Tensor = torch.tensordot(c, values, dims=1)
    return mixed
