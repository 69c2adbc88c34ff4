"""Outputs of frozen layers, computed once per sample and kept: a round then costs what is trained.

They are kept in memory, and in files of the folder PPFL_CACHE if that is set, so that other runs use them too. Files
are mapped into memory. What is kept is found again by a fingerprint of the layers and the data.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..core.frozen_layers import frozen_start, take_start
from ..core.population import Population
from ..data import Federation
from ..data.inputs import Inputs, MappedRows, mapped_rows, row_blocks, scaled
from ..data.lazy_samples import LazySamples
from ..data.samples import Samples

logger = logging.getLogger("ppfl")
_SAMPLES_AT_ONCE = 256
_MOST_BYTES = 4 << 30  # kept in memory; the features in use are kept by their sites as well


class FeatureStore:
    """Features by fingerprint: those used last, and all that are in the folder."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder
        self._kept: OrderedDict[str, Inputs] = OrderedDict()

    def features(self, layers: nn.Module, x: Inputs) -> Inputs:
        """The outputs of the layers for all samples, (n, ...)."""
        key = fingerprint(layers, x)
        found = self._kept.pop(key, None)
        if found is None:
            found = self._read(key, len(x))
        if found is None:
            found = _compute(layers, x, None if self.folder is None else self.folder / f"{key}.npy")
        self._kept[key] = found
        while len(self._kept) > 1 and sum(_bytes(each) for each in self._kept.values()) > _MOST_BYTES:
            self._kept.popitem(last=False)
        return found

    def _read(self, key: str, samples: int) -> Inputs | None:
        file = None if self.folder is None else self.folder / f"{key}.npy"
        if file is None or not file.exists():
            return None
        try:
            values = np.load(file, mmap_mode="r", allow_pickle=False)
        except (ValueError, OSError, EOFError):
            logger.warning("%s is damaged; its features are computed again", file)
            return None
        return mapped_rows(values) if len(values) == samples else None


STORE = FeatureStore()


def run_frozen_layers(
    population: Population, federation: Federation, store: FeatureStore | None = None
) -> tuple[Population, Federation]:
    """The population without the frozen layers at its beginning, and a federation with their outputs as samples."""
    names = () if population.inputs is not None else frozen_start(population.architecture)
    if not names or isinstance(federation.train, LazySamples):  # outputs of samples that come and go are not kept
        return population, federation
    store = store or _default_store()
    layers = take_start(population.net, names).to(federation.train.x.device)

    def computed(samples: Samples | None) -> Samples | None:
        return None if samples is None else replace(samples, x=store.features(layers, samples.x))

    splits: dict[str, Any] = {name: computed(getattr(federation, name)) for name in ("train", "test", "validation")}
    return population.after(names), replace(federation, features=None, **splits)


def _default_store() -> FeatureStore:
    folder = os.environ.get("PPFL_CACHE")
    STORE.folder = Path(folder) if folder else None
    return STORE


def fingerprint(layers: nn.Module, x: Inputs) -> str:
    """Of what the layers are, their values and modes, and of all samples."""
    found = hashlib.blake2b(digest_size=16)
    for name, module in layers.named_modules():
        found.update(f"{name} {type(module).__module__}.{type(module).__qualname__} {module.extra_repr()} ".encode())
        found.update(str(module.training).encode())
    for name, tensor in layers.state_dict().items():
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(_content(tensor))
    found.update(f"{x.dtype} {tuple(x.shape)}".encode())
    for block in row_blocks(len(x)):
        found.update(_content(x[block]))
    return found.hexdigest()


def _content(tensor: Tensor) -> Any:
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


def _compute(layers: nn.Module, x: Inputs, file: Path | None) -> Inputs:
    """A file is written beside its place and renamed, so that it is whole or not there."""
    kept: Any = None
    beside = None if file is None else file.with_name(f"{file.name}.{os.getpid()}.part")
    n = len(x)
    for start in range(0, n, _SAMPLES_AT_ONCE):
        with torch.no_grad():
            found = layers(scaled(x[start : start + _SAMPLES_AT_ONCE]))
        if kept is None:
            logger.info("frozen layers: %d samples, %s numbers each", n, tuple(found.shape[1:]))
            kept = _empty(beside, (n, *found.shape[1:]), found)
        kept[start : start + len(found)] = found if beside is None else found.cpu().numpy()
    if kept is None:
        return x
    if file is None or beside is None:
        return kept
    kept.flush()
    beside.replace(file)
    return MappedRows(torch.from_numpy(kept))


def _empty(file: Path | None, shape: tuple[int, ...], like: Tensor) -> Any:
    if file is None:
        return like.new_empty(shape)
    file.parent.mkdir(parents=True, exist_ok=True)
    dtype = torch.empty(0, dtype=like.dtype).numpy().dtype
    return np.lib.format.open_memmap(file, mode="w+", dtype=dtype, shape=shape)


def _bytes(x: Inputs) -> int:
    return 0 if isinstance(x, MappedRows) else int(x.numel() * x.element_size())
