"""What all settings have in common, the ranges of their numbers, and the device that is asked for.

The ranges are far wider than what makes sense. Within them no size overflows an integer of 64 bits, and products of a
few numbers stay finite in single precision.
"""

from collections.abc import Iterator, Mapping
from functools import reduce
from typing import Annotated, Any, Self

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from ..errors import SettingError


def _not_tiny(value: float) -> float:
    if value < 1e-12:
        raise ValueError("it should be at least 1e-12")
    return value


Positive = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False), AfterValidator(_not_tiny)]
NonNegative = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
Count = Annotated[int, Field(gt=0, le=10**9)]
CountOrZero = Annotated[int, Field(ge=0, le=10**9)]
Repeats = Annotated[int, Field(gt=0, le=10**7)]  # of rounds, epochs or steps
RepeatsOrZero = Annotated[int, Field(ge=0, le=10**7)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]


class Settings(BaseModel):
    """Frozen, owns its defaults, checks itself, knows no other key."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        """Only settings that differ from their defaults: what is left out can be left out when it is written."""
        for name, field in type(self).model_fields.items():
            if (value := getattr(self, name)) != field.get_default(call_default_factory=True, validated_data={}):
                yield name, value

    def setting(self, key: str) -> Any:
        """The value of a setting; "server_optimizer.lr" is one of the settings in another."""
        return reduce(getattr, key.split("."), self)

    def changed(self, changes: Mapping[str, Any]) -> Self:
        """A copy with other values of some settings, by the same keys.

        >>> class Optimizer(Settings):
        ...     lr: float = 1.0
        >>> class Method(Settings):
        ...     optimizer: Optimizer = Optimizer()
        >>> Method().changed({"optimizer.lr": 0.5})
        Method(optimizer=Optimizer(lr=0.5))
        """
        copy = self
        for key, value in changes.items():
            outer, _, inner = key.partition(".")
            new = getattr(copy, outer).changed({inner: value}) if inner else value
            copy = copy.model_copy(update={outer: new})
        return copy


def usable_device(device: torch.device | str) -> torch.device:
    """The device, or an error of one line where this machine or this torch has none like it.

    >>> usable_device("cpu")
    device(type='cpu')
    """
    try:
        found = torch.device(device)
        torch.empty(0, device=found)
    except (RuntimeError, AssertionError, TypeError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise SettingError(f"device is {str(device)!r}, which cannot be used here ({reason}); use 'cpu'") from None
    return found
