"""A model that stays with its client, beside the one that all share. Nobody has one before taking part."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..core.shared import Shared
from .contract import Personal, Problem
from .descent import per_client
from .fedavg import one_model, with_k


class Own(NamedTuple):
    """Client state of methods with a model a client."""

    model: Shared  # leaves (C, ...), canonical ones (C, 1, ...)
    exists: Tensor  # (C,), 1 or 0; a newcomer starts from what the server sends


def nobody_yet(problem: Problem, shared: Shared) -> Own:
    """Before the first round; `shared` tells the shapes."""
    return Own(shared.spread(problem.n_clients), torch.zeros_like(problem.weights))


def networks(own: Own, shared: Shared) -> Shared:
    """One plain network a client, to be written to: its own, or a newcomer's copy of `shared`."""
    return one_model(_own_or(own, shared).map(torch.clone), k_at=1)


def kept(networks: Shared) -> Own:
    """The clients' networks as their state."""
    model = networks._replace(canonical=with_k(networks.canonical, k_at=1))
    leaf = model.leaves()[0]
    return Own(model, leaf.new_ones(len(leaf)))


def personal(own: Own, shared: Shared) -> Personal:
    """Everyone's own model, and the shared one for those who never took part."""
    return Personal(_own_or(own, shared), None, own=True)


def _own_or(own: Own, shared: Shared) -> Shared:
    if bool(own.exists.all()):
        return own.model
    return own.model.map(lambda mine, all_: torch.where(per_client(own.exists > 0, mine), mine, all_), shared)
