"""The weights of clients' memberships in less than three bytes each, for files: they are most of the size of a model.

Logarithms are rounded, so that every weight has the same relative error, 3e-6 at most, and the bytes are compressed.
The means, variances and covariances of the memberships are stored exactly, and the weights that are read back are
corrected to have them, so that rounding errors do not add up in predictions.
"""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...errors import DataError

_STEPS, _RANGE = (1 << 22) - 1, 21.0  # weights below e^-21 of the largest one become 0
_CLIENTS_AT_ONCE = 500
_SMALLEST = 1e-12  # relative to the largest, for directions in which a client's points do not differ


class CompactWeights(NamedTuple):
    """Weights (M, G) of points, and the moments that they must have."""

    shape: tuple[int, int]
    content: Tensor  # bytes: 22 bits per weight as three planes of bytes, compressed by zlib
    moments: Tensor  # (M, R)


def compress(memberships: Any) -> CompactWeights:
    """From memberships with `weights` and `points`."""
    weights = memberships.weights
    logs = (weights / weights.amax(1, keepdim=True)).log().div_(_RANGE).add_(1).clamp_(min=0)
    levels = (logs * _STEPS).round_().to(torch.int32).numpy()
    planes = np.stack([(levels >> shift) & 255 for shift in (0, 8, 16)]).astype(np.uint8)
    found = [torch.zeros(0, _count(memberships), dtype=torch.float64)]
    for some in torch.split(torch.arange(len(weights)), _CLIENTS_AT_ONCE):
        found.append(torch.bmm(_products(memberships.points(some).mT), weights[some][..., None])[..., 0])
    content = torch.frombuffer(bytearray(zlib.compress(planes.tobytes())), dtype=torch.uint8)
    return CompactWeights((len(weights), weights.shape[1]), content, torch.cat(found))


def expand(compact: CompactWeights, memberships: Any) -> Tensor:
    """The weights (M, G), with the stored moments: w (1 + b' products), where b solves a small linear system."""
    rough = _rough_weights(compact)
    for some in torch.split(torch.arange(len(rough)), _CLIENTS_AT_ONCE):
        products = _products(memberships.points(some).mT)  # (m, R, G)
        weights = rough[some]
        weighted = products * weights[:, None]
        missing = compact.moments[some] - weighted.sum(2)
        size, axes = torch.linalg.eigh(weighted @ products.mT)
        inverse = torch.where(size > _SMALLEST * size[:, -1:], 1 / size.clamp_min(1e-300), 0.0)
        b = axes @ (inverse[..., None] * (axes.mT @ missing[..., None]))
        rough[some] = (weights * (1 + (b.mT @ products)[:, 0])).clamp_min_(0.0)
    return rough


def _rough_weights(compact: CompactWeights) -> Tensor:
    size = 3 * compact.shape[0] * compact.shape[1]
    reader = zlib.decompressobj()
    try:
        planes = reader.decompress(compact.content.numpy().tobytes(), size + 1)
    except zlib.error as error:
        raise DataError(f"weights of memberships cannot be read ({error})") from None
    if len(planes) != size:
        raise DataError(f"weights of memberships have {len(planes)} bytes instead of {size}")
    low, middle, high = np.frombuffer(planes, dtype=np.uint8).reshape(3, *compact.shape).astype(np.int32)
    levels = torch.from_numpy(low + (middle << 8) + (high << 16))
    rough: Tensor = (levels.double() / _STEPS).sub_(1).mul_(_RANGE).exp_().mul_(levels > 0)
    return rough / rough.sum(1, keepdim=True)


def _products(points: Tensor) -> Tensor:
    """1, memberships, and products of two of them (m, R, G), all but those with the last one, which the others give."""
    free = points[:, :-1]
    rows, columns = torch.tril_indices(free.shape[1], free.shape[1])
    return torch.cat([torch.ones_like(points[:, :1]), free, free[:, rows] * free[:, columns]], 1)


def _count(memberships: Any) -> int:
    free = int(memberships.points(torch.arange(1)).shape[2]) - 1
    return 1 + free + free * (free + 1) // 2
