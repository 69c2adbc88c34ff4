"""Samples that are drawn when their client takes part: a federation may register any number of clients, and needs the
memory of those at work."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

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
        fields = {"source": source, "split": split, "clients": clients, "count": count, "device": torch.device(device)}
        fields |= {"x": LazyRows(self, "x"), "y": LazyRows(self, "y")}
        n_clients = clients if isinstance(clients, int) else len(clients)
        vars(self).update(fields, offsets=torch.arange(0, n_clients * count + 1, count))  # a Samples is frozen

    def __repr__(self) -> str:
        return f"LazySamples({self.source!r}, {self.split!r}, {self.n_clients} clients, {self.count})"

    def __len__(self) -> int:
        return self.n_clients * self.count

    @property
    def sizes(self) -> Tensor:
        return torch.tensor(self.count).expand(self.n_clients)

    def label_range(self) -> tuple[int, int]:
        return 0, self.source.classes - 1

    def first_inputs(self, n: int) -> Tensor:
        first: Tensor = self.x[:n]
        return first

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


class LazyRows:
    """The inputs or the labels of lazy samples, with those of a tensor's methods that are needed. To index it draws."""

    def __init__(self, samples: LazySamples, field: Literal["x", "y"]) -> None:
        self._samples, self._field = samples, field

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, which: slice | Tensor) -> Tensor:
        count = self._samples.count
        rows = torch.arange(len(self))[which] if isinstance(which, slice) else which.cpu()
        clients, inverse = torch.unique(rows // count, return_inverse=True)
        drawn, _ = self._samples.in_memory(clients)
        values: Tensor = getattr(drawn, self._field)
        return values[(inverse * count + rows % count).to(values.device)]

    def index_select(self, dim: int, rows: Tensor) -> Tensor:
        """These rows, in memory."""
        return self[rows]

    @property
    def shape(self) -> torch.Size:
        inner = self._samples.source.shape if self._field == "x" else ()
        return torch.Size((len(self), *inner))

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self._field == "x" else torch.int64

    @property
    def device(self) -> torch.device:
        return self._samples.device

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def element_size(self) -> int:
        return self.dtype.itemsize

    def numel(self) -> int:
        return self.shape.numel()

    def __getattr__(self, name: str) -> Any:
        raise DataError(
            f"the samples of this federation are drawn when a client takes part, and have no {name}; "
            f"use federation.select(ids).in_memory() for some clients"
        )
