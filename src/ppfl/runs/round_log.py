"""The record of a run's rounds: one line of metrics per round, and memberships at the rounds that were evaluated."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from .checksums import ChecksumError, checked_json, parse_checked_json
from .membership_log import membership_record, read_membership_log
from .storage import damaged, flush, write_bytes, writing

Record = dict[str, Any]
_LOG_LENGTH = "memberships_bytes"  # in a line of the metrics: how long the log of memberships was after that round


class Rounds(NamedTuple):
    """What is recorded of the rounds so far."""

    lines: list[bytes]
    metrics: list[Record]
    log_length: int  # of memberships.log, in bytes


class RoundLog:
    """Two files that grow by one round at a time; their checksums begin with `salt`."""

    def __init__(self, metrics_file: Path, memberships_file: Path, salt: int) -> None:
        self.metrics_file, self.memberships_file, self.salt = metrics_file, memberships_file, salt

    def append(self, record: Record, memberships: Tensor | None) -> None:
        """Add a round to the record, with memberships where they are to be kept."""
        new = b"" if memberships is None else membership_record(record["round"], memberships, self.salt)
        length = _append(self.memberships_file, new)
        _append(self.metrics_file, checked_json(finite_json(record) | {_LOG_LENGTH: length}, self.salt))

    def flush(self) -> None:
        """Make it safe against a crash of the system."""
        for file in (self.memberships_file, self.metrics_file):
            with writing(file):
                flush(file)

    def read(self) -> Rounds:
        """The rounds recorded so far: 1, 2, 3 and so on."""
        text = self.metrics_file.read_bytes() if self.metrics_file.is_file() else b""
        lines = text.splitlines(keepends=True)
        if lines and not lines[-1].endswith(b"\n"):
            del lines[-1]  # a kill cut it short
        metrics = [self._parse(line, number) for number, line in enumerate(lines, 1)]
        lengths = [row.pop(_LOG_LENGTH, None) for row in metrics]
        return Rounds(lines, metrics, lengths[-1] if lengths else 0)

    def _parse(self, line: bytes, number: int) -> Record:
        try:
            row = parse_checked_json(line, self.salt)
        except (ChecksumError, ValueError) as error:
            raise damaged(self.metrics_file, f"has changed since it was written: line {number}: {error}") from None
        if row.get("round") != number or _LOG_LENGTH not in row:
            raise damaged(self.metrics_file, f"has round {row.get('round')} in line {number}")
        return row

    def read_memberships(self, log_length: int, clients: int) -> dict[int, Tensor]:
        """Memberships (M, K) by round."""
        return read_membership_log(self.memberships_file, log_length, clients, self.salt)

    def forget_after(self, round: int, clients: int) -> None:
        """Keep the first rounds alone."""
        rounds = self.read()
        if len(rounds.lines) < round:
            raise damaged(self.metrics_file, f"has {len(rounds.lines)} rounds, fewer than the checkpoint's {round}")
        self.read_memberships(rounds.log_length, clients)  # so that damage is noticed before anything is changed
        write_bytes(self.metrics_file, b"".join(rounds.lines[:round]))
        with writing(self.memberships_file):  # second: a log that is too long does no harm
            os.truncate(self.memberships_file, self.read().log_length)


def _append(file: Path, content: bytes) -> int:
    """Add to a file, which must be there still, and return its length."""
    with writing(file), file.open("r+b") as opened:
        opened.seek(0, os.SEEK_END)
        opened.write(content)
        return opened.tell()


def finite_json(value: Any) -> Any:
    """None in the place of NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: finite_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite_json(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
