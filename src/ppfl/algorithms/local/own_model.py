"""A model that stays with its client, beside the one that all share. A client has none before it takes part."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ...core.population import Networks, Population
from ...core.trees import Params, map_params, per_client


class OwnModel(NamedTuple):
    """Client state of methods with one model per client."""

    model: Params  # leaves (C, ...)
    exists: Tensor  # (C,), 1 or 0; a client without one starts from what the server sends


def no_model_yet(population: Population) -> OwnModel:
    """One client before its first round."""
    return OwnModel(population.initial_network(), torch.zeros((), dtype=population.dtype))


def own_or_shared(own: OwnModel, shared: Params) -> Params:
    """One network per client: its own, or `shared` for those that have none yet."""
    if bool(own.exists.all()):
        return own.model
    return map_params(lambda mine, all_: torch.where(per_client(own.exists > 0, mine), mine, all_), own.model, shared)


def to_train(own: OwnModel, shared: Params) -> Params:
    """The same, as copies that may be written to."""
    return map_params(Tensor.clone, own_or_shared(own, shared))


def as_state(networks: Params) -> OwnModel:
    """The clients' networks as their state."""
    leaf = next(iter(networks.values()))
    return OwnModel(networks, leaf.new_ones(len(leaf)))


def models_of(own: OwnModel, shared: Params) -> Networks:
    """Everyone's own model, and the shared one for those who never took part."""
    return Networks(own_or_shared(own, shared))
