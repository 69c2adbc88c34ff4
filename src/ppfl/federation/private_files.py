"""Files that nobody else can read: keys and secrets."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_private_file(file: Path, content: bytes) -> None:
    """A new file, in place of an old one, that nobody else can read, not even for an instant."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as opened:
        opened.write(content)
        opened.flush()
        os.fsync(opened.fileno())


def write_secret(file: Path) -> None:
    """A new secret, by which programs on one machine know each other."""
    write_private_file(file, secrets.token_bytes(32))
