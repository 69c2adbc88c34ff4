"""The ids of a federation's clients: a tuple, or numbered names that take no memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, overload

from torch import Tensor

from ..errors import DataError
from ..io.codec import message
from .draws import name_keys

MOST_CLIENTS = 10**8  # of numbered ids, which may come with a message: it is short however many they are


@message
@dataclass(frozen=True, eq=False, repr=False)
class NumberedIds(Sequence[str]):
    """Ids that are a prefix and a number of fixed width, made when they are asked for: ten million strings would take
    a gigabyte. They are equal to a tuple of the same ids.

    >>> ids = NumberedIds(1000)
    >>> ids[7], ids[-1], len(ids), "c1000" in ids, ids.positions["c042"]
    ('c007', 'c999', 1000, False, 42)
    """

    n_clients: int
    prefix: str = "c"

    def __post_init__(self) -> None:
        if type(self.n_clients) is not int or not 0 < self.n_clients <= MOST_CLIENTS:
            raise DataError(f"{self.n_clients!r:.40} numbered clients; use 1 to {MOST_CLIENTS:,}")
        if not isinstance(self.prefix, str):
            raise DataError(f"ids that begin with {self.prefix!r:.40}; use a text")

    @cached_property
    def width(self) -> int:
        """Digits of each number."""
        return len(str(self.n_clients - 1))

    @cached_property
    def positions(self) -> Mapping[str, int]:
        """Where each of them stands."""
        return _Positions(self)

    @cached_property
    def _pattern(self) -> str:
        return f"{self.prefix.replace('%', '%%')}%0{self.width}d"

    def __len__(self) -> int:
        return self.n_clients

    @overload
    def __getitem__(self, at: int) -> str: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[str, ...]: ...
    def __getitem__(self, at: int | slice) -> str | tuple[str, ...]:
        if isinstance(at, slice):
            return tuple(map(self._name, range(self.n_clients)[at]))
        return self._name(range(self.n_clients)[at])

    def __iter__(self) -> Iterator[str]:
        return map(self._pattern.__mod__, range(self.n_clients))

    def __contains__(self, name: object) -> bool:
        return name in self.positions

    def __eq__(self, other: object) -> bool:
        if isinstance(other, NumberedIds):
            return (self.n_clients, self.prefix) == (other.n_clients, other.prefix)
        if isinstance(other, tuple):
            return len(other) == self.n_clients and all(a == b for a, b in zip(self, other, strict=True))
        return NotImplemented

    __hash__ = None  # type: ignore[assignment]  # a tuple of equal ids would have another hash

    def __repr__(self) -> str:
        return f"NumberedIds({self.n_clients}, {self.prefix!r})"

    @cached_property
    def keys(self) -> Tensor:
        """(M,) keys of the names, for draws: the same as those of a tuple of them."""
        return name_keys(self)

    def _name(self, number: int) -> str:
        return self._pattern % number


class _Positions(Mapping[str, int]):
    """Where each of the numbered ids stands."""

    def __init__(self, ids: NumberedIds) -> None:
        self._ids = ids

    def __getitem__(self, name: str) -> int:
        at: int | None = self.get(name)
        if at is None:
            raise KeyError(name)
        return at

    def get(self, name: object, default: Any = None) -> Any:
        ids, length = self._ids, len(self._ids.prefix)
        if not isinstance(name, str) or len(name) != length + ids.width or not name.startswith(ids.prefix):
            return default
        number = name[length:]
        at = int(number) if number.isascii() and number.isdecimal() else ids.n_clients  # int("-1") is a number too
        return at if at < ids.n_clients else default

    def __contains__(self, name: object) -> bool:
        return self.get(name) is not None

    def __iter__(self) -> Iterator[str]:
        return iter(self._ids)

    def __len__(self) -> int:
        return len(self._ids)


ClientIds = tuple[str, ...] | NumberedIds


def as_ids(ids: Iterable[str]) -> ClientIds:
    """Numbered ids as they are, others as a tuple."""
    return ids if isinstance(ids, NumberedIds) else tuple(ids)


def positions_of(ids: ClientIds) -> Mapping[str, int]:
    """Where each client stands, by its id.

    >>> positions_of(("a", "b"))["b"]
    1
    """
    return ids.positions if isinstance(ids, NumberedIds) else {name: at for at, name in enumerate(ids)}


def client_keys(ids: ClientIds) -> Tensor:
    """(M,) keys of the names, for draws; those of numbered ids are computed once."""
    return ids.keys if isinstance(ids, NumberedIds) else name_keys(ids)
