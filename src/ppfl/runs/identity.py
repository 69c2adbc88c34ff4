"""Which run a file is of, so that the files of two runs cannot be mixed up."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, NamedTuple

from ..io.files import damaged


class Identity(NamedTuple):
    """Which run a file is of."""

    seed: int
    settings: str  # digest of all settings
    data: str  # fingerprint of the data
    version: str  # of ppfl

    @classmethod
    def of(cls, settings: dict[str, Any], clients: dict[str, Any], version: str = "") -> Identity:
        """From what was written before the first round."""
        text = json.dumps(settings, sort_keys=True)
        return cls(settings["seeds"][0], hashlib.sha256(text.encode()).hexdigest()[:16], clients["data"], version)

    def refuse_other(self, file: Path, found: Any) -> None:
        """Refuse a file that says it is of another run."""
        found = found if isinstance(found, dict) else {}
        for name, expected in self._asdict().items():
            if found.get(name) != expected:
                raise damaged(file, f"is of another run: {name} is {found.get(name)!r}, in this run {expected!r}")
