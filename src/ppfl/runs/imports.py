"""Objects that an experiment file names as "module:name"."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from ..core.errors import SettingError


def import_by_name(text: str, folder: Path | None = None) -> Any:
    """The object "module:name" of an installed module, or of a Python file in `folder`.

    >>> import_by_name("math:floor")(2.5)
    2
    """
    module, colon, name = text.partition(":")
    if not colon or not all(part.isidentifier() for part in (*module.split("."), name)):
        raise SettingError(f"{text!r} names no object; write it as module:name, such as 'my_metrics:f1'")
    before = list(sys.path)
    sys.path.insert(0, str((folder or Path()).resolve()))
    importlib.invalidate_caches()
    try:
        return getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the module's own code raises
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise SettingError(
            f"{text!r} cannot be imported ({reason}); install the module, or put it beside the experiment file"
        ) from error
    finally:
        sys.path[:] = before
