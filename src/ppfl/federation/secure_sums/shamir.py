"""Shamir's secret sharing (1979): any `threshold` shares give the secret, fewer say nothing about it.

The secret is the value at 0 of a random polynomial of degree threshold - 1 over the integers modulo a prime; share
number x is its value at x.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from secrets import token_bytes

from ...errors import SettingError

PRIME = 2**256 + 297  # the smallest one above all secrets of 32 bytes
SECRET_BYTES, SHARE_BYTES = 32, 33

RandomBytes = Callable[[int], bytes]


def split_secret(secret: bytes, shares: int, threshold: int, random_bytes: RandomBytes = token_bytes) -> list[bytes]:
    """Shares number 1, 2, ... of a secret of 32 bytes.

    >>> one, two, three = split_secret(b"s" * 32, shares=3, threshold=2)
    >>> join_shares({1: one, 3: three}, threshold=2) == b"s" * 32
    True
    """
    if len(secret) != SECRET_BYTES:
        raise SettingError(f"a secret of {len(secret)} bytes; shares are made of {SECRET_BYTES}")
    if not 1 <= threshold <= shares:
        raise SettingError(f"threshold is {threshold} for {shares} shares; set 1 <= threshold <= shares")
    coefficients = [int.from_bytes(secret, "big"), *(_below_prime(random_bytes) for _ in range(threshold - 1))]
    return [_value(coefficients, x).to_bytes(SHARE_BYTES, "big") for x in range(1, shares + 1)]


def join_shares(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """The secret from at least `threshold` shares, by their numbers: Lagrange's polynomial at 0."""
    if len(shares) < threshold:
        raise SettingError(f"{len(shares)} shares of a secret, {threshold} are needed; wait for more sites")
    chosen = sorted(shares)[:threshold]
    secret = 0
    for x in chosen:
        above = below = 1
        for other in chosen:
            if other != x:
                above = above * other % PRIME
                below = below * (other - x) % PRIME
        secret += int.from_bytes(shares[x], "big") * above * pow(below, -1, PRIME)
    secret %= PRIME
    if secret >> 8 * SECRET_BYTES:
        raise SettingError("the shares do not belong together; all of them must be of one secret")
    return secret.to_bytes(SECRET_BYTES, "big")


def _value(coefficients: list[int], x: int) -> int:
    """Of the polynomial at x, by Horner's rule."""
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * x + coefficient) % PRIME
    return value


def _below_prime(random_bytes: RandomBytes) -> int:
    """Even over 0, ..., PRIME - 1. Of 64 bits more than the prime has, so that the remainder is even to 2^-63."""
    return int.from_bytes(random_bytes(SHARE_BYTES + 8), "big") % PRIME
