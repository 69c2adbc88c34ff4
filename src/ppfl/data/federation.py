"""Named clients, their samples, and what is known about them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from ppfl.core.ids import ClientIds, as_ids
from ppfl.core.losses import IGNORED
from ppfl.core.settings import usable_device
from ppfl.data import checks
from ppfl.data.arrays import LearningTask, as_features, as_mask, as_targets
from ppfl.data.files import check_limit
from ppfl.data.ids import as_weights, group_rows, split_rows
from ppfl.data.preparation import Preparation
from ppfl.data.samples import MappedRows, Samples, blocks_of, held_out, scaled
from ppfl.data.sources import read_clients, read_items
from ppfl.data.summaries import fingerprint_of, number_classes
from ppfl.errors import DataError
from ppfl.io.text import visible


@dataclass(frozen=True, eq=False)
class Truth:
    """True memberships, and the true models if they are known.

    >>> Truth(torch.eye(2), name="group").rows([1]).memberships
    tensor([[0., 1.]])
    """

    memberships: Tensor  # (M, K) rows on the simplex; one-hot if clients are in groups
    name: str | None = None  # what a column represents, such as "group"
    sources: Tensor | None = None  # (K, d) the linear models that generated the targets
    noise: float | None = None  # standard deviation of the noise in the targets

    def __post_init__(self) -> None:
        c = self.memberships
        if c.ndim != 2 or not c.is_floating_point():
            raise DataError(f"true memberships are {c.dtype} {tuple(c.shape)}; expected floats (clients, k)")
        off = (c.sum(1) - 1).abs() > 1e-4
        if bool((c < 0).any()) or bool(off.any()) or not bool(c.isfinite().all()):
            raise DataError("true memberships are not on the simplex; expected rows that sum to 1: divide by the sum")

    def rows(self, positions: Sequence[int] | Tensor) -> Truth:
        """The truth for some clients."""
        at = torch.as_tensor(positions, dtype=torch.int64, device=self.memberships.device)
        return replace(self, memberships=self.memberships[at])

    def to(self, device: torch.device | str | None) -> Truth:
        """Move to a device."""
        sources = None if self.sources is None else self.sources.to(device)
        return replace(self, memberships=self.memberships.to(device), sources=sources)


class Assignment(NamedTuple):
    """The client of every row of pooled data, as a partition assigns them.

    >>> Assignment(torch.tensor([0, 1, 1]), ("a", "b")).sizes
    tensor([1, 2])
    """

    clients: Tensor  # (n,) positions in `ids`, int64
    ids: tuple[str, ...]
    truth: Truth | None = None  # in the order of `ids`

    @property
    def sizes(self) -> Tensor:
        """Number of rows of each client (M,)."""
        return torch.bincount(self.clients, minlength=len(self.ids))


Split = Literal["train", "test", "validation"]
_LETTERS = 40  # of the name, in the repr


@dataclass(frozen=True, eq=False)
class Federation:
    """The clients and their samples. `from_arrays` and `from_datasets` build one.

    It is checked when it is built; `to`, `select`, `rename`, `holdout` and `replace` trust that.

    Everything that is indexed by client is in the order of `ids`.

    Attributes:
        ids: The clients, by text.
        train, test, validation: Samples by split; `federation.client(id)` has those of one client.
        classes: Names of the classes; None where targets are numbers.

    Example:
        >>> f = Federation.from_arrays([[0.0], [1.0], [2.0], [3.0]], [0, 1, 0, 1], ["a", "b", "a", "b"],
        ...                            test_fraction=0)
        >>> f.describe()
        'data: 2 clients, 4 train samples (2-2 per client), x (1,), 2 classes'
    """

    ids: ClientIds
    train: Samples
    test: Samples | None = None
    validation: Samples | None = None
    weights: Tensor = field(default_factory=lambda: torch.empty(0))  # (M,) p_i; n_i / n if left empty
    truth: Truth | None = None
    name: str = "data"
    classes: tuple[str, ...] | None = None  # names of the classes; found from the labels if not given
    features: tuple[str, ...] | None = None  # names of the columns of x, for tables
    preparation: Preparation | None = None  # how x was made of the columns of a table
    by_size: bool = False  # whether the weights are n_i / n because none were given

    def __post_init__(self) -> None:
        if self.classes is None and len(self.train) and not self.train.y.is_floating_point():
            object.__setattr__(self, "classes", number_classes(self.splits))
        if self.weights.numel() == 0:
            object.__setattr__(self, "weights", self.train.shares)
            object.__setattr__(self, "by_size", True)
        checks.check_federation(self)

    @classmethod
    def from_arrays(
        cls,
        x: Any,
        y: Any,
        clients: Any,
        *,
        test_fraction: float = 0.2,
        validation_fraction: float = 0.0,
        seed: int = 0,
        ids: Sequence[Any] | None = None,
        name: str = "data",
        truth: Truth | None = None,
        weights: Mapping[Any, float] | None = None,
        is_test: Any = None,
        task: LearningTask = "auto",
        classes: Sequence[str] | None = None,
        features: Sequence[str] | None = None,
        tokens: bool = False,
        pad: int = 0,
    ) -> Federation:
        """Groups samples by their clients. Rows may be in any order.

        If `x` is float32, its rows are already sorted by client and none is held out, the federation shares the memory
        of `x`: do not change it.

        Args:
            x: Samples (n, ...): numbers; images of bytes, uint8 (n, channels, rows, columns), which stay bytes until a
                batch scales them to 0..1; lists of token ids of different lengths; or a file mapped into memory,
                np.load(..., mmap_mode="r"), which is never copied as a whole.
            y: Targets (n,), or (n, ...) for several per sample. Integers, booleans and text are classes; floats are
                numbers to predict.
            clients: The client of every row (n,), as text or numbers; or what a partition returns, such as
                `dirichlet_labels(y, clients=20, alpha=0.3)`.
            test_fraction: The share of every client's rows that is held out for testing.
            validation_fraction: The share of the remaining training rows that is held out for validation.
            seed: Of the draw of these rows.
            ids: The clients in the order that they should have; by default that of first appearance.
            name: Of the data, for messages and pages.
            truth: True memberships, in the order of `ids`, where they are known.
            weights: How much each client counts, by id, on any scale; by default its number of samples.
            is_test: Which rows are for testing (n,), instead of `test_fraction`.
            task: "classification" or "regression", where the type of `y` says something else.
            classes: Names of the classes in their order; by default those that occur, sorted.
            features: Names of the columns of `x`.
            tokens: Whether `x` holds token ids, which stay integers.
            pad: The token id after the end of shorter rows.

        Returns:
            The federation.

        Raises:
            DataError: If the arrays do not pair row by row, have missing values, or cannot be held out from.
        """
        if isinstance(clients, Assignment):
            clients, ids, truth = np.array(clients.ids)[clients.clients], clients.ids, clients.truth
        if truth is not None and ids is None:
            raise DataError("truth is given without ids; pass ids in the order of its rows")
        columns = getattr(x, "columns", None)
        features = tuple(str(c) for c in columns) if features is None and columns is not None else features
        inputs, (targets, found) = as_features(x, tokens, pad), as_targets(y, task, classes)
        rows = group_rows(clients, ids)
        n = int(rows.offsets[-1])
        if not len(inputs) == len(targets) == n:
            raise DataError(f"x has {len(inputs)} rows, y {len(targets)} and clients {n}; they must pair row by row")
        marked = None if is_test is None else as_mask(is_test, n)
        parts = split_rows(rows, test_fraction, validation_fraction, seed, marked)
        samples = {split: Samples(part.take(inputs), part.take(targets), part.offsets) for split, part in parts.items()}
        return cls(
            rows.ids, samples["train"], samples.get("test"), samples.get("validation"),
            weights=torch.empty(0) if weights is None else as_weights(weights, rows.ids),
            truth=truth, name=name, classes=found, features=None if features is None else tuple(features),
        )  # fmt: skip

    @classmethod
    def from_datasets(cls, datasets: Any, *, test: Any = None, clients: Any = None, **settings: Any) -> Federation:
        """Reads map-style torch Datasets, whose items are pairs (x, y), once.

        Args:
            datasets: {client: dataset} or a list of datasets; or one dataset, with `clients`.
            test: Datasets of the same clients for testing; without them a part of each client's items is held out.
            clients: The client of every item, where `datasets` is one dataset.
            **settings: As in `from_arrays`.

        Returns:
            The federation.

        Raises:
            DataError: If items are no pairs, or differ in shape.

        Example:
            >>> from torch.utils.data import TensorDataset
            >>> a, b = (TensorDataset(torch.randn(5, 2), torch.arange(5) % 2) for _ in range(2))
            >>> Federation.from_datasets({"a": a, "b": b}).describe()
            'data: 2 clients, 8 train / 2 test samples (4-4 per client), x (2,), 2 classes'
        """
        if clients is not None:
            return cls.from_arrays(*read_items(datasets, "the dataset"), clients, **settings)
        x, y, ids, is_test = read_clients(datasets, test)
        return cls.from_arrays(x, y, ids, **{"is_test": is_test, **settings})

    def __repr__(self) -> str:
        name = self.name if len(self.name) <= _LETTERS else self.name[: _LETTERS - 1] + "…"
        facts = self.describe().removeprefix(self.name)
        return visible(f"<Federation {name}{facts}, {str(self.train.x.dtype).removeprefix('torch.')}>")

    @property
    def splits(self) -> dict[str, Samples]:
        """The splits that exist, by name."""
        parts = {"train": self.train, "test": self.test, "validation": self.validation}
        return {name: samples for name, samples in parts.items() if samples is not None}

    @property
    def n_clients(self) -> int:
        """Number of clients M."""
        return len(self.ids)

    @property
    def n_classes(self) -> int | None:
        """Number of classes, or None if the targets are real numbers. A selection of clients keeps all classes."""
        return None if self.classes is None else len(self.classes)

    @cached_property
    def importance(self) -> Tensor:
        """The importance of each client (M,), float64, on a scale that several sites have in common: its number of
        samples n_i if no weights were given, otherwise its weight times n."""
        return self.train.sizes.double().cpu() if self.by_size else self.weights.double().cpu() * len(self.train)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of the data: it changes if one bit of a sample, a weight or the id of a client changes."""
        return fingerprint_of(self)

    def split(self, name: Split) -> Samples:
        """One split; an error that says how to create it if it does not exist."""
        if name not in get_args(Split):
            raise DataError(f"there is no split {name!r}; it is 'train', 'test' or 'validation'")
        if name not in self.splits:
            raise DataError(f"{self.name} has no {name} samples; use federation.holdout(0.2, seed=0, into={name!r})")
        return self.splits[name]

    def label_counts(self, split: Split = "train") -> Tensor:
        """How often each client has each class (M, classes), int64."""
        if self.n_classes is None:
            raise DataError(f"{self.name} has float targets, so no labels to count; use feature_means()")
        size = self.n_clients * self.n_classes * torch.int64.itemsize
        what = f"labels of {self.n_clients:,} clients in {self.n_classes:,} classes take {size:,} bytes to count"
        check_limit("bytes", size, what, "use fewer classes or another affinity, or ")
        samples = self.split(split)
        labels = samples.y.reshape(len(samples), -1)
        cells = samples.client_of()[:, None] * self.n_classes + labels
        cells = cells.flatten() if samples.y.ndim == 1 else cells[labels != IGNORED]
        return torch.bincount(cells, minlength=self.n_clients * self.n_classes).reshape(self.n_clients, -1)

    def feature_means(self) -> Tensor:
        """Mean training features of each client (M, d), features flattened."""
        x, total, at = self.train.x, torch.zeros(0), 0
        if not x.is_floating_point() and x.dtype != torch.uint8:
            raise DataError(f"x is {x.dtype}, and tokens have no mean; use label_counts()")
        for block in blocks_of(x):
            flat = scaled(block).flatten(1)
            total = total if total.numel() else flat.new_zeros(self.n_clients, flat.shape[1])
            total.index_add_(0, self.train.client_of()[at : at + len(flat)], flat)
            at += len(flat)
        return total.div_(self.train.sizes[:, None])

    def positions(self, ids: Sequence[str]) -> list[int]:
        """Positions of these clients in every tensor that is indexed by client."""
        return checks.known_positions(ids, self.ids, self.name)

    def client(self, id: str) -> dict[str, Samples]:
        """One client's samples by split, as views of the same memory."""
        (at,) = self.positions([id])
        return {split: samples.client(at) for split, samples in self.splits.items()}

    def select(self, ids: Sequence[str]) -> Federation:
        """These clients only, in this order; classes stay, weights are scaled to sum to 1 again."""
        at = torch.tensor(self.positions(ids), dtype=torch.int64, device=self.weights.device)
        names, weights = as_ids(ids), self.weights[at]
        checks.check_train(names, self.train.sizes[at.cpu()])
        checks.check_ids(names, {})
        truth = None if self.truth is None else self.truth.rows(at)
        return self._changed(lambda part: part.take(at), names, weights / weights.sum(), truth)

    def rename(self, ids: Sequence[str]) -> Federation:
        """The same clients, in the same order, with other ids."""
        names = as_ids(ids)
        checks.check_ids(names, self.splits)
        return self.replace(ids=names)

    def replace(self, **changes: Any) -> Federation:
        """A copy with other values for some of its attributes. They are not checked; `dataclasses.replace` checks."""
        made: Federation = object.__new__(type(self))
        vars(made).update({each.name: getattr(self, each.name) for each in fields(self)} | changes)
        return made

    def in_memory(self) -> Federation:
        """The same federation with all samples in tensors, also those that a source draws on demand."""
        everyone = torch.arange(self.n_clients)
        return self._changed(lambda part: part.in_memory(everyone)[0], self.ids, self.weights, self.truth)

    def holdout(self, fraction: float, seed: int = 0, into: Literal["test", "validation"] = "test") -> Federation:
        """Moves a part of each client's training samples to another split.

        The samples held out of a client depend only on the seed and on its own id and size. Every client keeps at
        least one training sample. Weights n_i / n are computed again; weights that were given stay.

        Args:
            fraction: The share of the training samples.
            seed: Of the draw.
            into: "test" or "validation"; that split must not exist yet.

        Returns:
            Another federation; this one stays as it is.

        Raises:
            DataError: If the split exists, or no client has enough samples.
        """
        if into in self.splits:
            raise DataError(f"{self.name} already has {into} samples; hold out into the other split")
        held = held_out(self.train.sizes, self.ids, fraction, seed, into).to(self.train.offsets.device)
        if not bool(held.any()):
            return self
        train, part = self.train.where(~held), self.train.where(held)
        weights = train.shares if self.by_size else self.weights
        return self.replace(**{"train": train, into: part, "weights": weights})

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Federation:
        """Move to a device; a dtype is applied to the floating-point fields of the samples only."""
        device = None if device is None else usable_device(device)
        truth = None if self.truth is None else self.truth.to(device)
        return self._changed(lambda part: part.to(device, dtype), self.ids, self.weights.to(device), truth)

    def describe(self) -> str:
        """Name, clients, samples and their kind in one line."""
        train, sizes = self.train, self.train.sizes
        counts = " / ".join(f"{len(samples)} {split}" for split, samples in self.splits.items())
        kind = "real targets" if self.n_classes is None else f"{self.n_classes} classes"
        kind = kind if train.y.ndim == 1 else f"y {tuple(train.y.shape[1:])}, {kind}"
        shape = f"{tuple(train.x.shape[1:])}"
        shape += " bytes scaled to 0..1" if train.x.dtype == torch.uint8 else ""
        shape += " in a file" if isinstance(train.x, MappedRows) else ""
        known = f", {self.truth.memberships.shape[1]} true sources" if self.truth else ""
        return (
            f"{self.name}: {self.n_clients} clients, {counts} samples "
            f"({int(sizes.min())}-{int(sizes.max())} per client), x {shape}, {kind}{known}"
        )

    def _changed(
        self, change: Callable[[Samples], Samples], ids: ClientIds, weights: Tensor, truth: Truth | None
    ) -> Federation:
        parts = {split: change(samples) for split, samples in self.splits.items()}
        return self.replace(ids=ids, weights=weights, truth=truth, **parts)
