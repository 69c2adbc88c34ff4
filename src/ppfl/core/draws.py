"""Random numbers as data: a draw is a pure function of its keys (seed, round, client, position).

No generator is advanced, so a client's draws do not depend on which other clients are present, on the
order of execution, on the engine or on the number of workers. The hash is splitmix64, vectorised.
"""

from hashlib import blake2b

import torch
from torch import Tensor

Key = int | str | Tensor


def name_key(name: str) -> int:
    """A stable 63-bit key of a client id or of the purpose of a draw.

    >>> name_key("client-1") == name_key("client-1") != name_key("client-2")
    True
    """
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") >> 1


def hashed(*keys: Key) -> Tensor:
    """Keys to pseudo-random int64, broadcasting tensors against each other."""
    state = torch.zeros((), dtype=torch.int64)
    for key in keys:
        value = name_key(key) if isinstance(key, str) else key
        state = _splitmix(state.to(value.device) ^ value if isinstance(value, Tensor) else state ^ value)
    return state


def uniform(*keys: Key) -> Tensor:
    """Keys to float64 in [0, 1).

    >>> bool((uniform(0, "demo", torch.arange(100)) < 1).all())
    True
    """
    return _shift(hashed(*keys), 11).double() * 2.0**-53


def _splitmix(z: Tensor) -> Tensor:
    z = z + -7046029254386353131
    z = (z ^ _shift(z, 30)) * -4658895280553007687
    z = (z ^ _shift(z, 27)) * -7723592293110705685
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical shift right: torch's shift of int64 keeps the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
