"""What a client computes with, for tests of local work: its data and draws, a backend, gradients of whole losses."""

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from ppfl.algorithms.local import memberships
from ppfl.algorithms.local.batches import Draws, LocalData
from ppfl.core import Population
from ppfl.core.backends import Autograd, Batch, autograd, make_backend
from ppfl.core.draws import name_keys
from ppfl.core.trees import named_leaves
from ppfl.core.workspace import Workspace
from ppfl.data import Federation, Samples


def local_data(
    federation: Federation, clients, backend=None, *, seed=0, round=0, masks=False, used_memory=False
) -> LocalData:
    """A chunk of clients, by position and largest first, in a round; in memory that held NaN before, if asked for.

    Without a backend it is good for batches alone.
    """
    at, runs = torch.as_tensor(clients), backend or SimpleNamespace(space=Workspace())
    space = runs.space
    if used_memory:
        with space.frame():
            space.empty((1000,), federation.train.x).fill_(torch.nan)
    weight = federation.weights.to(federation.train.x.dtype)[at]
    return LocalData(federation.train, weight, name_keys(federation.ids)[at], at, Draws(seed, round, masks), runs)


def backend_for(federation: Federation, population: Population, kind: str = "fastest"):
    """What runs and differentiates the population on data like these: the reference or the fastest."""
    make = {"autograd": Autograd, "fastest": make_backend}[kind]
    return make(population, federation.train.x[:2], federation.train.y[:2], federation.n_classes)


def limit_outputs(patch: pytest.MonkeyPatch, *, block: int, kept: int) -> None:
    """Outputs of at most so many bytes run at once, and at most so many are kept between membership steps."""
    patch.setattr(autograd, "BLOCK_OUTPUTS", block)
    patch.setattr(memberships, "KEPT_OUTPUTS", kept)


def slope_and_loss(backend, models, c: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
    """Of one client's mean loss over these samples by its membership (K,), by the backend's plain gradient."""
    n = len(samples.y)
    even = torch.full((1, n), 1 / n, dtype=c.dtype)
    batch = Batch(samples.x[None], samples.y[None], even, torch.tensor([n]), torch.arange(n)[None], None)
    slopes, losses = backend.membership_gradients(models, c[None], batch)
    return slopes[0], losses[0]


def shapes_in(tree) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of all tensors in a tree."""
    for name, leaf in named_leaves(tree).items():
        if isinstance(leaf, Tensor):
            yield name, tuple(leaf.shape)
