"""Memberships on a terminal: one row per client, one column per canonical model, darker for larger memberships."""

from __future__ import annotations

import torch
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text
from torch import Tensor

from ..runs import RunRecord, align
from .run_tables import spread_evenly

ROWS = 40
_BLOCKS, _ASCII = " ░▒▓█", " .:*#"
_COLOURS = ("cyan", "magenta", "yellow", "green", "blue", "red")
_WIDE, _NARROW, _MANY = 4, 2, 5  # widths of a cell in characters; narrow for more than _MANY canonical models


def membership_table(record: RunRecord, *, utf8: bool = True) -> Table:
    """Clients sorted by their largest membership, models by their share of the population; the truth on the right."""
    assert record.memberships is not None
    if record.truth is None:
        found, truth = record.memberships.double(), None
    else:
        found, truth = align(record.memberships, record.truth)
    models = found.mean(0).argsort(descending=True, stable=True)
    clients = _by_dominant_model(found[:, models])
    shown = [clients[i] for i in spread_evenly(len(clients), ROWS)]
    many = len(models) > _MANY
    table = Table(box=SIMPLE_HEAD, padding=(0, 0, 0, 1), collapse_padding=True)
    table.add_column("client", no_wrap=True, max_width=24)
    for place, share in enumerate(found.mean(0)[models].tolist()):
        table.add_column(_letter(place) if many else f"{_letter(place)} {share:.0%}", no_wrap=True)
    if truth is not None:
        table.add_column("", min_width=1)
        for place in range(len(models)):
            table.add_column("truth" if place == 0 else "", no_wrap=True)
    shades = [shade * (_NARROW if many else _WIDE) for shade in (_BLOCKS if utf8 else _ASCII)]
    for client in shown:
        cells = _cells(found[client, models], shades)
        if truth is not None:
            cells += [Text(), *_cells(truth[client, models], shades)]
        table.add_row(record.ids[client], *cells)
    if len(shown) < len(clients):
        table.caption = f"{len(shown)} of {len(clients)} clients, taken evenly from all in this order"
    return table


def _by_dominant_model(found: Tensor) -> list[int]:
    largest, model = found.max(1)
    order: list[int] = torch.argsort(model + (1 - largest), stable=True).tolist()  # 0 <= 1 - largest < 1
    return order


def _cells(memberships: Tensor, shades: list[str]) -> list[Text]:
    darkest = len(shades) - 1
    return [
        Text(shades[round(value * darkest)], _COLOURS[place % len(_COLOURS)])
        for place, value in enumerate(memberships.tolist())
    ]


def _letter(place: int) -> str:
    return chr(ord("A") + place) if place < 26 else str(place + 1)
