"""The ledger: one line of JSON for every call, with each field that left, its bytes and who could read it.

There is one in the run folder and one at each site. It holds names, shapes and counts, never a value. Each line has the
SHA-256 of the line before it, so that a line that was changed or cut out is found. `federation status` reads it.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from ..algorithms.contract import Rows
from ..core.trees import named_leaves
from ..errors import CheckpointError
from ..io.files import damaged
from ..sites import Reply
from .messages import Masked, Ready

BEFORE = "before"  # the key of the digest of the line before
SUM, MASKED, ROW, FACT = "sum over clients", "sum, read in a total over sites alone", "client by client", "in the open"


class Ledger:
    """Adds lines to a file, which a reader may follow."""

    def __init__(self, file: Path) -> None:
        self.file = file
        file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lines = file.read_bytes().splitlines(keepends=True) if file.is_file() else []
        if lines and not lines[-1].endswith(b"\n"):  # a kill cut it short
            os.truncate(file, sum(map(len, lines[:-1])))
            lines.pop()
        self._before = sha256(lines[-1] if lines else b"").hexdigest()

    def append(self, **what: Any) -> None:
        """Add a line, which is on the disk then."""
        line = json.dumps({"time": round(time.time(), 3), **what, BEFORE: self._before}, separators=(",", ":"))
        data = line.encode() + b"\n"
        handle = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            os.write(handle, data)
            os.fsync(handle)
        finally:
            os.close(handle)
        self._before = sha256(data).hexdigest()


def verify(file: Path) -> int:
    """How many lines a ledger has; CheckpointError where one of them was changed, or is missing."""
    before, count = sha256(b"").hexdigest(), 0
    for line in file.read_bytes().splitlines(keepends=True) if file.is_file() else ():
        if not line.endswith(b"\n"):
            break
        try:
            said = json.loads(line)[BEFORE]
        except (ValueError, KeyError, TypeError):
            said = None
        if said != before:
            raise damaged(file, f"has a line {count + 1} that does not follow the one before it")
        before, count = sha256(line).hexdigest(), count + 1
    return count


def fields_of(replies: Sequence[Any]) -> list[dict[str, Any]]:
    """What is in the replies of a site: of every field its shape, its bytes, who can read it, and over how many clients
    and samples it is."""
    return [field for reply in replies for field in _fields(reply)]


def _fields(reply: Any) -> Iterator[dict[str, Any]]:
    if isinstance(reply, Masked):
        yield from (_field(f"masked.{name}", leaf, MASKED) for name, leaf in reply.parts.items())
    if not isinstance(reply, Reply):
        return
    counts = {name: int(reply.metrics[key]) for name, key in (("clients", "participants"), ("samples", "samples"))
              if key in reply.metrics}  # fmt: skip
    for path, leaf in named_leaves({"totals": reply.totals, "metrics": reply.metrics}).items():
        yield _field(path, leaf, SUM) | counts
    for name, leaf in reply.rows.values.items():
        yield _field(f"rows.{name}", leaf, ROW) | {"clients": len(leaf)}
    if isinstance(reply.rows, Rows) and reply.rows.ids:
        yield {"field": "rows.ids", "clients": len(reply.rows.ids), "readers": ROW}
    yield from ({"field": f"facts.{name}", "readers": FACT} for name, fact in reply.facts.items()
                if not isinstance(fact, Ready))  # fmt: skip


def _field(name: str, leaf: Tensor, readers: str) -> dict[str, Any]:
    size = leaf.numel() * leaf.element_size()
    return {"field": name, "shape": list(leaf.shape), "bytes": size, "readers": readers}


# ---------------------------------------------------------------------- status, from files alone


class Traffic(NamedTuple):
    """What a ledger says of one site, or at a site of one run."""

    last: float | None = None  # when it was last heard
    answered: int = 0
    bytes: int = 0
    failed: int = 0  # calls that were refused, or brought no answer in time
    reason: str = ""  # of the last one


def traffic(file: Path, by: str) -> dict[str, Traffic]:
    """From the lines of a ledger, by "site" or "run"."""
    found: dict[str, Traffic] = {}
    for line in _lines(file):
        name, known = str(line.get(by)), found.get(str(line.get(by)), Traffic())
        if "refused" in line:
            found[name] = known._replace(failed=known.failed + 1, reason=str(line["refused"]))
        else:
            size = known.bytes + int(line.get("bytes", 0))
            found[name] = known._replace(last=float(line["time"]), answered=known.answered + 1, bytes=size)
    return found


def _lines(file: Path) -> list[dict[str, Any]]:
    if not file.is_file():
        return []
    try:
        return [json.loads(line) for line in file.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]
    except ValueError as error:
        raise CheckpointError(f"{file} has a line that cannot be read ({error}); look at it") from None
