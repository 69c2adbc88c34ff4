"""How the models of a population run and are differentiated, for one client or for a chunk of clients at once.

`Autograd` is the reference: torch.func for any network. `Chained` gives the same numbers for chains of linear layers,
by hand and faster. Which of them runs is decided once, by `make_backend`, where a site is set up with its data.
"""

from __future__ import annotations

from torch import Tensor

from ..population import Population
from .autograd import Autograd, Batch
from .chain import Chained, chain_of

Backend = Autograd


def make_backend(population: Population, x: Tensor, y: Tensor, n_classes: int | None) -> Backend:
    """The fastest backend for a population on data like x (N, ...) and y (N,)."""
    chain = None if population.mask_keys else chain_of(population.net)
    if chain is None or not chain.takes(x) or not chain.trains_all(population.net):
        return Autograd(population, x, y, n_classes)
    return Chained(population, chain, x, y, n_classes)


__all__ = ["Autograd", "Backend", "Batch", "Chained", "make_backend"]
