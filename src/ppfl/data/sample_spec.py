"""What a sample is, without any data: raw rows become what a network takes, and its predictions the target's units."""

from __future__ import annotations

from collections import OrderedDict
from typing import Annotated, Any

import numpy as np
import torch
from pydantic import ConfigDict, Field, PlainSerializer, PlainValidator, model_validator
from torch import Tensor, nn

from ..core.settings import Settings
from ..errors import DataError
from .arrays import quoted
from .columns import as_numbers
from .federation import Federation
from .preparation import Preparation
from .samples import scaled

_TYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float32, torch.float64, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _TYPES.items()}


def _as_dtype(value: Any) -> torch.dtype:
    if value not in _NAMES and value not in _TYPES:
        raise ValueError(f"{value!r:.40} is no type of numbers; use one of {', '.join(_TYPES)}")
    return value if value in _NAMES else _TYPES[value]


Dtype = Annotated[torch.dtype, PlainValidator(_as_dtype), PlainSerializer(_NAMES.__getitem__)]
Shape = tuple[Annotated[int, Field(ge=0, le=1 << 32)], ...]


class SampleSpec(Settings):
    """All that has to be known of the data to build a network for them, and to run it on new samples.

    >>> spec = SampleSpec(shape=(4,), dtype=torch.float32, target_dtype=torch.int64, classes=("cat", "dog"))
    >>> spec.batch([[1, 2, 3, 4]])
    tensor([[1., 2., 3., 4.]])
    >>> SampleSpec.model_validate(spec.model_dump(mode="json")) == spec
    True
    """

    model_config = ConfigDict(arbitrary_types_allowed=True)

    shape: Shape  # of one sample, as a network takes it
    dtype: Dtype
    target_dtype: Dtype
    target_shape: Shape = ()  # of one target; () for a number or a label
    classes: tuple[str, ...] | None = None  # None: targets are real numbers
    features: tuple[str, ...] | None = None  # names of the columns, where samples are rows of a table
    preparation: Preparation | None = None  # how samples are made of the rows of a table

    @model_validator(mode="after")
    def _fits_into_memory(self) -> SampleSpec:
        for sizes in (self.shape, self.target_shape):
            if torch.Size(sizes).numel() > 1 << 32:
                raise ValueError(f"a sample or target of shape {sizes} has too many numbers")
        return self

    @classmethod
    def of(cls, federation: Federation) -> SampleSpec:
        """The samples that a federation has."""
        train = federation.train
        return cls(
            shape=tuple(train.x.shape[1:]), dtype=train.x.dtype, target_dtype=train.y.dtype,
            target_shape=tuple(train.y.shape[1:]), classes=federation.classes, features=federation.features,
            preparation=federation.preparation,
        )  # fmt: skip

    def prepared_by(self, preparation: Preparation) -> SampleSpec:
        """Samples that are made of these rows of a table."""
        terms = preparation.terms
        return self.model_copy(update={"shape": (len(terms),), "features": terms, "preparation": preparation})

    @property
    def n_classes(self) -> int | None:
        return None if self.classes is None else len(self.classes)

    def example(self, device: torch.device | str = "cpu") -> Tensor:
        """Two raw samples of ones, as `wrap(net)` takes them: the form of the data without their content."""
        dtype = torch.float64 if self.preparation is not None else self.dtype
        return torch.ones(2, *self.shape, dtype=dtype, device=device)

    def example_targets(self, device: torch.device | str = "cpu") -> Tensor:
        """Their targets: ones, or zeros where there is one class."""
        label = 1 if (self.n_classes or 2) > 1 else 0
        return torch.full((2, *self.target_shape), label, dtype=self.target_dtype, device=device)

    # ------------------------------------------------------------------ raw rows and predictions

    def batch(self, x: Any) -> Tensor:
        """Raw rows (B, ...) as the network takes them, from a tensor, an array, nested lists or a pandas table.

        A table has its columns by name, in any order; others are ignored. An array has the columns of `features` in
        their own units. Images of bytes have whole numbers from 0 to 255. What would lose digits is refused.
        """
        if hasattr(x, "columns"):
            table = x.to_pandas() if hasattr(x, "to_pandas") else x
            x = self._from_table(table.rename(columns=str))
        found = self._as_rows(x)
        if self.preparation is not None:
            prepared: Tensor = Standardise(self.preparation, self.dtype).to(found.device)(found.detach())
            return prepared
        return scaled(self._as_dtype(found))

    def restore(self, prediction: Tensor) -> Tensor:
        """Predictions in the units of the target, which may have been standardised."""
        return prediction if self._target is None else self._target(prediction)

    def wrap(self, net: nn.Module) -> nn.Module:
        """`net` with the same steps as layers, so that it takes raw rows; `net` itself where there are no such steps.

        With a preparation it takes the columns of `features` in their own units, float64 (B, terms).

        >>> pixels = SampleSpec(shape=(1, 2, 2), dtype=torch.uint8, target_dtype=torch.float32)
        >>> pixels.wrap(nn.Flatten())(torch.tensor([[[[0, 51], [102, 255]]]], dtype=torch.uint8))
        tensor([[0.0000, 0.2000, 0.4000, 1.0000]])
        """
        inputs: nn.Module | None = ScaleBytes() if self.dtype == torch.uint8 else None
        if self.preparation is not None:
            inputs = Standardise(self.preparation, self.dtype)
        layers = {
            name: layer for name, layer in (("inputs", inputs), ("network", net), ("targets", self._target)) if layer
        }
        return net if len(layers) == 1 else nn.Sequential(OrderedDict(layers)).train(net.training)

    # ------------------------------------------------------------------ parts

    @property
    def _target(self) -> RestoreTarget | None:
        """None where targets are in their own units."""
        if self.preparation is None or self.preparation.target == (0.0, 1.0):
            return None
        return RestoreTarget(*self.preparation.target)

    def _from_table(self, frame: Any) -> Any:
        """The columns by name, as numbers in their own units."""
        if self.preparation is not None:
            return self.preparation.encode(frame)
        names = self.features or tuple(frame.columns)
        if absent := [name for name in names if name not in frame.columns]:
            raise DataError(f"no column {quoted(absent)}; the table has {quoted(list(frame.columns), most=12)}")
        values = np.stack([as_numbers(name, frame[name]).to_numpy() for name in names], axis=1)
        if (bad := np.argwhere(np.isnan(values))).size:
            row, column = bad[0].tolist()
            raise DataError(
                f"column {names[column]!r} has a missing value in row {frame.index[row]}; fill it, or leave the row out"
            )
        return values

    def _as_rows(self, x: Any) -> Tensor:
        """A tensor of samples, of any type."""
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
        if found.is_complex():
            raise DataError(f"x is {found.dtype}; expected real numbers: convert it first")
        if found.is_floating_point() and (bad := int((~found.isfinite()).flatten(1).any(1).sum())):
            raise DataError(f"x has NaN or infinity in {bad} of {len(found)} samples; fill them, or leave them out")
        return found

    def _as_dtype(self, x: Tensor) -> Tensor:
        """In the type of the samples, if that loses nothing."""
        if self.dtype.is_floating_point or x.dtype == self.dtype:
            return x.to(self.dtype)
        if self.dtype == torch.uint8 and (x.is_floating_point() or x.dtype == torch.bool):
            raise DataError(
                f"x is {x.dtype} and the model takes images of bytes; give whole numbers from 0 to 255, uint8: for "
                f"values from 0 to 1 use (255 * x).round().to(torch.uint8)"
            )
        found = x.to(self.dtype)
        if not bool((found.to(x.dtype) == x).all()):
            low, high = (value.item() for value in x.aminmax())
            raise DataError(
                f"x has values from {low} to {high} ({x.dtype}), and the model takes {self.dtype}: whole numbers from "
                f"{torch.iinfo(self.dtype).min} to {torch.iinfo(self.dtype).max}; convert it without loss"
            )
        return found


class ScaleBytes(nn.Module):
    """Images of bytes as floats from 0 to 1."""

    def forward(self, x: Tensor) -> Tensor:
        return scaled(x)


class Standardise(nn.Module):
    """Encoded columns in their own units as the network takes them: (x - mean) / scale, in double precision."""

    mean: Tensor
    scale: Tensor

    def __init__(self, preparation: Preparation, dtype: torch.dtype) -> None:
        super().__init__()
        mean, scale = map(torch.from_numpy, preparation.means_and_scales)
        self.dtype = dtype
        self.register_buffer("mean", mean)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        return ((x.double() - self.mean) / self.scale).to(self.dtype)


class RestoreTarget(nn.Module):
    """Predictions in the units of a target that was standardised."""

    def __init__(self, mean: float, scale: float) -> None:
        super().__init__()
        self.mean, self.scale = mean, scale

    def forward(self, prediction: Tensor) -> Tensor:
        return self.mean + self.scale * prediction

    def extra_repr(self) -> str:
        return f"{self.mean:g} + {self.scale:g} * prediction"
