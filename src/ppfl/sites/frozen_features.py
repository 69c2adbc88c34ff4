"""Outputs of frozen layers, computed once per sample and kept: a round then costs what is trained.

They are kept in memory, and in files of the folder PPFL_CACHE if that is set, so that other runs use them too. A sample
is found again by its content, so its features serve every partition, subset and split of the same data.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..core.dropout import refuse_side_effects
from ..core.parts import first_frozen_layers, layers_as_network
from ..core.population import Population
from ..data import Federation
from ..data.lazy import LazySamples
from ..data.samples import Inputs, MappedRows, mapped_rows, row_blocks, scaled

logger = logging.getLogger("ppfl")
_SAMPLES_AT_ONCE = 256
_IMAGES_AT_ONCE = 32  # what convolutions make of more images leaves the caches: twice as slow on a CPU
_MOST_BYTES = 4 << 30  # kept in memory; the features in use are kept by their sites as well
_KEY = np.dtype("S16")

ShowProgress = Callable[[int, int], None]  # samples done, and all of them
_show: ContextVar[ShowProgress | None] = ContextVar("show", default=None)


@contextmanager
def watch_frozen_layers(show: ShowProgress) -> Iterator[None]:
    """`show` is called after every batch of samples that runs through frozen layers."""
    token = _show.set(show)
    try:
        yield
    finally:
        _show.reset(token)


def run_frozen_layers(population: Population, federation: Federation) -> tuple[Population, Federation]:
    """The population without the frozen layers at its beginning, and a federation with their outputs as samples."""
    names = first_frozen_layers(population.architecture)
    if not names or isinstance(federation.train, LazySamples):  # outputs of samples that come and go are not kept
        return population, federation
    layers = layers_as_network(population.net, names).to(federation.train.x.device)
    refuse_side_effects(layers, federation.train.first_inputs(2))
    splits = federation.splits
    features = STORE.features(layers, [samples.x for samples in splits.values()])
    found: dict[str, Any] = {name: replace(splits[name], x=x) for name, x in zip(splits, features, strict=True)}
    return population.without_layers(names), replace(federation, features=None, **found)


class _Known(NamedTuple):
    """Features of samples that were computed together."""

    keys: np.ndarray[Any, Any]  # (n,), sorted
    rows: np.ndarray[Any, Any]  # (n,), where the sample of each key stands in `values`
    values: Inputs  # (n, ...): a tensor, or rows of a file

    @classmethod
    def of(cls, keys: np.ndarray[Any, Any], values: Inputs) -> _Known:
        order = keys.argsort()
        return cls(keys[order], order, values)

    def find(self, keys: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Which of these samples are here, and the rows of all (those of absent ones mean nothing)."""
        at = self.keys.searchsorted(keys).clip(max=max(len(self.keys) - 1, 0))
        return self.keys[at] == keys if len(self.keys) else np.zeros(len(keys), bool), self.rows[at]


class FeatureStore:
    """Features by layers and sample: those used last, and all that are in the folder PPFL_CACHE."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, list[_Known]] = OrderedDict()

    @property
    def folder(self) -> Path | None:
        """Where files are, if they are wanted."""
        return Path(os.environ["PPFL_CACHE"]) if os.environ.get("PPFL_CACHE") else None

    def features(self, layers: nn.Module, inputs: Sequence[Inputs]) -> list[Inputs]:
        """The outputs of the layers for all samples of each of these inputs, (n, ...)."""
        key = fingerprint(layers, inputs[0])
        known = self._kept.pop(key, None) or list(self._read(key))
        keys = [sample_keys(x) for x in inputs]
        missing = [_first_ones(_missing(known, each)) for each in keys]
        if any(len(at) for at in missing):
            names = np.concatenate([each[at] for each, at in zip(keys, missing, strict=True)])
            file = (
                None
                if self.folder is None
                else self.folder / key / f"{hashlib.sha256(names.tobytes()).hexdigest()[:16]}.npy"
            )
            known.append(_Known.of(names, _compute(layers, inputs, missing, names, file)))
        self._kept[key] = known
        while len(self._kept) > 1 and self._bytes_in_memory() > _MOST_BYTES:
            self._kept.popitem(last=False)
        return [_gather(known, each) for each in keys]

    def _bytes_in_memory(self) -> int:
        held = (each.values for known in self._kept.values() for each in known if isinstance(each.values, Tensor))
        return sum(values.numel() * values.element_size() for values in held)

    def _read(self, key: str) -> Iterator[_Known]:
        for file in sorted((self.folder / key).glob("*.keys")) if self.folder is not None else ():
            try:
                with file.open("rb") as content:
                    keys = np.load(content, allow_pickle=False)
                values = np.load(file.with_suffix(".npy"), mmap_mode="r", allow_pickle=False)
                if keys.dtype != _KEY or keys.shape != values.shape[:1]:
                    raise ValueError("keys and features do not fit")
            except (ValueError, OSError, EOFError):
                logger.warning("%s is damaged; its features are computed again", file)
                continue
            yield _Known.of(keys, mapped_rows(values))


STORE = FeatureStore()


def fingerprint(layers: nn.Module, x: Inputs) -> str:
    """Of what the layers are, their values and modes, and of the kind of a sample."""
    found = hashlib.blake2b(digest_size=16)
    for name, module in layers.named_modules():
        found.update(f"{name} {type(module).__module__}.{type(module).__qualname__} {module.extra_repr()} ".encode())
        found.update(str(module.training).encode())
    for name, tensor in layers.state_dict().items():
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        found.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
    found.update(f"{x.dtype} {tuple(x.shape[1:])}".encode())
    return found.hexdigest()


def sample_keys(x: Inputs) -> np.ndarray[Any, Any]:
    """(n,): 16 bytes for the content of each sample."""
    found: list[bytes] = []
    for block in row_blocks(len(x)):
        rows = x[block].detach().cpu().contiguous().flatten(1).view(torch.uint8).numpy()
        found += [hashlib.blake2b(row.data, digest_size=16).digest() for row in rows]
    return np.array(found, _KEY)


def _missing(known: Sequence[_Known], keys: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The keys that none of these has; the others are empty, so that their places stay."""
    rest = keys.copy()
    for each in known:
        rest[each.find(keys)[0]] = b""
    return rest


def _first_ones(keys: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Positions of the keys, the first of each, in order."""
    different, first = np.unique(keys, return_index=True)
    return np.sort(first[different != b""])


def _gather(known: Sequence[_Known], keys: np.ndarray[Any, Any]) -> Inputs:
    """The features of these samples. They stay in their file where one has them all."""
    for each in known:
        here, rows = each.find(keys)
        if here.all():
            in_order = len(rows) == len(each.values) and (np.diff(rows) == 1).all()
            return each.values if in_order else _select(each.values, rows)
    like = known[0].values
    found = torch.empty(len(keys), *like.shape[1:], dtype=like.dtype, device=like.device)
    for each in known:
        here, rows = each.find(keys)
        found[torch.from_numpy(here).to(like.device)] = _select(each.values, rows[here])[:]
    return found


def _select(x: Inputs, rows: np.ndarray[Any, Any]) -> Inputs:
    return x.index_select(0, torch.from_numpy(rows).to(x.device))


def _compute(
    layers: nn.Module,
    inputs: Sequence[Inputs],
    wanted: Sequence[np.ndarray[Any, Any]],
    keys: np.ndarray[Any, Any],
    file: Path | None,
) -> Inputs:
    """The features of the wanted rows of each input, one after the other.

    Files are written beside their place and renamed, the keys last, so that features with keys are whole.
    """
    are_images = len(inputs[0].shape) == 4
    at_once, n, done = _IMAGES_AT_ONCE if are_images else _SAMPLES_AT_ONCE, len(keys), 0
    layers = _channels_last(layers) if are_images else layers
    beside = None if file is None else file.with_name(f"{file.name}.{os.getpid()}.part")
    kept: Any = None
    show = _show.get()
    for x, rows in zip(inputs, wanted, strict=True):
        for start in range(0, len(rows), at_once):
            batch = scaled(_select(x, rows[start : start + at_once])[:])
            if are_images:
                batch = batch.contiguous(memory_format=torch.channels_last)
            with torch.inference_mode():
                found = layers(batch)
            if kept is None:
                logger.info("frozen layers: %d samples, %s numbers each", n, tuple(found.shape[1:]))
                kept = _empty(beside, (n, *found.shape[1:]), found)
            kept[done : done + len(found)] = found if beside is None else found.cpu().numpy()
            done += len(found)
            if show is not None:
                show(done, n)
    if file is None or beside is None:
        return kept
    kept.flush()
    beside.replace(file)
    with beside.open("wb") as content:
        np.save(content, keys, allow_pickle=False)
    beside.replace(file.with_suffix(".keys"))
    return MappedRows(torch.from_numpy(kept))


def _channels_last(layers: nn.Module) -> nn.Module:
    """A copy with the memory format in which convolutions are fastest."""
    moved: nn.Module = deepcopy(layers).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return moved


def _empty(file: Path | None, shape: tuple[int, ...], like: Tensor) -> Any:
    if file is None:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    file.parent.mkdir(parents=True, exist_ok=True)
    dtype = torch.empty(0, dtype=like.dtype).numpy().dtype
    return np.lib.format.open_memmap(file, mode="w+", dtype=dtype, shape=shape)
