"""A federation in one line, and as a card in a notebook: clients, samples, their kind, sizes of the first clients."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ppfl.core.card import Card, count_of, small_table
from ppfl.core.text import visible
from ppfl.data.inputs import MappedRows

if TYPE_CHECKING:
    from ppfl.data.federation import Federation

ROWS = 5  # clients in the table
CLASSES = 10  # names of classes that are shown
LETTERS = 40  # of an id or a class


def federation_card(federation: Federation) -> Card:
    """The facts of a federation."""
    sizes = federation.train.sizes
    low, middle, high = int(sizes.min()), int(sizes.median()), int(sizes.max())
    splits = federation.splits
    x = federation.train.x
    facts = [
        ("clients", f"{federation.n_clients:,}"),
        ("samples", ", ".join(f"{len(part):,} {split}" for split, part in splits.items())),
        ("per client", f"{low:,} train" if low == high else f"{low:,} to {high:,} train, median {middle:,}"),
        ("x", f"{tuple(x.shape[1:])} {_dtype(x.dtype)}{_where(x.device)}"),
        ("y", f"{_dtype(federation.train.y.dtype)}, {_targets(federation)}"),
    ]
    if federation.truth is not None:
        facts.append(("truth", count_of(federation.truth.memberships.shape[1], "true source")))
    ids = federation.ids[:ROWS]
    rows = [[_short(id_), *(f"{int(part.sizes[i]):,}" for part in splits.values())] for i, id_ in enumerate(ids)]
    more = federation.n_clients - len(ids)
    note = f"and {more:,} more" if more else ""
    return Card(f"Federation {_short(federation.name)}", facts, (small_table(["client", *splits], rows, note),))


def describe_federation(federation: Federation) -> str:
    """Name, clients, samples and their kind in one line."""
    train, n_classes = federation.train, federation.n_classes
    counts = " / ".join(f"{len(samples)} {split}" for split, samples in federation.splits.items())
    sizes = train.sizes
    kind = "real targets" if n_classes is None else f"{n_classes} classes"
    kind = kind if train.y.ndim == 1 else f"y {tuple(train.y.shape[1:])}, {kind}"
    shape = f"{tuple(train.x.shape[1:])}"
    shape += " bytes scaled to 0..1" if train.x.dtype == torch.uint8 else ""
    shape += " in a file" if isinstance(train.x, MappedRows) else ""
    known = f", {federation.truth.memberships.shape[1]} true sources" if federation.truth else ""
    return (
        f"{federation.name}: {federation.n_clients} clients, {counts} samples "
        f"({int(sizes.min())}-{int(sizes.max())} per client), x {shape}, {kind}{known}"
    )


def federation_line(federation: Federation) -> str:
    """The repr of a federation: its description, with the type of x."""
    facts = federation.describe().removeprefix(federation.name)
    return visible(f"<Federation {_short(federation.name)}{facts}, {_dtype(federation.train.x.dtype)}>")


def _targets(federation: Federation) -> str:
    if federation.classes is None:
        return "real targets"
    shown = ", ".join(map(_short, federation.classes[:CLASSES]))
    dots = ", …" if len(federation.classes) > CLASSES else ""
    return f"{len(federation.classes):,} class{'es' * (len(federation.classes) != 1)}: {shown}{dots}"


def _short(text: str) -> str:
    return text if len(text) <= LETTERS else text[: LETTERS - 1] + "…"


def _dtype(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def _where(device: object) -> str:
    return "" if str(device) == "cpu" else f" on {device}"
