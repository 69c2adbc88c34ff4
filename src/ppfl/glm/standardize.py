"""Standardised designs from a table, and coefficients in the units of the table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from ..errors import SettingError
from .client_ids import Array, ClientCodes
from .column_spread import measure_columns
from .designs import DenseDesign, Design, SparseDesign
from .families import Family
from .likelihoods import Coefficients
from .sample_rows import ClientRows

INTERCEPT = "intercept"


class ColumnScaling(NamedTuple):
    """The scaling of every column, and which columns vary between canonical models."""

    names: tuple[str, ...]
    mean: Array  # (d,), 0 where centring would change the model, and for sparse tables, which it would make dense
    scale: Array  # (d,), infinite for a constant column, whose coefficient is then 0
    varying: tuple[int, ...]  # positions, d for the intercept
    shared: tuple[int, ...]

    @classmethod
    def of(cls, x: Any, weight: Array, names: Sequence[str], shared: Any, *, intercept: bool) -> ColumnScaling:
        d = x.shape[1]
        fixed = _positions(names, shared, intercept=intercept)
        every = [*range(d), *([d] if intercept else [])]
        mean, scale = measure_columns(x, weight, names, center=intercept)
        if d in fixed:  # clients that share an intercept agree where all varying columns are 0, not at their means
            mean = np.where([i in fixed for i in range(d)], mean, 0.0)
        varying = tuple(i for i in every if i not in fixed)
        if not varying:
            raise SettingError("all columns are shared, so clients cannot differ; leave one out of `shared`")
        return cls(tuple(names), mean, scale, varying, tuple(sorted(fixed)))

    def split(self, x: Any, order: Any = slice(None)) -> tuple[Design, Design]:
        """Varying and shared columns, standardised, with rows in this order."""
        if sp.issparse(x):
            ones = sp.csr_array(np.ones((x.shape[0], 1)))
            whole = sp.hstack([sp.csr_array(x) @ sp.diags_array(1 / self.scale), ones], format="csr")[order]
            return SparseDesign(whole[:, list(self.varying)]), SparseDesign(whole[:, list(self.shared)])
        standard = torch.from_numpy((np.asarray(x[order], dtype=np.float64) - self.mean) / self.scale)
        whole = torch.cat([standard, torch.ones(len(standard), 1, dtype=torch.float64)], 1)
        return DenseDesign(whole[:, list(self.varying)]), DenseDesign(whole[:, list(self.shared)])

    def is_slope(self) -> tuple[Tensor, Tensor]:
        """For varying columns (q,) and shared ones (f,): 1 for slopes and 0 for the intercept."""
        varying, shared = (
            torch.tensor([float(i < len(self.names)) for i in some], dtype=torch.float64)
            for some in (self.varying, self.shared)
        )
        return varying, shared

    def to_original_units(self, coefficients: Coefficients, shift: float, scale: float) -> tuple[Array, Array]:
        """Slopes (K, d, m) and intercepts (K, m) for the table as given, with targets `shift + scale * y`."""
        k, _, m = coefficients.canonical.shape
        d = len(self.names)
        whole = np.zeros((k, d + 1, m))
        whole[:, list(self.varying)] = coefficients.canonical.numpy()
        whole[:, list(self.shared)] = coefficients.shared.numpy()
        slopes = scale * whole[:, :d] / self.scale[:, None]
        return slopes, shift + scale * whole[:, d] - (slopes * self.mean[:, None]).sum(1)


def _positions(names: Sequence[str], shared: Any, *, intercept: bool) -> set[int]:
    """Columns by name or position; `"intercept"` is one of them, `"all"` is all but the intercept."""
    if shared is None:
        return set()
    if isinstance(shared, str) and shared == "all":
        return set(range(len(names)))
    known = [*names, *([INTERCEPT] if intercept else [])]
    found = set()
    for item in [shared] if isinstance(shared, str) or not np.iterable(shared) else shared:
        if isinstance(item, str) and known.count(item) == 1:
            found.add(known.index(item))
        elif isinstance(item, str) and item in known:
            raise SettingError(f"shared names {item!r}, but {known.count(item)} columns have this name; rename one")
        elif isinstance(item, int | np.integer) and not isinstance(item, bool) and 0 <= item < len(names):
            found.add(int(item))
        else:
            raise SettingError(f"shared names {item!r}, which is no column; use some of {', '.join(known)}, or 'all'")
    return found


def sort_by_client(
    scaling: ColumnScaling, x: Any, y: Array, weight: Array, clients: ClientCodes, family: Family, mix: str,
    offset: Array | None = None,
) -> ClientRows:  # fmt: skip
    """Standardised rows in the order of their clients."""
    order = np.argsort(clients.codes, kind="stable")
    varying, shared = scaling.split(x, order)
    target, weights, client = (torch.from_numpy(np.ascontiguousarray(a[order])) for a in (y, weight, clients.codes))
    added = None if offset is None else torch.from_numpy(offset[order])
    return ClientRows(varying, shared, target.double(), weights, client, len(clients.ids), family, mix, added)
