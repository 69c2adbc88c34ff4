"""The ledger: one line of JSON for every message, with each of its fields, its bytes and who could read it.

There is one in the run folder and one at each site. It holds names, shapes and counts, never a value.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from ..algorithms.contract import Rows
from ..core.trees import named_leaves
from ..sites import Reply
from .envelope import Envelope

Direction = Literal["to site", "to server"]
TO_SERVER: Direction = "to server"
REFUSED = "refused"  # in a line that is no message: why something was not taken
SERVER_AND_SITE = "server and site"
SUM = "server and site, as a sum over the site's clients"
ROW = "server and site, client by client"


class Ledger:
    """Adds lines to a file, which a reader may follow."""

    def __init__(self, file: Path) -> None:
        self.file = file
        file.parent.mkdir(parents=True, exist_ok=True)

    def write(self, direction: Direction, envelope: Envelope, messages: Sequence[Any]) -> None:
        """Note a message and what is in it."""
        line = {
            "time": round(time.time(), 3),
            "direction": direction,
            "run": envelope.run,
            "site": envelope.site,
            "start": envelope.start,
            "number": envelope.number,
            "bytes": len(envelope.payload),
            "messages": [{"kind": type(one).__name__, "fields": list(_fields(one))} for one in messages],
        }
        with self.file.open("a", encoding="utf-8") as opened:
            opened.write(json.dumps(line, separators=(",", ":")) + "\n")

    def note(self, **what: Any) -> None:
        """Note something that is no message, such as a refusal."""
        with self.file.open("a", encoding="utf-8") as opened:
            opened.write(json.dumps({"time": round(time.time(), 3), **what}, separators=(",", ":")) + "\n")


def _fields(message: Any) -> Iterator[dict[str, Any]]:
    for name, value in zip(message._fields, message, strict=True):
        for leaf_name, leaf in _leaves(name, value):
            size = leaf.numel() * leaf.element_size()
            found = {"field": leaf_name, "shape": list(leaf.shape), "type": str(leaf.dtype).removeprefix("torch.")}
            yield found | {"bytes": size, "readers": _readers(message, leaf_name)}
        if isinstance(message, Reply) and name == "facts":
            for column, levels in value.get("levels", {}).items():
                yield {"field": f"facts.levels.{column}", "names": len(levels), "readers": SERVER_AND_SITE}
        elif isinstance(value, dict) and value and not isinstance(message, Reply):  # what is settled in plain values
            yield from [{"field": name, "readers": SERVER_AND_SITE}] * (not list(_leaves(name, value)))
        if isinstance(value, Rows) and value.ids:
            yield {"field": f"{name}.ids", "clients": len(value.ids), "readers": ROW}
        elif isinstance(value, str | int | float | tuple) or hasattr(value, "model_dump"):  # such as a method
            yield {"field": name, "readers": SERVER_AND_SITE}


def _leaves(name: str, value: Any) -> Iterator[tuple[str, Tensor]]:
    tree = value.values if isinstance(value, Rows) else value
    for path, leaf in named_leaves({name: tree}).items():
        if isinstance(leaf, Tensor):
            yield path, leaf


def _readers(message: Any, field: str) -> str:
    if isinstance(message, Reply):
        return ROW if field.startswith("rows") else SUM
    return ROW if field.startswith("own") else SERVER_AND_SITE
