"""How a column of a table becomes numbers.

Numbers stay as they are. Text becomes one indicator column for each level except the first, which is the reference.
Levels with few rows, and levels that appear only later, become the level `other`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ppfl.data.files import check_limit

OTHER = "other"
RARE = 5  # a level with fewer rows becomes `other`


class EncodedColumn(NamedTuple):
    """A column of a table, and how it is encoded.

    >>> column = EncodedColumn.of_counts("ward", {"east": 9, "north": 7, "attic": 1})
    >>> column.levels, column.rare, column.terms
    (('east', 'north', 'other'), ('attic',), ['ward = north', 'ward = other'])
    """

    name: str
    levels: tuple[str, ...] = ()  # of text, the reference level first; empty for numbers
    rare: tuple[str, ...] = ()  # levels that became `other`

    @classmethod
    def of(cls, name: str, values: Any) -> EncodedColumn:
        """With the levels of these values."""
        return cls.of_counts(name, values.astype(str).value_counts().to_dict()) if is_text(values) else cls(name)

    @classmethod
    def of_counts(cls, name: str, counts: Mapping[str, int]) -> EncodedColumn:
        """Of text, by how many rows have each level."""
        common = [level for level, count in counts.items() if count >= RARE]
        rare = sorted(set(counts) - set(common)) if common else []
        levels = sorted(set(counts) - set(rare) - {OTHER})
        if rare or OTHER in counts:
            levels.append(OTHER)  # last, so that it is the reference only if there is no other level
        return cls(name, tuple(levels), tuple(rare))

    @property
    def terms(self) -> list[str]:
        """The names of the encoded columns."""
        return [f"{self.name} = {level}" for level in self.levels[1:]] if self.levels else [self.name]

    def encode(self, values: Any) -> NDArray[np.float64]:
        """(n, terms)."""
        if not self.levels:
            return np.array(values, dtype=np.float64)[:, None]
        size = len(values) * len(self.levels) * 8
        what = f"column {self.name!r} has {len(self.levels):,} levels, which take {size:,} bytes"
        check_limit("bytes", size, what, "leave it out, or ")
        position = {level: i for i, level in enumerate(self.levels)}
        unknown = position.get(OTHER, 0)
        codes = np.array([position.get(value, unknown) for value in values.astype(str)], dtype=np.int64)
        return np.asarray(codes[:, None] == np.arange(1, len(self.levels)), dtype=np.float64)


def is_text(values: Any) -> bool:
    """Whether a column holds text rather than numbers; booleans are numbers."""
    from pandas.api.types import is_numeric_dtype  # imported here, because ppfl works without pandas

    return not is_numeric_dtype(values.dtype)
