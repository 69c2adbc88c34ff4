"""From a table to standardised designs, and coefficients back to the table's own units."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Number
from typing import Any, NamedTuple

import numpy as np
import scipy.sparse as sp
import torch
from torch import Tensor

from ..core.errors import DataError, SettingError
from .designs import Dense, Design, Sparse
from .likelihoods import Coefficients

INTERCEPT = "intercept"
Array = np.ndarray[Any, Any]


class Columns(NamedTuple):
    """Which columns vary between canonical models, and how each is scaled."""

    names: tuple[str, ...]
    mean: Array  # (d,), 0 where there is no intercept to take it up, or where it would fill a sparse table
    scale: Array  # (d,), infinite for a column that says nothing, whose coefficient is then 0
    varying: tuple[int, ...]  # positions, d for the intercept
    shared: tuple[int, ...]

    @classmethod
    def of(cls, x: Any, weight: Array, names: Sequence[str], shared: Any, *, intercept: bool) -> Columns:
        d = x.shape[1]
        fixed = _positions(names, shared, intercept=intercept)
        every = [*range(d), *([d] if intercept else [])]
        share = weight / weight.sum()
        mean = share @ x if intercept and not sp.issparse(x) else np.zeros(d)
        square = share @ (x.multiply(x) if sp.issparse(x) else (x - mean) ** 2)
        scale = np.sqrt(np.asarray(square).ravel())
        scale[scale <= 1e-12 * np.abs(mean)] = np.inf
        if intercept and sp.issparse(x):  # a constant column is the intercept once more
            counted = x[weight > 0]
            scale[(counted.max(0) - counted.min(0)).toarray().ravel() == 0] = np.inf
        varying = tuple(at for at in every if at not in fixed)
        if not varying:
            raise SettingError("all columns are shared, so clients cannot differ; leave one out of `shared`")
        return cls(tuple(names), mean, scale, varying, tuple(sorted(fixed)))

    def split(self, x: Any, order: Any = slice(None)) -> tuple[Design, Design]:
        """Varying and shared columns, standardised, of rows in this order."""
        if sp.issparse(x):
            ones = sp.csr_array(np.ones((x.shape[0], 1)))
            whole = sp.hstack([sp.csr_array(x) @ sp.diags_array(1 / self.scale), ones], format="csr")[order]
            return Sparse(whole[:, list(self.varying)]), Sparse(whole[:, list(self.shared)])
        standard = torch.from_numpy((np.asarray(x[order], dtype=np.float64) - self.mean) / self.scale)
        whole = torch.cat([standard, torch.ones(len(standard), 1, dtype=torch.float64)], 1)
        return Dense(whole[:, list(self.varying)]), Dense(whole[:, list(self.shared)])

    def slopes(self) -> tuple[Tensor, Tensor]:
        """Of varying columns (q,) and of shared ones (f,): 1, and 0 for the intercept."""
        varying, shared = (
            torch.tensor([float(at < len(self.names)) for at in some], dtype=torch.float64)
            for some in (self.varying, self.shared)
        )
        return varying, shared

    def in_units(self, coefficients: Coefficients, shift: float, stretch: float) -> tuple[Array, Array]:
        """Coefficients (K, d, m) and intercepts (K, m) for the table as it came, targets `shift + stretch * y`."""
        k, _, m = coefficients.canonical.shape
        d = len(self.names)
        whole = np.zeros((k, d + 1, m))
        whole[:, list(self.varying)] = coefficients.canonical.numpy()
        whole[:, list(self.shared)] = coefficients.shared.numpy()
        slopes = stretch * whole[:, :d] / self.scale[:, None]
        return slopes, shift + stretch * whole[:, d] - (slopes * self.mean[:, None]).sum(1)


def _positions(names: Sequence[str], shared: Any, *, intercept: bool) -> set[int]:
    """Columns by name or number; `"intercept"` is one, `"all"` are all but it."""
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
            raise SettingError(f"shared names {item!r}, which {known.count(item)} columns are called; rename one")
        elif isinstance(item, int | np.integer) and not isinstance(item, bool) and 0 <= item < len(names):
            found.add(int(item))
        else:
            raise SettingError(f"shared names {item!r}, which is no column; use some of {', '.join(known)}, or 'all'")
    return found


class Clients(NamedTuple):
    """Whose row each is."""

    ids: tuple[Any, ...]  # sorted
    row: np.ndarray[Any, np.dtype[np.int64]]  # (n,)

    @classmethod
    def of(cls, clients: Any, rows: int) -> Clients:
        """All rows are one client's where `clients` is None."""
        if clients is None:
            return cls((0,), np.zeros(rows, dtype=np.int64))
        return cls(*grouped("client", clients, rows))

    def lines(self, known: Sequence[Any]) -> Tensor:
        """For every row the position of its client among those known, their number for all others."""
        self.check_kind(known)
        place = {client: at for at, client in enumerate(known)}
        found = np.array([place.get(client, len(place)) for client in self.ids], dtype=np.int64)
        return torch.from_numpy(found[self.row])

    def check_kind(self, known: Sequence[Any]) -> None:
        """7 and '7' are never the same client, and mistaking one for a stranger would go unnoticed."""
        if _kind(self.ids[0]) != _kind(known[0]):
            raise DataError(
                f"client ids are of kind {_kind(self.ids[0])}, such as {self.ids[0]!r}, but the fit had ids of kind "
                f"{_kind(known[0])}, such as {known[0]!r}; name clients as the fit did"
            )


def grouped(noun: str, ids: Any, rows: int) -> tuple[tuple[Any, ...], np.ndarray[Any, np.dtype[np.int64]]]:
    """The ids there are, sorted, and the position among them of every row's."""
    # numpy would turn the numbers of a list with a name in it into names, and NaN into the name 'nan'
    values = np.array(ids, dtype=object) if isinstance(ids, list | tuple) else np.asarray(ids)
    if values.shape != (rows,):
        raise DataError(f"{noun}s has shape {values.shape} for {rows} rows; give one {noun} id a row")
    if values.dtype.kind not in "biufUSO":
        raise DataError(f"{noun} ids are of kind {values.dtype}; turn them into strings")
    if missing := count_missing(values):
        raise DataError(f"{missing} of {rows} rows have no {noun} id; drop these rows or give them one")
    kinds = {_kind(item) for item in values.tolist()} if values.dtype.kind == "O" else set()
    if len(kinds) > 1:
        raise DataError(f"{noun} ids are of several kinds ({', '.join(sorted(kinds))}); turn all into strings")
    unique, row = np.unique(values, return_inverse=True)
    return tuple(unique.tolist()), row.astype(np.int64)


def count_missing(values: Array) -> int:
    """How many are None, NaN, NaT or pandas' NA."""
    return sum(map(_is_missing, values.tolist())) if values.dtype.kind in "Of" else 0


def _is_missing(item: Any) -> bool:
    try:
        return item is None or bool(item != item)
    except TypeError:  # NA is neither like itself nor unlike
        return True


def _kind(item: Any) -> str:
    if isinstance(item, Number | np.bool_):
        return "number"
    return "str" if isinstance(item, str) else type(item).__name__  # numpy has a str of its own
