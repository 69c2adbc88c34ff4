"""What a federation is in short: its fingerprint, shares of all samples, counts of labels, means of features."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ppfl.core.ids import NumberedIds
from ppfl.core.losses import IGNORED
from ppfl.data.files import check_limit
from ppfl.data.lazy import LazySamples
from ppfl.data.samples import Inputs, MappedRows, Samples, row_blocks, scaled
from ppfl.errors import DataError

if TYPE_CHECKING:
    from ppfl.data.federation import Federation


def size_shares(train: Samples) -> Tensor:
    """The share n_i / n of each client in all samples, float32 (M,).

    >>> size_shares(Samples(torch.zeros(4, 1), torch.zeros(4), torch.tensor([0, 1, 4])))
    tensor([0.2500, 0.7500])
    """
    shares: Tensor = train.sizes.double() / len(train)
    return shares.float()


def count_labels(samples: Samples, n_classes: int) -> Tensor:
    """How often each client has each class (M, classes), int64.

    >>> count_labels(Samples(torch.zeros(3, 1), torch.tensor([1, 1, 0]), torch.tensor([0, 2, 3])), 2).tolist()
    [[0, 2], [1, 0]]
    """
    n_clients = samples.n_clients
    size = n_clients * n_classes * samples.y.itemsize
    what = f"labels of {n_clients:,} clients in {n_classes:,} classes take {size:,} bytes to count"
    check_limit("bytes", size, what, "use fewer classes or another affinity, or ")
    cells = samples.client_of() * n_classes + samples.y.movedim(0, -1)
    cells = cells.flatten() if samples.y.ndim == 1 else cells[samples.y.movedim(0, -1) != IGNORED]
    return torch.bincount(cells, minlength=n_clients * n_classes).reshape(n_clients, -1)


def mean_features(train: Samples) -> Tensor:
    """Mean features of each client (M, d), features flattened.

    >>> mean_features(Samples(torch.tensor([[1.0], [3.0], [7.0]]), torch.zeros(3), torch.tensor([0, 2, 3]))).tolist()
    [[2.0], [7.0]]
    """
    x = train.x
    if not x.is_floating_point() and x.dtype != torch.uint8:
        raise DataError(f"x is {x.dtype}, and tokens have no mean; use label_counts()")
    total, owner = torch.zeros(0), train.client_of()
    in_memory = isinstance(x, Tensor) and x.is_floating_point()
    for block in [slice(None)] if in_memory else row_blocks(len(x)):
        flat = scaled(x[block]).flatten(1)
        total = total if total.numel() else flat.new_zeros(train.n_clients, flat.shape[1])
        total.index_add_(0, owner[block], flat)
    return total.div_(train.sizes[:, None])


def number_classes(splits: Mapping[str, Samples]) -> tuple[str, ...]:
    """Names of the classes where none are given: the numbers from 0 to the largest label.

    >>> number_classes({"train": Samples(torch.zeros(2, 1), torch.tensor([0, 2]), torch.tensor([0, 2]))})
    ('0', '1', '2')
    """
    ranges = [part.label_range() for part in splits.values() if len(part) and not part.y.is_floating_point()]
    lowest, highest = min(low for low, _ in ranges), max(high for _, high in ranges)
    advice = 'number the classes from 0, use task = "regression", or '
    check_limit("classes", highest + 1, f"labels go up to {highest:,}, so there are {highest + 1:,} classes", advice)
    if lowest == highest:
        raise DataError(
            f"every label is {lowest}; classification needs two classes: check the target column, "
            f"or give the names of all classes if other sites have the others"
        )
    return tuple(str(i) for i in range(highest + 1))


def fingerprint_of(federation: Federation) -> str:
    """A digest of everything in a federation but its name.

    Lazy samples are not drawn for it: the repr of their source and the numbers of their clients stand for them.
    """
    lazy = [part for part in federation.splits.values() if isinstance(part, LazySamples)]
    ids = repr(federation.ids) if isinstance(federation.ids, NumberedIds) else federation.ids
    about = [ids, federation.classes, federation.features, *map(repr, lazy)]
    digest = hashlib.sha256(json.dumps(about).encode())
    arrays = _arrays(federation)
    # rows of files come first; this order is part of every fingerprint that a run folder holds
    for name, values in sorted(arrays.items(), key=lambda item: not isinstance(item[1], MappedRows)):
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}".encode())
        for block in _blocks(values):
            digest.update(memoryview(block.numpy()).cast("B"))
    return digest.hexdigest()[:32]


def _arrays(federation: Federation) -> dict[str, Inputs]:
    """All arrays of a federation by name."""
    arrays: dict[str, Inputs] = {}
    for split, part in federation.splits.items():
        if not isinstance(part, LazySamples):
            arrays |= {f"{split} x": part.x, f"{split} y": part.y, f"{split} offsets": part.offsets}
    for split, part in federation.splits.items():
        if isinstance(part, LazySamples):
            arrays[f"{split} clients"] = torch.as_tensor(part.clients)
    arrays["weights"] = federation.weights
    if federation.truth is not None:
        arrays["truth"] = federation.truth.memberships
    return arrays


def _blocks(values: Inputs) -> Iterator[Inputs]:
    """The values on the CPU; those of a file some rows at a time, because they may not fit in memory together."""
    if isinstance(values, MappedRows):
        yield from (values[block] for block in values.blocks())
    else:
        yield values.detach().cpu().contiguous()
