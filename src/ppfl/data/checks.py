"""Checks of a federation, and of the clients that are asked of it."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ppfl.core.ids import ClientIds, NumberedIds, positions_of
from ppfl.core.ids import check_ids as check_names
from ppfl.core.losses import IGNORED
from ppfl.data.arrays import quoted
from ppfl.data.files import check_limit
from ppfl.data.lazy import LazySamples
from ppfl.data.samples import Samples, blocks_of
from ppfl.errors import DataError

if TYPE_CHECKING:
    from ppfl.data.federation import Federation


def check_federation(federation: Federation) -> None:
    """All that a federation promises. It reads all samples, so it runs once, where a federation is built."""
    ids, splits = federation.ids, federation.splits
    check_ids(ids, splits)
    check_train(ids, federation.train.sizes)
    check_alike(splits)
    check_text(federation.features or (), "feature")
    check_text(federation.classes or (), "class")
    for split, samples in splits.items():
        check_finite(ids, split, samples)
        if federation.classes is not None:
            check_labels(ids, split, samples, len(federation.classes))
    check_weights(ids, federation.weights)
    if federation.truth is not None and len(federation.truth.memberships) != len(ids):
        found = len(federation.truth.memberships)
        raise DataError(f"truth has {found} rows but there are {len(ids)} clients; give one row per client")


def check_ids(ids: ClientIds, splits: Mapping[str, Samples]) -> None:
    """Client ids are unique strings, one for each slice of the samples."""
    check_limit("clients", len(ids), f"there are {len(ids):,} clients")
    check_names(ids)
    for split, samples in splits.items():
        if samples.n_clients != len(ids):
            raise DataError(
                f"{split} has {samples.n_clients} clients but there are {len(ids)} ids; give one id per client"
            )


def check_text(names: tuple[str, ...], what: str) -> None:
    """Names can be written to files."""
    for name in names:
        try:
            name.encode()
        except (UnicodeEncodeError, AttributeError):
            raise DataError(f"{what} {name!r} cannot be written as UTF-8; replace the character, or use str") from None


def known_positions(wanted: Sequence[str], ids: ClientIds, name: str) -> list[int]:
    """Positions of the clients that are asked for; all must be among those of the federation with this name."""
    where = positions_of(ids)
    unknown = [id_ for id_ in wanted if id_ not in where]
    if unknown:
        close = [] if isinstance(ids, NumberedIds) else difflib.get_close_matches(unknown[0], ids, n=1)
        example = (close or ids[:1])[0]
        raise DataError(f"no client {quoted(unknown)} among the {len(ids)} of {name}; ids look like {example!r}")
    return [where[id_] for id_ in wanted]


def check_train(ids: ClientIds, sizes: Tensor) -> None:
    """Every client has a training sample; without one, nothing can be learned for it."""
    if not ids:
        raise DataError("the federation has no client; expected at least one: check the rows that were read")
    empty = [ids[i] for i in (sizes == 0).nonzero().flatten().tolist()]
    if empty:
        raise DataError(f"clients {quoted(empty)} have no training sample; drop them, or hold out less of their data")


def check_alike(splits: Mapping[str, Samples]) -> None:
    """All splits have the same shape and type of samples, so that a model fits all of them."""
    train = splits["train"]
    for split, samples in splits.items():
        found, expected = (
            (tuple(s.x.shape[1:]), s.x.dtype, tuple(s.y.shape[1:]), s.y.is_floating_point()) for s in (samples, train)
        )
        if found != expected:
            raise DataError(
                f"{split} samples are {_kind(*found)} but train samples are {_kind(*expected)}; use one form for all"
            )


def _kind(shape: tuple[int, ...], dtype: torch.dtype, target: tuple[int, ...], real: bool) -> str:
    return f"{dtype} {shape} with {'float targets' if real else 'labels'}{f' {target}' if target else ''}"


def check_finite(ids: ClientIds, split: str, samples: Samples) -> None:
    """No value is NaN or infinite; one such value would spoil every shared model in one round."""
    if isinstance(samples, LazySamples):
        return  # what it draws is finite
    for field, values in {"x": samples.x, "y": samples.y}.items():
        if not values.is_floating_point() or all(_is_finite(block) for block in blocks_of(values)):
            continue
        bad = torch.cat([(~block.isfinite()).reshape(len(block), -1).any(1) for block in blocks_of(values)])
        counts = torch.bincount(samples.client_of()[bad], minlength=len(ids))
        worst = int(counts.argmax())
        raise DataError(
            f"{split} {field} has NaN or infinity in {int(bad.sum())} samples, {int(counts[worst])} of them "
            f"of client {ids[worst]!r}; drop or fill them first"
        )


def _is_finite(values: Tensor) -> bool:
    # aminmax propagates NaN and needs no memory; isfinite would allocate a quarter of the size of the data
    return not values.numel() or bool(torch.stack(values.aminmax()).isfinite().all())


def check_labels(ids: ClientIds, split: str, samples: Samples, n_classes: int) -> None:
    """Labels are whole numbers from 0 to n_classes - 1."""
    if samples.y.is_floating_point():
        raise DataError(f"{split} y is {samples.y.dtype} but classes are given; labels must be integers: use y.long()")
    lowest, highest = samples.label_range()
    if lowest < 0 or highest >= n_classes:
        wrong = (samples.y < 0) | (samples.y >= n_classes)
        if samples.y.ndim > 1:
            wrong &= samples.y != IGNORED
        at, *_ = where = tuple(wrong.nonzero()[0].tolist())
        raise DataError(
            f"{split} label {int(samples.y[where])} of client {ids[int(samples.client_of()[at])]!r} is outside "
            f"0..{n_classes - 1}; number the classes from 0, or use float targets for regression"
        )


def check_weights(ids: ClientIds, weights: Tensor) -> None:
    """Client weights p_i are positive and sum to 1."""
    if weights.shape != (len(ids),) or not weights.is_floating_point():
        raise DataError(f"weights are {weights.dtype} of shape {tuple(weights.shape)}; expected float32 ({len(ids)},)")
    wrong = ~(weights.isfinite() & (weights > 0))
    if bool(wrong.any()):
        at = int(wrong.nonzero()[0])
        raise DataError(
            f"weight of client {ids[at]!r} is {float(weights[at])}; expected a positive number: "
            f"drop the client with select() if it should not count"
        )
    if abs(float(weights.double().sum()) - 1) > 1e-4:
        raise DataError(f"weights sum to {float(weights.sum()):.6g}, not 1; use weights / weights.sum()")
