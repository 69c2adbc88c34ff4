"""Settings as TOML, so that what was found can be run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def to_toml(settings: Mapping[str, Any], within: tuple[str, ...] = ()) -> str:
    """Tables after what stands alone; what is None is left out.

    >>> print(to_toml({"name": "x", "data": {"seed": 1, "path": None}, "seeds": (0, 1)}))
    name = "x"
    seeds = [0, 1]
    <BLANKLINE>
    [data]
    seed = 1
    """
    tables = {key: value for key, value in settings.items() if isinstance(value, Mapping)}
    alone = {key: value for key, value in settings.items() if key not in tables and value is not None}
    parts = ["\n".join(f"{_key(key)} = {_value(value)}" for key, value in alone.items())] if alone else []
    for key, table in tables.items():
        path = (*within, key)
        head = f"[{'.'.join(map(_key, path))}]"
        inside = to_toml(table, path)
        only_tables = bool(table) and all(isinstance(value, Mapping) for value in table.values())
        parts.append(inside if only_tables else f"{head}\n{inside}".rstrip())
    return "\n\n".join(parts)


def _key(key: str) -> str:
    return key if key.replace("-", "_").isidentifier() and key.isascii() else _value(key)


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    # TOML's strings, numbers and booleans are written as JSON's, but for one sign that JSON leaves as it is
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
