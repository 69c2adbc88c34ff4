"""Tables as a fit sees them: products with coefficients, and sums by client."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, Self

import scipy.sparse as sp
import torch
from torch import Tensor


class Design(Protocol):
    """n samples of q columns, that give m predictors each."""

    def __len__(self) -> int: ...

    @property
    def columns(self) -> int:
        """q."""

    def outputs(self, predictors: int) -> int:
        """How many coefficients a column needs for so many predictors."""

    def times(self, coefficients: Tensor) -> Tensor:
        """Predictors (n, K, m) of coefficients (K, q, m)."""

    def sums(self, slopes: Tensor, client: Tensor, n_clients: int) -> Tensor:
        """What slopes (n, m) of the predictors mean for the coefficients of each client, (M, q, m)."""

    def take(self, rows: slice | Tensor) -> Self:
        """Some of the samples."""


class Dense(NamedTuple):
    """The usual table."""

    x: Tensor  # (n, q)

    def __len__(self) -> int:
        return self.x.shape[0]

    @property
    def columns(self) -> int:
        return self.x.shape[1]

    def outputs(self, predictors: int) -> int:
        return predictors

    def times(self, coefficients: Tensor) -> Tensor:
        k, q, m = coefficients.shape
        return (self.x @ coefficients.permute(1, 0, 2).reshape(q, k * m)).reshape(-1, k, m)

    def sums(self, slopes: Tensor, client: Tensor, n_clients: int) -> Tensor:
        of_rows = self.x[:, :, None] * slopes[:, None]
        return of_rows.new_zeros(n_clients, *of_rows.shape[1:]).index_add(0, client, of_rows)

    def take(self, rows: slice | Tensor) -> Dense:
        return Dense(self.x[rows])


class Sparse(NamedTuple):
    """A scipy CSR matrix (n, q) of doubles."""

    x: Any

    def __len__(self) -> int:
        return int(self.x.shape[0])

    @property
    def columns(self) -> int:
        return int(self.x.shape[1])

    def outputs(self, predictors: int) -> int:
        return predictors

    def times(self, coefficients: Tensor) -> Tensor:
        k, q, m = coefficients.shape
        flat: Tensor = _SparseProduct.apply(self.x, coefficients.permute(1, 0, 2).reshape(q, k * m))  # type: ignore[no-untyped-call]
        return flat.reshape(-1, k, m)

    def sums(self, slopes: Tensor, client: Tensor, n_clients: int) -> Tensor:
        place = client.numpy(), torch.arange(len(self)).numpy()
        found = []
        for slope in slopes.T:
            whose = sp.csr_array((slope.numpy(), place), shape=(n_clients, len(self)))
            found.append(torch.from_numpy((whose @ self.x).toarray()))
        return torch.stack(found, 2)

    def take(self, rows: slice | Tensor) -> Sparse:
        return Sparse(self.x[rows if isinstance(rows, slice) else rows.numpy()])


class _SparseProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, dense: Tensor) -> Tensor:
        ctx.x = x
        return torch.from_numpy(x @ dense.detach().numpy())

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[None, Tensor]:
        return None, torch.from_numpy(ctx.x.T @ slope.numpy())


class Alternatives(NamedTuple):
    """Situations in which one of up to J alternatives is chosen, all valued by the same coefficients."""

    x: Tensor  # (n, J, q)
    there: Tensor  # (n, J), False where a situation has fewer than J

    def __len__(self) -> int:
        return self.x.shape[0]

    @property
    def columns(self) -> int:
        return self.x.shape[2]

    def outputs(self, predictors: int) -> int:
        return 1

    def times(self, coefficients: Tensor) -> Tensor:
        """An alternative that is not there is worth so little that nobody takes it."""
        worth = torch.einsum("njq,kq->nkj", self.x, coefficients[..., 0])
        return worth.masked_fill(~self.there[:, None], -1e30)

    def sums(self, slopes: Tensor, client: Tensor, n_clients: int) -> Tensor:
        of_rows = torch.einsum("njq,nj->nq", self.x, slopes)[..., None]
        return of_rows.new_zeros(n_clients, *of_rows.shape[1:]).index_add(0, client, of_rows)

    def take(self, rows: slice | Tensor) -> Alternatives:
        return Alternatives(self.x[rows], self.there[rows])
