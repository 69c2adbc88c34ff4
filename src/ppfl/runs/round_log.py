"""The record of a run's rounds: one line of metrics per round, and memberships at the rounds that were evaluated.

A record of memberships.log is its length in 8 bytes, little-endian, and what io.codec makes of the round and its
memberships. The marks of the two files, their lengths and digests, are what a checkpoint and a result hold of them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.nn.functional import pad

from ..core.simplex import check
from ..errors import PPFLError
from ..io.codec import dump, load
from ..io.files import Log, damaged

Record = dict[str, Any]
_ROUND = "memberships of a round"
_LENGTH = 8  # bytes before each record of memberships


class RoundLog:
    """The two files of a run folder that grow by one round at a time."""

    def __init__(self, folder: Path) -> None:
        self.metrics, self.memberships = Log(folder / "metrics.jsonl"), Log(folder / "memberships.log")

    @property
    def files(self) -> tuple[Path, Path]:
        return self.metrics.path, self.memberships.path

    def marks(self) -> Record:
        """Length and digest of both files, which are safe against a crash of the system then."""
        return {log.path.name: log.mark() for log in (self.memberships, self.metrics)}

    def append(self, record: Record, memberships: Tensor | None) -> None:
        """Add a round to the record, with memberships where they are to be kept."""
        if memberships is not None:
            content = BytesIO()
            dump([record["round"], memberships], content, _ROUND)
            self.memberships.append(content.tell().to_bytes(_LENGTH, "little") + content.getvalue())
        self.metrics.append(json.dumps(finite(record)).encode() + b"\n")

    def read_metrics(self, marks: Record, *, whole: bool) -> list[Record]:
        """Of rounds 1, 2, 3 and so on; a kill may have cut the last line short."""
        file = self.metrics.path
        lines = self.metrics.read(marks.get(file.name), whole=whole).splitlines(keepends=True)
        try:
            found = [json.loads(line) for line in lines if line.endswith(b"\n")]
            rounds = [row["round"] for row in found]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise damaged(file, f"has a line that cannot be read ({error})") from None
        if rounds != [*range(1, len(found) + 1)]:
            raise damaged(file, f"does not have the rounds 1 to {len(found)} in its lines")
        return found

    def read_memberships(
        self, marks: Record, rounds: int, clients: int, *, whole: bool, changes: Sequence[Any] = ()
    ) -> dict[int, Tensor]:
        """By round, of the first rounds. A method that makes new models on the way (clustered FL) has fewer columns in
        its first rounds: they get zeros. changes: after which round clients left, and where the others stood."""
        file = self.memberships.path
        content, start = self.memberships.read(marks.get(file.name), whole=whole), _LENGTH
        found: dict[int, Tensor] = {}
        try:
            # a record that a kill cut short is the last one
            while start < (end := start + int.from_bytes(content[start - _LENGTH : start], "little")) <= len(content):
                round, values = load(content[start:end], _ROUND)
                check(values, "memberships")
                for changed, stayed in changes:
                    values = values[stayed] if round <= changed else values
                if len(values) != clients:
                    raise ValueError(f"{len(values)} memberships of {clients} clients")
                found[round], start = values, end + _LENGTH
        except (PPFLError, ValueError, TypeError, RuntimeError, AttributeError, IndexError) as error:
            raise damaged(file, f"has a record that cannot be read ({' '.join(str(error).split())})") from None
        most = max((values.shape[1] for values in found.values()), default=0)
        return {at: pad(values, (0, most - values.shape[1])) for at, values in found.items() if at <= rounds}

    def cut(self, marks: Record) -> None:
        """Keep what these marks speak of alone; damage is noticed before anything is changed."""
        for log in (self.metrics, self.memberships):
            log.read(marks.get(log.path.name))
        for log in (self.metrics, self.memberships):
            log.cut(marks.get(log.path.name))


def finite(value: Any) -> Any:
    """None in the place of NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
