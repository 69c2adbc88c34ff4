"""Design matrices: products with coefficients, and sums over the rows of each client."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, Self

import scipy.sparse as sp
import torch
from torch import Tensor


class Design(Protocol):
    """n samples with q columns and m linear predictors per sample."""

    def __len__(self) -> int: ...

    @property
    def columns(self) -> int:
        """q."""

    def outputs(self, predictors: int) -> int:
        """The number of coefficients per column for this number of predictors."""

    def predictors(self, coefficients: Tensor) -> Tensor:
        """Linear predictors (n, K, m) of K models with coefficients (K, q, m)."""

    def client_gradients(self, gradients: Tensor, client: Tensor, n_clients: int) -> Tensor:
        """From gradients (n, m) in the predictors to gradients in the coefficients, summed by client: (M, q, m)."""

    def take(self, rows: slice | Tensor) -> Self:
        """Some of the samples."""


class DenseDesign(NamedTuple):
    """A dense matrix."""

    x: Tensor  # (n, q)

    def __len__(self) -> int:
        return self.x.shape[0]

    @property
    def columns(self) -> int:
        return self.x.shape[1]

    def outputs(self, predictors: int) -> int:
        return predictors

    def predictors(self, coefficients: Tensor) -> Tensor:
        k, q, m = coefficients.shape
        return (self.x @ coefficients.permute(1, 0, 2).reshape(q, k * m)).reshape(-1, k, m)

    def client_gradients(self, gradients: Tensor, client: Tensor, n_clients: int) -> Tensor:
        by_row = self.x[:, :, None] * gradients[:, None]
        return by_row.new_zeros(n_clients, *by_row.shape[1:]).index_add(0, client, by_row)

    def take(self, rows: slice | Tensor) -> DenseDesign:
        return DenseDesign(self.x[rows])


class SparseDesign(NamedTuple):
    """A scipy CSR matrix (n, q) of doubles."""

    x: Any

    def __len__(self) -> int:
        return int(self.x.shape[0])

    @property
    def columns(self) -> int:
        return int(self.x.shape[1])

    def outputs(self, predictors: int) -> int:
        return predictors

    def predictors(self, coefficients: Tensor) -> Tensor:
        k, q, m = coefficients.shape
        flat: Tensor = _SparseProduct.apply(self.x, coefficients.permute(1, 0, 2).reshape(q, k * m))  # type: ignore[no-untyped-call]
        return flat.reshape(-1, k, m)

    def client_gradients(self, gradients: Tensor, client: Tensor, n_clients: int) -> Tensor:
        positions = client.numpy(), torch.arange(len(self)).numpy()
        found = []
        for gradient in gradients.T:
            by_client = sp.csr_array((gradient.numpy(), positions), shape=(n_clients, len(self)))
            found.append(torch.from_numpy((by_client @ self.x).toarray()))
        return torch.stack(found, 2)

    def take(self, rows: slice | Tensor) -> SparseDesign:
        return SparseDesign(self.x[rows if isinstance(rows, slice) else rows.numpy()])


class _SparseProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any, dense: Tensor) -> Tensor:
        ctx.x = x
        return torch.from_numpy(x @ dense.detach().numpy())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, torch.from_numpy(ctx.x.T @ gradient.numpy())


class ChoiceDesign(NamedTuple):
    """Situations with up to J alternatives each. The same coefficients give the utility of every alternative."""

    x: Tensor  # (n, J, q)
    available: Tensor  # (n, J), False for places that a situation with fewer than J alternatives does not use

    def __len__(self) -> int:
        return self.x.shape[0]

    @property
    def columns(self) -> int:
        return self.x.shape[2]

    def outputs(self, predictors: int) -> int:
        return 1

    def predictors(self, coefficients: Tensor) -> Tensor:
        """Utilities; an alternative that is not available has a utility so low that its probability is 0."""
        utility = torch.einsum("njq,kq->nkj", self.x, coefficients[..., 0])
        return utility.masked_fill(~self.available[:, None], -1e30)

    def client_gradients(self, gradients: Tensor, client: Tensor, n_clients: int) -> Tensor:
        by_row = torch.einsum("njq,nj->nq", self.x, gradients)[..., None]
        return by_row.new_zeros(n_clients, *by_row.shape[1:]).index_add(0, client, by_row)

    def take(self, rows: slice | Tensor) -> ChoiceDesign:
        return ChoiceDesign(self.x[rows], self.available[rows])
