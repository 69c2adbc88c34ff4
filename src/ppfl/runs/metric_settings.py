"""Metrics that an experiment file names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..core.registry import find_function
from ..errors import SettingError


def load_metrics(names: Sequence[str], folder: Path | None = None) -> dict[str, Any]:
    """Metrics "module:name" by name: a function, an object of torchmetrics, or a class that needs no arguments.

    >>> list(load_metrics(["torch.nn.functional:l1_loss"]))
    ['l1_loss']
    """
    return {text.rpartition(":")[2]: _made(text, find_function(text, folder, "watch")) for text in names}


def _made(text: str, found: Any) -> Any:
    if not isinstance(found, type):
        return found
    try:
        return found()
    except (TypeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise SettingError(
            f"metric {text!r} is a class that needs arguments ({reason}); "
            f"make an object of it in a module of yours, and name that"
        ) from error
