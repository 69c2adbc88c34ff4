"""True memberships of the clients, known for synthetic populations and partitions."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ppfl.errors import DataError


@dataclass(frozen=True, eq=False)
class Truth:
    """True memberships, and the true models if they are known.

    >>> Truth(torch.eye(2), name="group").rows([1]).memberships
    tensor([[0., 1.]])
    """

    memberships: Tensor  # (M, K) rows on the simplex; one-hot if clients are in groups
    name: str | None = None  # what a column represents, such as "group"
    sources: Tensor | None = None  # (K, d) the linear models that generated the targets
    noise: float | None = None  # standard deviation of the noise in the targets

    def __post_init__(self) -> None:
        c = self.memberships
        if c.ndim != 2 or not c.is_floating_point():
            raise DataError(f"true memberships are {c.dtype} {tuple(c.shape)}; expected floats (clients, k)")
        off = (c.sum(1) - 1).abs() > 1e-4
        if bool((c < 0).any()) or bool(off.any()) or not bool(c.isfinite().all()):
            raise DataError("true memberships are not on the simplex; expected rows that sum to 1: divide by the sum")

    def rows(self, positions: Sequence[int] | Tensor) -> "Truth":
        """The truth for some clients."""
        at = torch.as_tensor(positions, dtype=torch.int64, device=self.memberships.device)
        return replace(self, memberships=self.memberships[at])

    def to(self, device: torch.device | str | None) -> "Truth":
        """Move to a device."""
        sources = None if self.sources is None else self.sources.to(device)
        return replace(self, memberships=self.memberships.to(device), sources=sources)
