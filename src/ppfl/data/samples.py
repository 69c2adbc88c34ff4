"""Samples of many clients, one contiguous tensor per field, or a file; a client is a slice between two offsets."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ppfl.core.draws import hashed, name_keys, shuffles
from ppfl.core.losses import IGNORED
from ppfl.errors import DataError

Inputs = Any  # a tensor (n, ...), or MappedRows, which has those of a tensor's methods that are needed
BLOCK = 1 << 20  # samples that are shuffled together
# float64 is accepted for tests that compare results exactly; every reader returns float32
_FLOATS = (torch.float32, torch.float64)
_ROWS_AT_A_TIME = 4096
_MAPPED_TYPES = (torch.float32, torch.float64, torch.uint8, torch.int64)


@dataclass(frozen=True, eq=False)
class Samples:
    """Features, targets and the offsets that divide them into clients.

    >>> s = Samples(torch.zeros(5, 2), torch.tensor([0, 1, 0, 1, 1]), torch.tensor([0, 2, 5]))
    >>> s.sizes.tolist(), s.client_of().tolist()
    ([2, 3], [0, 0, 1, 1, 1])
    """

    x: Inputs  # (n, ...) float features, integer tokens, or uint8 images, which batches scale to 0..1
    y: Tensor  # (n,) or (n, ...): int64 labels (IGNORED where several are padded), or float targets
    offsets: Tensor  # (M + 1,) int64

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise DataError(f"x has {len(self.x)} samples but y has {len(self.y)}; they must pair row by row")
        if self.x.dtype not in _FLOATS and (self.x.is_floating_point() or self.x.dtype.is_complex):
            raise DataError(f"x is {self.x.dtype}; expected float32 (or integers, for tokens): use x.float()")
        if self.y.dtype not in (torch.int64, *_FLOATS):
            raise DataError(f"y is {self.y.dtype}; labels must be int64 and targets float32: use y.long() or y.float()")
        if self.y.ndim == 0 or (not self.y[:1].numel() and len(self.y)):
            raise DataError(
                f"y has shape {tuple(self.y.shape)}; expected (n,) or (n, ...): at least one value per sample"
            )
        _check_offsets(self.offsets, len(self.x))

    def __len__(self) -> int:
        return len(self.x)

    @property
    def sizes(self) -> Tensor:
        """Number of samples of each client (M,)."""
        return self.offsets.diff()

    @property
    def shares(self) -> Tensor:
        """The share n_i / n of each client in all samples, float32 (M,)."""
        return (self.sizes.double() / len(self)).float()

    @cached_property
    def cpu_sizes(self) -> Tensor:
        """`sizes` on the CPU, where indices are made."""
        return self.sizes.cpu()

    @cached_property
    def starts(self) -> Tensor:
        """Where each client begins (M,), on the CPU."""
        return self.offsets[:-1].cpu()

    @property
    def n_clients(self) -> int:
        """Number of clients, including clients without samples."""
        return len(self.offsets) - 1

    def first_inputs(self, n: int) -> Tensor:
        """The inputs of the first samples, as a network takes them."""
        return scaled(self.x[:n])

    def example_targets(self) -> Tensor:
        """Targets to check a loss with: all of them, or some where they are drawn when a client takes part."""
        return self.y

    @property
    def bytes_per_sample(self) -> int:
        """Of the inputs, in a batch."""
        dtype = torch.float32 if self.x.dtype == torch.uint8 else self.x.dtype
        return int(dtype.itemsize * self.x.shape[1:].numel())

    def label_range(self) -> tuple[int, int]:
        """The lowest and the highest label that counts; (0, 0) where there is none."""
        labels = self.y if self.y.ndim == 1 else self.y[self.y != IGNORED]
        lowest, highest = labels.aminmax() if len(labels) else (0, 0)
        return int(lowest), int(highest)

    def client_of(self) -> Tensor:
        """Position of the client of each sample (n,)."""
        return torch.repeat_interleave(torch.arange(self.n_clients, device=self.offsets.device), self.sizes)

    def client(self, position: int) -> Samples:
        """One client's samples, as views of the same memory."""
        start, stop = int(self.offsets[position]), int(self.offsets[position + 1])
        return Samples(self.x[start:stop], self.y[start:stop], self.offsets.new_tensor([0, stop - start]))

    def in_memory(self, clients: Tensor) -> tuple[Samples, Tensor]:
        """Samples that hold those of the clients at these positions, and the positions that they have there."""
        return self, clients

    def take(self, positions: Sequence[int] | Tensor) -> Samples:
        """The clients at these positions, in this order."""
        at = torch.as_tensor(positions, dtype=torch.int64, device=self.offsets.device)
        sizes = self.sizes[at]
        offsets = offsets_of(sizes)
        rows = torch.repeat_interleave(self.offsets[at] - offsets[:-1], sizes)
        rows += torch.arange(len(rows), device=rows.device)
        return Samples(self.x.index_select(0, rows), self.y[rows], offsets)

    def where(self, keep: Tensor) -> Samples:
        """The samples where a mask (n,) is true; a client may have none left."""
        rows = keep.nonzero().flatten()
        return Samples(self.x.index_select(0, rows), self.y[rows], offsets_of(keep)[self.offsets])

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Samples:
        """Move to a device; a dtype is applied to floating-point fields only."""

        def move(t: Inputs) -> Inputs:
            return t.to(device=device, dtype=dtype if t.is_floating_point() else None)

        return Samples(move(self.x), move(self.y), move(self.offsets))


def random_rows(n: int, samples: int, seed: int, name: str) -> Tensor:
    """Some of the n rows of a data set in random order; a smaller sample is the beginning of a larger one.

    >>> torch.equal(random_rows(9, 3, 0, "data"), random_rows(9, 9, 0, "data")[:3])
    True
    """
    if not 1 <= samples <= n:
        raise DataError(f"{samples} samples asked of {name}, which has {n}; ask for 1 to {n}")
    return hashed(seed, "drawn rows", name, torch.arange(n)).argsort()[:samples]


def held_out(sizes: Tensor, ids: Sequence[str], fraction: float, seed: int, into: str) -> Tensor:
    """Mask (n,) of the samples to hold out: a fraction of the samples of each client, never all of them.

    The samples held out of a client depend only on (seed, into, its id, its size), so they are the same for any other
    clients and any order of clients.

    >>> held_out(torch.tensor([1, 5]), ["small", "large"], 0.2, seed=0, into="test").sum()
    tensor(1)
    """
    if not 0 <= fraction < 1:
        raise DataError(f"{into} fraction is {fraction}; expected a number from 0 to below 1, such as 0.2")
    sizes = sizes.cpu()
    counts = torch.minimum(sizes - 1, (fraction * sizes.double() + 0.5).long())
    starts, keys = offsets_of(sizes), name_keys(ids)
    mask = torch.zeros(int(starts[-1]), dtype=torch.bool)
    largest_first = sizes.argsort(descending=True, stable=True)[: int((counts > 0).sum())]
    for run in similar_sizes(sizes[largest_first]):
        longest = int(sizes[largest_first[run.start]])
        for at in torch.split(largest_first[run], max(1, BLOCK // longest)):
            draws = hashed(seed, "hold out", into, keys[at, None, None], torch.arange(longest))
            first = shuffles(draws, sizes[at])[:, 0, : int(counts[at].max())]
            mask[(starts[at, None] + first)[torch.arange(first.shape[1]) < counts[at, None]]] = True
    if fraction and not bool(mask.any()):
        raise DataError(
            f"no client is large enough for a {into} sample (the largest has {int(sizes.max())}); "
            f"use a larger fraction than {fraction}, or 0"
        )
    return mask


def similar_sizes(sizes: Tensor, most: int | None = None) -> list[slice]:
    """Sizes (C,), largest first, in runs of at most `most` whose smallest is at least half the largest.

    >>> [sizes[run].tolist() for sizes in [torch.tensor([100, 90, 60, 4, 3])] for run in similar_sizes(sizes, most=2)]
    [[100, 90], [60], [4, 3]]
    """
    runs, first, most, all_ = [], 0, most or len(sizes), sizes.numpy()
    while first < len(all_):
        alike = int(np.count_nonzero(2 * all_[first : first + most] >= all_[first]))
        runs.append(slice(first, first + alike))
        first += alike
    return runs


def offsets_of(sizes: Tensor) -> Tensor:
    """Where each of some parts begins, and where the last one ends (M + 1,)."""
    return torch.cat([sizes.new_zeros(1), sizes.cumsum(0)]).long()


def _check_offsets(offsets: Tensor, n: int) -> None:
    if offsets.dtype != torch.int64 or offsets.ndim != 1 or len(offsets) < 1:
        raise DataError(f"offsets are {offsets.dtype} of shape {tuple(offsets.shape)}; expected int64 (clients + 1,)")
    if bool((offsets.diff() < 0).any()) or int(offsets[0]) != 0 or int(offsets[-1]) != n:
        raise DataError(
            f"offsets run from {int(offsets[0])} to {int(offsets[-1])} for {n} samples; they must start "
            f"at 0, never decrease and end at {n}: build them with Federation.from_arrays"
        )


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

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Any:
        """On the CPU it stays in its file; on another device it is a tensor there."""
        if dtype not in (None, self.dtype):
            raise DataError(f"x is {self.dtype} in a file and stays there; write a file of {dtype} instead")
        if device is None or torch.device(device).type == "cpu":
            return self
        return torch.cat([self[block].to(device) for block in row_blocks(len(self))])


def row_blocks(n: int) -> list[slice]:
    """n rows in slices of so many as may be in memory together."""
    return [slice(at, at + _ROWS_AT_A_TIME) for at in range(0, n, _ROWS_AT_A_TIME)]


def blocks_of(values: Inputs) -> Iterator[Tensor]:
    """The values. Those of a file, and bytes, come some rows at a time: all of them as floats may not fit in memory."""
    whole = isinstance(values, Tensor) and values.dtype != torch.uint8
    for block in [slice(None)] if whole else row_blocks(len(values)):
        yield values[block]


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
