"""Clients by name: ids as a tuple or as numbered names that take no memory, and a roster that finds and draws them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, overload

import torch
from torch import Tensor

from ..errors import DataError, PPFLError
from ..io.codec import message
from .draws import hashed, name_keys

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
        """(M,) keys of the names, for draws: those of a tuple of them. Computed once, as there may be many."""
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
Positions = Tensor | slice


def as_ids(ids: Iterable[str]) -> ClientIds:
    """Numbered ids as they are, others as a tuple."""
    return ids if isinstance(ids, NumberedIds) else tuple(ids)


def positions_of(ids: ClientIds) -> Mapping[str, int]:
    """Where each client stands, by its id.

    >>> positions_of(("a", "b"))["b"]
    1
    """
    return ids.positions if isinstance(ids, NumberedIds) else {name: at for at, name in enumerate(ids)}


def check_ids(ids: Iterable[str], error: type[PPFLError] = DataError) -> ClientIds:
    """The ids, if they are strings that can be written to files, and no two are the same.

    >>> check_ids(["a", "b", "a"])
    Traceback (most recent call last):
    ppfl.errors.DataError: client id 'a' is listed more than once; give every client its own id
    """
    names = as_ids(ids)
    if isinstance(names, NumberedIds):
        return names
    if not names:
        raise error("there is no client; give at least one id")
    if not all(issubclass(kind, str) for kind in set(map(type, names))):
        raise error(f"client ids are {names[:3]}; expected strings: use str(id) for others")
    try:
        "".join(names).encode()
    except UnicodeEncodeError:
        odd = next(name for name in names if any("\ud800" <= letter <= "\udfff" for letter in name))
        raise error(f"client id {odd!r} cannot be written as UTF-8; replace that character") from None
    if len(set(names)) < len(names):
        twice = [name for name, times in Counter(names).items() if times > 1]
        raise error(
            f"client id {', '.join(map(repr, twice[:3]))} is listed more than once; give every client its own id"
        )
    return names


class Roster:
    """The clients that a server or a site knows by name, in the order of its rows.

    >>> Roster(["a", "b", "c"]).rows(torch.tensor([5.0, 6.0, 7.0]), ("c", "new"), default=0)
    tensor([7., 0.])
    """

    def __init__(self, ids: Sequence[str]) -> None:
        self.ids = as_ids(ids)

    def __len__(self) -> int:
        return len(self.ids)

    @cached_property
    def keys(self) -> Tensor:
        """(M,) keys of the names, for draws."""
        return self.ids.keys if isinstance(self.ids, NumberedIds) else name_keys(self.ids)

    @cached_property
    def position(self) -> Mapping[str, int]:
        """Where each client stands."""
        return positions_of(self.ids)

    def positions(self, ids: Sequence[str] | None) -> Positions:
        """Where these clients stand, each named once; None: all of them, in order."""
        if ids is None or as_ids(ids) == self.ids:
            return slice(None)
        at = [self.position.get(name, -1) for name in ids]
        if -1 in at:
            raise DataError(f"there is no client {ids[at.index(-1)]!r}; ids look like {self.ids[0]!r}")
        if len(set(at)) < len(at):
            twice = next(name for name, times in Counter(ids).items() if times > 1)
            raise DataError(f"client {twice!r} is named twice; name every client once")
        return torch.tensor(at, dtype=torch.long)

    def rows(self, table: Tensor, ids: Sequence[str] | None, default: float) -> Tensor:
        """The rows of a table (M, ...) that belong to these clients; `default` for those that are not known."""
        if ids is None or as_ids(ids) == self.ids:
            return table[:]
        at = torch.tensor([self.position.get(name, -1) for name in ids], dtype=torch.long, device=table.device)
        found = table[at] if len(table) else table.new_empty(len(ids), *table.shape[1:])
        found[at < 0] = default
        return found

    def draw(self, seed: int, round: int, count: int) -> tuple[str, ...] | None:
        """`count` clients without replacement by (seed, round, client id), in order; None: everyone, where that is
        no fewer than there are."""
        return _drawn(self, seed, round, count) if count < len(self) else None


@lru_cache(maxsize=4)  # a round asks several times
def _drawn(roster: Roster, seed: int, round: int, count: int) -> tuple[str, ...]:
    """The clients with the smallest draws."""
    draws = hashed(seed, "participants", round, roster.keys)
    # draws are even over 64 bits; among ten million, topk of the few that can be smallest is 50 times as fast
    below = (draws < int(2**64 * min(1.0, 2 * count / len(draws)) - 2**63)).nonzero()[:, 0]
    candidates = below if len(below) >= count else torch.arange(len(draws))
    at = candidates[draws[candidates].topk(count, largest=False).indices].sort().values
    return tuple(roster.ids[position] for position in at.tolist())
