"""What samples hold besides plain tensors: images as bytes, and rows of a file that is mapped into memory."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ppfl.errors import DataError

Inputs = Any  # a tensor (n, ...), or MappedRows, which has those of a tensor's methods that are needed
_ROWS_AT_A_TIME = 4096
_MAPPED_TYPES = (torch.float32, torch.float64, torch.uint8, torch.int64)


def scaled(x: Tensor) -> Tensor:
    """Inputs as a network takes them: bytes, which are images, become floats from 0 to 1; all else stays.

    >>> scaled(torch.tensor([0, 51, 255], dtype=torch.uint8))
    tensor([0.0000, 0.2000, 1.0000])
    """
    return x.to(torch.float32).div_(255) if x.dtype == torch.uint8 else x


class MappedRows:
    """Rows of a tensor whose memory is a file: they are read when a batch needs them, and never copied as a whole.

    To group, to select and to hold out rows is to choose row numbers. Arrays of np.load(..., mmap_mode="r") become such
    rows by themselves; torch does not say which tensors are files, so these are given as MappedRows(tensor).

    >>> rows = MappedRows(torch.arange(12.0).reshape(6, 2), torch.tensor([4, 0]))
    >>> len(rows), tuple(rows.shape), rows[:1]
    (2, (2, 2), tensor([[8., 9.]]))
    """

    def __init__(self, values: Tensor, rows: Tensor | None = None) -> None:
        if values.dtype not in _MAPPED_TYPES:
            raise DataError(
                f"x is {values.dtype} in a file; to be used without a copy it must be float32, int64 for tokens, or "
                f"uint8 for images: write it so, or read it whole with np.array(x)"
            )
        self.values, self.rows = values, torch.arange(len(values)) if rows is None else rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, which: slice) -> Tensor:
        return self.gather(torch.arange(len(self))[which])

    @property
    def shape(self) -> torch.Size:
        return torch.Size((len(self.rows), *self.values.shape[1:]))

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    def is_floating_point(self) -> bool:
        return self.values.is_floating_point()

    def element_size(self) -> int:
        return self.values.element_size()

    def numel(self) -> int:
        return self.shape.numel()

    def contiguous(self) -> MappedRows:
        """Itself: batches are contiguous anyway."""
        return self

    def index_select(self, dim: int, rows: Tensor) -> MappedRows:
        """Other rows of the same file."""
        assert dim == 0, "samples are chosen by row"
        return MappedRows(self.values, self.rows[rows.to(self.rows.device)])

    def gather(self, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """These rows (N,) in memory."""
        return torch.index_select(self.values, 0, self.rows[rows.to(self.rows.device)], out=out)

    def blocks(self) -> list[slice]:
        """Slices of so many rows as may be in memory together."""
        return row_blocks(len(self))

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Any:
        """On the CPU it stays in its file; on another device it is a tensor there."""
        if dtype not in (None, self.dtype):
            raise DataError(f"x is {self.dtype} in a file and stays there; write a file of {dtype} instead")
        if device is None or torch.device(device).type == "cpu":
            return self
        return torch.cat([self[block].to(device) for block in self.blocks()])


def row_blocks(n: int) -> list[slice]:
    """n rows in slices of so many as may be in memory together."""
    return [slice(at, at + _ROWS_AT_A_TIME) for at in range(0, n, _ROWS_AT_A_TIME)]


def mapped_rows(x: Any) -> MappedRows | None:
    """All rows of an array whose memory is a file; None if it is in memory."""
    if isinstance(x, MappedRows):
        return x
    return MappedRows(_tensor_of_map(x)) if isinstance(x, np.ndarray) and _is_mapped(x) else None


def _is_mapped(array: np.ndarray[Any, Any]) -> bool:
    base: Any = array
    while isinstance(base, np.ndarray):
        if isinstance(base, np.memmap):
            return True
        base = base.base
    return False


def _tensor_of_map(array: np.ndarray[Any, Any]) -> Tensor:
    if not array.dtype.isnative or array.dtype.kind not in "biuf":
        raise DataError(f"x is {array.dtype} in a file; expected numbers in this machine's byte order: write them so")
    with warnings.catch_warnings():  # torch warns of memory that must not be written to, and samples never are
        warnings.simplefilter("ignore", UserWarning)
        return torch.from_numpy(np.asarray(array))
