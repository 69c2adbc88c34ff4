"""The fingerprint of a federation, and the classes that its labels have."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from ppfl.core.ids import NumberedIds
from ppfl.data.files import check_limit
from ppfl.data.lazy import LazySamples
from ppfl.data.samples import Inputs, Samples, blocks_of
from ppfl.errors import DataError

if TYPE_CHECKING:
    from ppfl.data.federation import Federation


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
    ids = repr(federation.ids) if isinstance(federation.ids, NumberedIds) else federation.ids
    lazy = [repr(part) for part in federation.splits.values() if isinstance(part, LazySamples)]
    digest = hashlib.sha256(json.dumps([ids, federation.classes, federation.features, *lazy]).encode())
    arrays: dict[str, Inputs] = {}
    for split, part in federation.splits.items():
        if isinstance(part, LazySamples):
            arrays[f"{split} clients"] = torch.as_tensor(part.clients)
        else:
            arrays |= {f"{split} x": part.x, f"{split} y": part.y, f"{split} offsets": part.offsets}
    arrays["weights"] = federation.weights
    if federation.truth is not None:
        arrays["truth"] = federation.truth.memberships
    for name, values in arrays.items():
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}".encode())
        for block in blocks_of(values) if values.shape else [values]:
            array: Any = block.detach().cpu().contiguous().numpy()
            digest.update(memoryview(array).cast("B"))
    return digest.hexdigest()[:32]
