"""Samples that are drawn when their client takes part: a federation may register any number of clients, and needs the
memory of those at work."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ppfl.data.samples import Samples
from ppfl.errors import DataError


class SampleSource(Protocol):
    """The samples of every client, each a function of a seed and the client's number alone.

    Its repr names all that the samples depend on: a federation is recognised by it.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the inputs of one sample, float32."""

    @property
    def classes(self) -> int: ...

    def draw(self, clients: Tensor, split: str, count: int) -> tuple[Tensor, Tensor]:
        """Inputs (C, count, ...) and int64 labels (C, count) of the clients with these numbers (C,)."""


class LazySamples(Samples):
    """The same number of samples of each client, from a source. `in_memory` draws those of some clients.

    clients: numbers of the clients at the source; a count stands for the first so many.
    """

    source: SampleSource
    split: str
    clients: int | Tensor
    count: int  # of one client
    device: torch.device

    def __init__(
        self, source: SampleSource, split: str, clients: int | Tensor, count: int, device: torch.device | str = "cpu"
    ) -> None:
        n = count * (clients if isinstance(clients, int) else len(clients))
        device = torch.device(device)
        x = LazyRows(torch.Size((n, *source.shape)), torch.float32, device)
        y = LazyRows(torch.Size((n,)), torch.int64, device)
        about = {"source": source, "split": split, "clients": clients, "count": count, "device": device}
        vars(self).update(about, x=x, y=y, offsets=torch.arange(0, n + 1, count))  # a Samples is frozen

    def __repr__(self) -> str:
        return f"LazySamples({self.source!r}, {self.split!r}, {self.n_clients} clients, {self.count})"

    @property
    def sizes(self) -> Tensor:
        return torch.tensor(self.count).expand(self.n_clients)

    def label_range(self) -> tuple[int, int]:
        return 0, self.source.classes - 1

    def first_inputs(self, n: int) -> Tensor:
        return self.client(0).first_inputs(n)

    def example_targets(self) -> Tensor:
        return self.client(0).y

    def in_memory(self, clients: Tensor) -> tuple[Samples, Tensor]:
        x, y = self.source.draw(self._numbers(clients), self.split, self.count)
        offsets = torch.arange(0, len(y.flatten()) + 1, self.count)
        return Samples(x.flatten(0, 1), y.flatten(), offsets).to(self.device), torch.arange(len(clients))

    def client(self, position: int) -> Samples:
        return self.in_memory(torch.tensor([position]))[0]

    def take(self, positions: Sequence[int] | Tensor) -> LazySamples:
        at = torch.as_tensor(positions, dtype=torch.int64).cpu()
        return LazySamples(self.source, self.split, self._numbers(at), self.count, self.device)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> LazySamples:
        if dtype not in (None, torch.float32):
            raise DataError(f"samples are drawn as torch.float32, not {dtype}; leave the dtype out")
        return LazySamples(self.source, self.split, self.clients, self.count, device or self.device)

    def _numbers(self, positions: Tensor) -> Tensor:
        return positions if isinstance(self.clients, int) else self.clients[positions]


@dataclass(frozen=True)
class LazyRows:
    """What is known of the inputs or the labels of lazy samples without drawing them."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def __getitem__(self, which: Any) -> Any:
        return self.__getattr__("values")

    def __getattr__(self, name: str) -> Any:
        raise DataError(
            f"the samples of this federation are drawn when a client takes part, and have no {name}; "
            f"use federation.select(ids).in_memory() for some clients"
        )
