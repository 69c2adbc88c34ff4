"""What all settings have in common, the ranges of their numbers, and the device that is asked for.

The ranges are far wider than what makes sense. Within them no size overflows an integer of 64 bits, and products of a
few numbers stay finite in single precision.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Annotated, Any, Self

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

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

_OTHER_NAMES = {"learning_rate": "lr", "step_size": "lr", "epochs": "local_epochs", "steps": "local_steps",
                "client_fraction": "participation", "fraction_fit": "participation", "clusters": "k"}  # fmt: skip
_OPTIMIZERS = ("optimizer", "optim")
_LONGEST = 80  # characters of a value in a message


class Settings(BaseModel):
    """Frozen, owns its defaults, checks itself, knows no other key."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    if not TYPE_CHECKING:  # type checkers know the settings by their names from the class

        def __init__(self, /, *values: Any, **settings: Any) -> None:
            name = type(self).__name__
            if values:
                first = next(iter(type(self).model_fields), "name")
                raise SettingError(f"{name} takes its settings by name; write {name}({first}={shown(values[0])})")
            try:
                super().__init__(**settings)
            except ValidationError as error:
                raise SettingError(f"{name}: {first_fault(error, type(self).model_fields)}") from None

        # validation within other settings does not call it, so that their errors say where the fault is
        __init__.__pydantic_base_init__ = True

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


def shown(value: Any) -> str:
    """A value for a message: in one line, and not too long.

    >>> shown(0.5), shown("two\\nlines"), len(shown("x" * 1000))
    ('0.5', "'two\\\\nlines'", 83)
    """
    try:
        text = " ".join(repr(value).split())
    except (ValueError, RecursionError):  # too many digits, or nested too deep
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def quoted(names: Sequence[Any], most: int = 5) -> str:
    """A few names for an error message.

    >>> quoted(["a", "b", "c"], most=2), quoted([])
    ("'a', 'b' and 1 more", 'none')
    """
    first = ", ".join(repr(str(name)) for name in names[:most]) or "none"
    return first if len(names) <= most else f"{first} and {len(names) - most} more"


def expected_value(fault: Any) -> str:
    """What pydantic expected where it found a fault, as the end of a sentence."""
    message = " ".join(fault["msg"].removeprefix("Value error, ").split())
    return re.sub(r"^\w+ should", "it should", message).removesuffix(", unable to parse string as a number")


def first_fault(error: ValidationError, known: Mapping[str, Any], what: str = "setting") -> str:
    """What was found, and what was expected. what: what its keys are called."""
    from .registry import did_you_mean  # here, as registries hold settings

    faults = error.errors(include_url=False)
    unknown = [fault for fault in faults if fault["type"] == "extra_forbidden"]
    first = (unknown or faults)[0]
    if not first["loc"]:  # of settings that do not go together
        return expected_value(first)
    key = str(first["loc"][0])
    if first["type"] == "missing":
        return f"{key} is missing; add {key}=..."
    if unknown and len(first["loc"]) == 1:
        if key in _OPTIMIZERS and "momentum" in known:
            return f"there is no setting {key!r}; every client makes its own SGD: set lr, momentum and weight_decay"
        other = _OTHER_NAMES.get(key)
        near = f"did you mean {other!r}? " if other in known else did_you_mean(key, known)
        return f"there is no {what} {key!r}; {near}its {what}s are {', '.join(known)}"
    if unknown:
        return f"there is no {what} {'.'.join(map(str, first['loc']))!r}; leave it out, or correct it"
    expected = dict.fromkeys(expected_value(fault) for fault in faults if fault["loc"][0] == first["loc"][0])
    return f"{key} is {shown(first['input'])}; {', or '.join(expected)}"


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
