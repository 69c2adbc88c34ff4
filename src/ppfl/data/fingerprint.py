"""The fingerprint of a federation, by which a run that is resumed recognises its data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch

from ppfl.core.ids import NumberedIds
from ppfl.data.lazy import LazySamples
from ppfl.data.samples import Inputs, MappedRows

if TYPE_CHECKING:
    from ppfl.data.federation import Federation


def fingerprint_federation(federation: Federation) -> str:
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
