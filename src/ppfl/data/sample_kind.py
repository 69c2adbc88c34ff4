"""What a network is given, without any data: the shape and type of one sample, and the kind of its target."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..errors import DataError
from .federation import Federation
from .preparation import Preparation
from .samples import Samples

_TYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float32, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)}  # fmt: skip


class SampleKind(NamedTuple):
    """All that has to be known of the data to run a model on new samples.

    >>> kind = SampleKind((4,), torch.float32, torch.int64, ("cat", "dog"))
    >>> kind.batch([[1, 2, 3, 4]])
    tensor([[1., 2., 3., 4.]])
    >>> SampleKind.from_json(kind.to_json()) == kind
    True
    """

    shape: tuple[int, ...]  # of one sample
    dtype: torch.dtype
    target: torch.dtype
    classes: tuple[str, ...] | None  # None: targets are real numbers
    target_shape: tuple[int, ...] = ()  # of one target; () for a number or a label
    preparation: Preparation | None = None  # how samples are made of the rows of a table

    @classmethod
    def of(cls, federation: Federation) -> SampleKind:
        """Of the samples that a federation has."""
        train = federation.train
        return cls(
            tuple(train.x.shape[1:]),
            train.x.dtype,
            train.y.dtype,
            federation.classes,
            tuple(train.y.shape[1:]),
            federation.preparation,
        )

    @property
    def n_classes(self) -> int | None:
        return None if self.classes is None else len(self.classes)

    def stand_in(self, device: torch.device | str = "cpu") -> Federation:
        """One client with two samples of ones: it has the form of the data and nothing of their content."""
        x = torch.ones(2, *self.shape, dtype=self.dtype)
        label = 1 if (self.n_classes or 2) > 1 else 0
        y = torch.full((2, *self.target_shape), label, dtype=self.target)
        samples = Samples(x, y, torch.tensor([0, 2]))
        name = "a stand-in for the data"
        preparation = self.preparation
        return Federation(
            ("stand-in",), samples, classes=self.classes, name=name, preparation=preparation,
            features=None if preparation is None else preparation.terms,
        ).to(device)  # fmt: skip

    def batch(self, x: Any) -> Tensor:
        """Samples (B, ...) as the network takes them, from a tensor, an array or nested lists.

        A pandas table is prepared first, if the samples were.
        """
        if self.preparation is not None and hasattr(x, "columns"):
            x = self.preparation.apply(x)
        if isinstance(x, Tensor):
            found = x
        else:
            try:
                found = torch.from_numpy(np.array(x, copy=True))  # torch warns of memory that must not be written to
            except (TypeError, ValueError) as error:
                reason = str(error).splitlines()[0]
                raise DataError(f"x cannot be read as numbers ({reason}); give an array (B, ...)") from None
        if tuple(found.shape[1:]) != self.shape or found.dim() == 0:
            one = " (for one sample, add a dimension: x[None])" if tuple(found.shape) == self.shape else ""
            raise DataError(
                f"x has shape {tuple(found.shape)}; expected a batch of samples of shape {self.shape}: "
                f"{('B', *self.shape)}{one}".replace("'", "")
            )
        return found.to(self.dtype)

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        prepared = {} if self.preparation is None else {"preparation": self.preparation.model_dump(mode="json")}
        return prepared | {
            "shape": list(self.shape),
            "dtype": str(self.dtype).removeprefix("torch."),
            "target": str(self.target).removeprefix("torch."),
            "classes": None if self.classes is None else list(self.classes),
            "target_shape": list(self.target_shape),
        }

    @classmethod
    def from_json(cls, found: Any) -> SampleKind:
        """What `to_json` gave; KeyError, TypeError or ValueError if it is anything else."""
        shape, target_shape = (tuple(int(size) for size in found[key]) for key in ("shape", "target_shape"))
        for sizes in (shape, target_shape):
            if any(size < 0 for size in sizes) or torch.Size(sizes).numel() > 1 << 32:
                raise ValueError(f"a sample or target of shape {sizes}")
        classes = found["classes"]
        names = None if classes is None else tuple(str(name) for name in classes)
        said = found.get("preparation")
        preparation = None if said is None else Preparation.read(said)
        return cls(shape, _TYPES[found["dtype"]], _TYPES[found["target"]], names, target_shape, preparation)
