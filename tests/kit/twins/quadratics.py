"""Clients whose losses are quadratic, so that there are closed forms to compare with."""

import torch
from torch import nn

from ppfl.core import Population
from ppfl.data import Federation

SIZES = {"a": 30, "b": 20, "c": 10}


def regression() -> Federation:
    """Three clients with inputs of different scales and slopes of their own."""
    g = torch.Generator().manual_seed(0)
    scales = torch.tensor([[1.0, 0.5, 1.0], [0.5, 1.0, 1.5], [1.5, 1.0, 0.5]])
    x = torch.cat([torch.randn(n, 3, generator=g) * scale for n, scale in zip(SIZES.values(), scales, strict=True)])
    slopes = torch.randn(3, 3, generator=g).repeat_interleave(torch.tensor(list(SIZES.values())), dim=0)
    y = (x * slopes).sum(1) + torch.randn(len(x), generator=g)
    ids = [client for client, n in SIZES.items() for _ in range(n)]
    return Federation.from_arrays(x, y, ids, test_fraction=0, task="regression").to(dtype=torch.float64)


def linear_population() -> Population:
    """One network, y = x theta, with the squared loss; theta is "weight"."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Population(nn.Linear(3, 1, bias=False).double(), k=1, loss="squared")


def start_of(population: Population) -> torch.Tensor:
    """Its theta before the first round, (3,)."""
    return population.initial_network()["weight"][0]


def proximal_point(x, y, w, mu) -> torch.Tensor:
    """argmin of |x theta - y|^2 / 2n + mu/2 |theta - w|^2."""
    n = len(x)
    return torch.linalg.solve(x.T @ x / n + mu * torch.eye(x.shape[1], dtype=x.dtype), x.T @ y / n + mu * w)


def pooled_optimum(federation: Federation) -> torch.Tensor:
    """argmin of sum_i p_i f_i, with p_i the clients' shares of all samples: least squares on pooled data."""
    return torch.linalg.lstsq(federation.train.x, federation.train.y[:, None]).solution[:, 0]
