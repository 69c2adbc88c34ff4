"""Counter-based random numbers: a draw is a pure function of its keys (seed, round, client, position).

There is no generator state, so the draws of a client do not depend on the other clients, on the order of execution,
on the engine or on the number of workers. The hash is splitmix64, vectorised.
"""

from collections.abc import Iterable
from functools import lru_cache
from hashlib import blake2b
from itertools import islice

import numpy as np
import torch
from torch import Tensor

Key = int | str | Tensor

_GAMMA, _FIRST, _SECOND = map(np.uint64, (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_30, _27, _31 = map(np.uint64, (30, 27, 31))
_LOW_64 = (1 << 64) - 1
_PART = 1 << 15


@lru_cache(maxsize=256)  # the purposes of draws are few, and asked for in every round
def name_key(name: str) -> int:
    """A stable 63-bit key for a client id or for the purpose of a draw.

    >>> name_key("client-1") == name_key("client-1") != name_key("client-2")
    True
    """
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "big") >> 1


def name_keys(names: Iterable[str]) -> Tensor:
    """The keys of many names at once, int64 (M,).

    >>> name_keys(["a", "b"]).tolist() == [name_key("a"), name_key("b")]
    True
    """
    digests, rest = bytearray(), iter(names)
    while block := [blake2b(name.encode(), digest_size=8).digest() for name in islice(rest, _PART)]:
        digests += b"".join(block)
    return torch.from_numpy((np.frombuffer(digests, dtype=">u8") >> 1).astype(np.int64))


def hashed(*keys: Key, after: Tensor | None = None) -> Tensor:
    """Pseudo-random int64 numbers from keys; tensors are broadcast against each other. Computed on the CPU.

    `after` is the hash of the keys that come before these.

    >>> bool(hashed(1, 2, 3) == hashed(3, after=hashed(1, 2)))
    True
    """
    state: int | Tensor = 0 if after is None else after
    device = torch.device("cpu") if after is None else after.device
    for key in keys:
        if isinstance(key, Tensor):
            device, key = key.device, key.cpu()
        elif isinstance(key, str):
            key = name_key(key)
        mixed = state ^ key
        if isinstance(mixed, int):  # plain numbers are much faster than tensors of one
            state = _splitmix_number(mixed)
        else:
            state = mixed.contiguous()
            _splitmix(state)
    return (torch.tensor(state) if isinstance(state, int) else state).to(device)


def uniform(*keys: Key) -> Tensor:
    """Pseudo-random float64 numbers in [0, 1) from keys.

    >>> bool((uniform(0, "demo", torch.arange(100)) < 1).all())
    True
    """
    low_53 = (1 << 53) - 1  # clears the sign bits that torch's shift of int64 leaves
    return hashed(*keys).bitwise_right_shift_(11).bitwise_and_(low_53).double().mul_(2.0**-53)


def shuffles(draws: Tensor, sizes: Tensor) -> Tensor:
    """Orders (C, E, N) from draws (C, E, N): for client i, a random permutation of range(sizes[i]), then the rest.

    Positions are sorted by their draws without the lowest 20 bits (more if N needs them). These bits store the
    position, because sorting numbers is many times faster than an argsort. The permutation of a client does not
    depend on N. CPU only.

    >>> shuffles(hashed(0, torch.arange(2)[:, None, None], torch.arange(4)), torch.tensor([4, 2])).sort().values[0]
    tensor([[0, 1, 2, 3]])
    """
    last = draws.shape[-1]
    low = (1 << max(20, last.bit_length())) - 1
    position = torch.arange(last)
    keys = draws & ~low
    keys.masked_fill_(position >= sizes[:, None, None], torch.iinfo(torch.int64).max & ~low)
    keys.bitwise_or_(position)  # also for positions beyond the size, so that each row is a permutation of range(N)
    keys.numpy().sort(axis=-1)
    return keys.bitwise_and_(low)


def _splitmix_number(state: int) -> int:
    """`_splitmix` of one number, signed as in int64."""
    z = (state + int(_GAMMA)) & _LOW_64
    z = (z ^ z >> 30) * int(_FIRST) & _LOW_64
    z = (z ^ z >> 27) * int(_SECOND) & _LOW_64
    z ^= z >> 31
    return z - (1 << 64) if z >> 63 else z


def _splitmix(state: Tensor) -> None:
    """One splitmix64 step in place, in unsigned numpy integers and in parts that fit into the cache, for speed."""
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
