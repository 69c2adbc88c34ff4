"""Random numbers as data: a draw is a pure function of its keys (seed, round, client, position).

No generator is advanced, so a client's draws do not depend on which other clients are present, on the
order of execution, on the engine or on the number of workers. The hash is splitmix64, vectorised.
"""

from collections.abc import Iterable
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

Key = int | str | Tensor

_GAMMA, _FIRST, _SECOND = map(np.uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_30, _27, _31 = map(np.uint64, (30, 27, 31))
_PART = 1 << 15


def name_key(name: str) -> int:
    """A stable 63-bit key of a client id or of the purpose of a draw.

    >>> name_key("client-1") == name_key("client-1") != name_key("client-2")
    True
    """
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") >> 1


def name_keys(names: Iterable[str]) -> Tensor:
    """The keys of many names at once, int64 (M,).

    >>> name_keys(["a", "b"]).tolist() == [name_key("a"), name_key("b")]
    True
    """
    digests = b"".join([blake2b(name.encode(), digest_size=8).digest() for name in names])
    return torch.from_numpy((np.frombuffer(digests, dtype=">u8") >> 1).astype(np.int64))


def hashed(*keys: Key, after: Tensor | None = None) -> Tensor:
    """Keys to pseudo-random int64, broadcasting tensors against each other. Made on the CPU.

    `after` is what other keys before these were hashed to.

    >>> bool(hashed(1, 2, 3) == hashed(3, after=hashed(1, 2)))
    True
    """
    state = torch.zeros((), dtype=torch.int64) if after is None else after
    device = state.device
    for key in keys:
        if isinstance(key, Tensor):
            device, key = key.device, key.cpu()
        state = (state ^ (name_key(key) if isinstance(key, str) else key)).contiguous()
        _splitmix(state)
    return state.to(device)


def uniform(*keys: Key) -> Tensor:
    """Keys to float64 in [0, 1).

    >>> bool((uniform(0, "demo", torch.arange(100)) < 1).all())
    True
    """
    low_53 = (1 << 53) - 1  # torch's shift of int64 keeps the sign, which must not be kept here
    return hashed(*keys).bitwise_right_shift_(11).bitwise_and_(low_53).double().mul_(2.0**-53)


def shuffles(draws: Tensor, sizes: Tensor) -> Tensor:
    """Draws (C, E, N) to orders (C, E, N) that begin with a permutation of range(sizes[i]), the rest behind it.

    The order is that of the draws, up to their last 20 bits (more where N needs them): these make room for the
    position, since sorting numbers is many times faster than sorting positions by numbers. It does not depend on
    how far N exceeds a client's size. CPU only.

    >>> shuffles(hashed(0, torch.arange(2)[:, None, None], torch.arange(4)), torch.tensor([4, 2])).sort().values[0]
    tensor([[0, 1, 2, 3]])
    """
    last = draws.shape[-1]
    low = (1 << max(20, last.bit_length())) - 1
    position = torch.arange(last)
    keys = draws & ~low
    keys.masked_fill_(position >= sizes[:, None, None], torch.iinfo(torch.int64).max & ~low)
    keys.bitwise_or_(position)  # the places filled above, so that a row is a permutation to its end
    keys.numpy().sort(axis=-1)
    return keys.bitwise_and_(low)


def _splitmix(state: Tensor) -> None:
    """In place, in numpy's unsigned numbers and in parts that stay in the cache: it is memory that takes the time."""
    flat = state.numpy().reshape(-1).view(np.uint64)
    for start in range(0, len(flat), _PART):
        z = flat[start : start + _PART]
        shifted = np.empty_like(z)
        z += _GAMMA
        z ^= np.right_shift(z, _30, out=shifted)
        z *= _FIRST
        z ^= np.right_shift(z, _27, out=shifted)
        z *= _SECOND
        z ^= np.right_shift(z, _31, out=shifted)
