"""The sums of a reply as three vectors, each with a layout from which they are built again.

Counts are there in every reply. A site of which no client took part has no metrics and no totals: it cannot know which
names and shapes they would have.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...io.codec import join, specs_of, split
from ...sites import Describe, Evaluate, Reply, Request, Train
from ..site_requests import SumColumns

SUMS = Describe | Train | Evaluate | SumColumns  # requests that are answered with sums
COUNTS, METRICS, TOTALS = PARTS = ("counts", "metrics", "totals")
CLIPPED = "clipped"
_COUNTED = ("asked", "participants", "lost", "refused", "bytes_up", CLIPPED)


class ReplyPart(NamedTuple):
    """One vector of a reply."""

    values: Tensor  # (N,), float64
    layout: str  # names, types and shapes; the same at all sites


def split_sums(reply: Reply) -> dict[str, ReplyPart]:
    """What a reply has of each part."""
    counts = {name: value for name, value in reply.metrics.items() if name in _COUNTED}
    metrics = {name: value for name, value in reply.metrics.items() if name not in _COUNTED}
    trees: dict[str, Any] = {COUNTS: counts, METRICS: metrics, TOTALS: reply.totals}
    return {part: _flat(tree) for part, tree in trees.items() if tree or part == COUNTS}


def join_sums(reply: Reply, parts: dict[str, ReplyPart]) -> Reply:
    """The reply with sums that were taken apart by `split_sums`."""
    trees = {part: _tree(*parts[part]) for part in parts}
    metrics = {**trees.get(COUNTS, {}), **trees.get(METRICS, {})}
    return reply._replace(totals=trees.get(TOTALS, {}), metrics=metrics)


def clients_counted(request: Request, reply: Reply) -> list[int]:
    """Of how many clients the sums of a reply are, one number for each group of sums."""
    names: list[str] = []
    if isinstance(request, Train):
        names = ["participants"]
    elif isinstance(request, Evaluate):
        names = [name for name in reply.metrics if name.endswith(".clients")]
    elif isinstance(request, Describe | SumColumns):
        names = ["clients"]
    return [int(reply.metrics[name]) for name in names]


def _flat(tree: Any) -> ReplyPart:
    layout, tensors = split(tree)
    flat = [tensor.detach().cpu().double().flatten() for tensor in tensors]
    return ReplyPart(torch.cat([torch.zeros(0, dtype=torch.float64), *flat]), layout.decode())


def _tree(values: Tensor, layout: str) -> Any:
    specs = specs_of(layout.encode())
    sizes = [torch.Size(shape).numel() for _, shape in specs]
    parts = torch.split(values, sizes)
    whole = [part.reshape(shape).to(dtype) for part, (dtype, shape) in zip(parts, specs, strict=True)]
    return join(layout.encode(), whole)
