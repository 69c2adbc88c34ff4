"""The record of a run's rounds: one line of metrics per round, and memberships at the rounds that were evaluated.

A record of memberships.log is its length in 8 bytes, little-endian, and then what `io.codec` makes of the round and its
memberships. A checkpoint, and the result of a run, hold the length and the SHA-256 of both files at that time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..core.simplex import check
from ..errors import DataError, ModelError
from ..io.codec import dump, load
from ..io.files import Log, damaged

Record = dict[str, Any]
_KIND = "memberships of a round"
_LENGTH = 8  # bytes before each record of memberships


class RoundLog:
    """Two files that grow by one round at a time."""

    def __init__(self, metrics_file: Path, memberships_file: Path) -> None:
        self.metrics, self.memberships = Log(metrics_file), Log(memberships_file)

    def append(self, record: Record, memberships: Tensor | None) -> None:
        """Add a round to the record, with memberships where they are to be kept."""
        if memberships is not None:
            content = BytesIO()
            dump({"round": record["round"], "memberships": memberships}, content, _KIND)
            size = content.tell().to_bytes(_LENGTH, "little")
            self.memberships.append(size + content.getvalue())
        self.metrics.append(json.dumps(finite_json(record)).encode() + b"\n")

    def marks(self) -> Record:
        """What a checkpoint says of both files, which are safe against a crash of the system then."""
        return {log.path.name: log.mark() for log in (self.memberships, self.metrics)}

    def read_metrics(self, marks: Record, *, finished: bool = False) -> list[Record]:
        """The metrics of the rounds so far: 1, 2, 3 and so on."""
        file = self.metrics.path
        lines = self.metrics.read(marks.get(file.name), whole=finished).splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            del lines[-1]  # a kill cut it short
        try:
            metrics = [json.loads(line) for line in lines]
        except (ValueError, RecursionError) as error:
            raise damaged(file, f"has a line that cannot be read ({error})") from None
        for number, row in enumerate(metrics, 1):
            if not isinstance(row, dict) or row.get("round") != number:
                raise damaged(file, f"does not have round {number} in line {number}")
        return metrics

    def read_memberships(
        self, marks: Record, rounds: int, clients: int, *, finished: bool = False
    ) -> dict[int, Tensor]:
        """Memberships (M, K) by round, of the first rounds.

        A method that makes new models on the way (clustered FL) has fewer columns in its first rounds: they get zeros.
        """
        file = self.memberships.path
        content = self.memberships.read(marks.get(file.name), whole=finished)
        found: dict[int, Tensor] = {}
        start = 0
        while (end := start + _LENGTH + int.from_bytes(content[start : start + _LENGTH], "little")) <= len(content):
            if end == start + _LENGTH:  # also where no bytes are left
                break
            round, memberships = _read_record(file, content[start + _LENGTH : end], clients)
            if round <= max(found, default=0):
                raise damaged(file, f"has round {round} after round {max(found)}")
            if round <= rounds:
                found[round] = memberships
            start = end
        most = max((memberships.shape[1] for memberships in found.values()), default=0)
        return {round: pad(values, (0, most - values.shape[1])) for round, values in found.items()}

    def cut(self, marks: Record) -> None:
        """Keep what these marks speak of alone."""
        for log in (self.metrics, self.memberships):
            log.read(marks.get(log.path.name))  # so that damage is noticed before anything is changed
        for log in (self.metrics, self.memberships):
            log.cut(marks.get(log.path.name))


def _read_record(file: Path, data: bytes, clients: int) -> tuple[int, Tensor]:
    try:
        record: Mapping[str, Any] = load(data, _KIND)
        round, memberships = int(record["round"]), record["memberships"]
        check(memberships, "memberships")
        # clients of sites that joined later are the last ones, and had no preference yet
        new = memberships.new_full((clients - len(memberships), memberships.shape[1]), 1 / memberships.shape[1])
    except (DataError, ModelError, KeyError, TypeError, RuntimeError, AttributeError, IndexError) as error:
        raise damaged(file, f"has a record that cannot be read ({' '.join(str(error).split())})") from None
    return round, torch.cat([memberships, new])


def finite_json(value: Any) -> Any:
    """None in the place of NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
