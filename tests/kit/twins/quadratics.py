"""Clients whose losses are quadratic, so that there are closed forms to compare with."""

import torch

from ppfl import Federation


def regression():
    """Three clients of unequal size with inputs of different scales and slopes of their own."""
    g = torch.Generator().manual_seed(0)
    client = torch.arange(3).repeat_interleave(torch.tensor([30, 20, 10]))
    scales = torch.tensor([[1.0, 0.5, 1.0], [0.5, 1.0, 1.5], [1.5, 1.0, 0.5]])
    x = torch.randn(60, 3, generator=g) * scales[client]
    y = (x * torch.randn(3, 3, generator=g)[client]).sum(1) + torch.randn(60, generator=g)
    ids = [f"client-{i}" for i in client]
    return Federation.from_arrays(x, y, ids, test_fraction=0, task="regression").to(dtype=torch.float64)


def proximal_point(x, y, w, mu):
    """argmin of |x theta - y|^2 / 2n + mu/2 |theta - w|^2."""
    H = x.T @ x / len(x) + mu * torch.eye(x.shape[1], dtype=x.dtype)
    return torch.linalg.solve(H, x.T @ y / len(x) + mu * w)
