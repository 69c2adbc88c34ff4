"""Checks of what an affinity is built from: client ids, tables with one row per client, weights."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from ..errors import AffinityError
from .client_names import ClientIds, NumberedIds


def check_names(ids: Iterable[str]) -> ClientIds:
    """The client ids, checked: at least one, all of them strings, none twice."""
    if isinstance(ids, NumberedIds):
        return ids
    names = tuple(ids)
    if not names or not all(issubclass(kind, str) for kind in set(map(type, names))):
        raise AffinityError(f"client ids are {names[:3]}; expected at least one string: use str(id) for others")
    if len(set(names)) < len(names):
        twice = [name for name, times in Counter(names).items() if times > 1]
        raise AffinityError(f"client {listed(twice)} is listed more than once; give every client its own id")
    return names


def find_rows(names: Sequence[str], known: Sequence[str], remedy: str) -> Tensor:
    """The row of each of these clients in an affinity whose rows are the known clients."""
    row = dict(zip(known, range(len(known)), strict=True))
    at = list(map(row.get, names))
    if None in at:
        unknown = sorted(set(names) - set(known), key=str)
        raise AffinityError(f"affinity has no client {listed(unknown)} among its {len(known)}; {remedy}")
    return torch.tensor(at, dtype=torch.long)


def as_table(x: Tensor, ids: Iterable[str]) -> tuple[ClientIds, Tensor]:
    """The client ids and a float table with one row per client."""
    names, x = check_names(ids), torch.as_tensor(x)
    if x.dim() != 2 or len(x) != len(names):
        found = f"affinity has {len(x)} rows" if x.dim() == 2 else f"affinity has shape {tuple(x.shape)}"
        raise AffinityError(f"{found} but there are {len(names)} client ids; give one row per client")
    return names, x if x.is_floating_point() else x.to(torch.get_default_dtype())


def as_feature_table(x: Tensor, ids: Iterable[str]) -> tuple[ClientIds, Tensor]:
    """The client ids and a float table of finite features, one row per client."""
    names, x = as_table(x, ids)
    check_entries(x.abs(), lambda i, d: f"feature {d} of client {names[i]!r}", "impute it or leave the column out")
    return names, x


def check_entries(x: Tensor, name_of: Callable[..., str], remedy: str) -> None:
    """Entries are finite and not negative. `name_of` names the entry at an index for the error message."""
    for bad, need in ((~x.isfinite(), "finite"), (x < 0, "non-negative")):
        if bad.any():
            at = bad.nonzero()[0].tolist()
            raise AffinityError(f"{name_of(*at)} is {float(x[tuple(at)]):g}; it must be {need}: {remedy}")


def asymmetric(a: str, b: str, ab: float, ba: float) -> AffinityError:
    """The error for two clients whose affinity differs by direction."""
    found = f"{entry_of(a, b)} is {ab:g} but {entry_of(b, a)} is {ba:g}"
    return AffinityError(f"{found}; W must be symmetric: use (W + W.T) / 2")


def entry_of(a: str, b: str) -> str:
    return f"affinity[{a!r}, {b!r}]"


def listed(names: Sequence[str], most: int = 5) -> str:
    """The first names, and how many more there are."""
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return (", ".join(map(repr, names[:most])) or "none") + rest
