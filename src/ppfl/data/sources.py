"""Clients from torch Datasets, whose items are pairs (x, y)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset

from ppfl.data.arrays import is_ragged, quoted
from ppfl.data.ids import text_ids
from ppfl.errors import DataError


def read_clients(datasets: Any, test: Any = None) -> tuple[Any, Any, list[str], list[bool] | None]:
    """Inputs, targets, client ids and marks of test items, of one dataset per client; no marks without `test`."""
    trained, tested = _by_client(datasets), _by_client({} if test is None else test)
    if unknown := sorted(set(tested) - set(trained)):
        raise DataError(f"clients {quoted(unknown)} have a dataset for testing and none for training; add it")
    pieces = [(name, read_items(one, f"the dataset of client {name!r}"), False) for name, one in trained.items()]
    pieces += [(name, read_items(one, f"the test set of client {name!r}"), True) for name, one in tested.items()]
    if not pieces:
        raise DataError("there is no dataset; give one for each client")
    x, y = (_join_parts(pair[at] for _, pair, _ in pieces) for at in (0, 1))
    ids = [name for name, (_, y), _ in pieces for _ in range(len(y))]
    marks = [mark for _, (_, y), mark in pieces for _ in range(len(y))]
    return x, y, ids, marks if tested else None


def _by_client(datasets: Any) -> dict[str, Any]:
    """Datasets by client id; those of a list are named by their position, "0", "1" and so on."""
    if isinstance(datasets, Mapping):
        names = text_ids(list(datasets)).tolist()
        if len(set(names)) < len(names):
            raise DataError("two datasets belong to the same client id, as text; join them with ConcatDataset")
        return dict(zip(names, datasets.values(), strict=True))
    if isinstance(datasets, Sequence) and not isinstance(datasets, str):
        return {str(at): dataset for at, dataset in enumerate(datasets)}
    raise DataError(
        f"datasets is a {type(datasets).__name__}; give a dict of one dataset per client id, a list of datasets, "
        f"or one dataset with clients=..."
    )


def read_items(dataset: Any, what: str) -> tuple[Any, Any]:
    """All inputs and all targets of a dataset, as arrays, or as lists where rows have different lengths.

    >>> read_items(TensorDataset(torch.zeros(3, 2), torch.tensor([0, 1, 0])), "train")[1]
    tensor([0, 1, 0])
    """
    if isinstance(dataset, DataLoader):
        raise DataError(f"{what} is a DataLoader; give its dataset: batches are drawn by the method's batch_size")
    if isinstance(dataset, IterableDataset):
        raise DataError(
            f"{what} is an IterableDataset, which has no length and no order; give its items as a list: "
            f"list(itertools.islice(dataset, 1000))"
        )
    rows: Sequence[int] | None = None
    if isinstance(dataset, Subset):
        dataset, rows = dataset.dataset, list(dataset.indices)
    if isinstance(dataset, TensorDataset):
        if len(dataset.tensors) != 2:
            raise DataError(f"{what} has {len(dataset.tensors)} tensors; expected two, inputs and targets")
        x, y = dataset.tensors
        return (x, y) if rows is None else (x[rows], y[rows])
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise DataError(f"{what} is a {type(dataset).__name__}; expected a Dataset with a length, or a list of pairs")
    pairs = [_pair(dataset[at], what, at) for at in (range(len(dataset)) if rows is None else rows)]
    if not pairs:
        raise DataError(f"{what} is empty; drop it, or check its files")
    return _joined([x for x, _ in pairs], f"{what} x"), _joined([y for _, y in pairs], f"{what} y")


def _join_parts(parts: Iterable[Any]) -> Any:
    """What several datasets hold, one after the other; a list where their rows have different lengths."""
    found = list(parts)
    if all(isinstance(part, Tensor) for part in found):
        if len({(part.shape[1:], part.dtype) for part in found}) == 1:
            return torch.cat(found)
        if any(part.dim() != 2 for part in found) or any(part.is_floating_point() for part in found):
            kinds = sorted({f"{part.dtype} {tuple(part.shape[1:])}" for part in found})
            raise DataError(f"clients have samples of {kinds[0]} and of {kinds[1]}; give all the same shape and type")
    return [row for part in found for row in (part.unbind() if isinstance(part, Tensor) else part)]


def _pair(item: Any, what: str, at: int) -> tuple[Any, Any]:
    if not isinstance(item, tuple | list) or len(item) != 2:
        kind = f"{type(item).__name__} of {len(item)}" if hasattr(item, "__len__") else type(item).__name__
        raise DataError(
            f"item {at} of {what} is a {kind}; expected a pair (x, y): choose two of its values, "
            f"or give TensorDataset(x, y) where these are arrays of all samples"
        )
    x, y = item
    return x, y


def _joined(values: list[Any], what: str) -> Any:
    """Rows as one tensor; texts, and rows of different lengths, as a list."""
    if isinstance(values[0], str) or is_ragged(values):
        return values
    try:
        if all(isinstance(value, Tensor) for value in values):
            return torch.stack(values)
        return torch.from_numpy(np.stack([np.asarray(value) for value in values]))
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(f"{what} cannot be stacked ({str(error).splitlines()[0]}); give every item one shape") from None
