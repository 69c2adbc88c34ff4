"""Secure sums: the server reads totals over sites, and no site's own sum.

1. Roll call. Sites do the work, keep their sums, and answer "ready" with a nonce of their own.
2. Reveal. The server names the set of sites that are ready. Each of them checks the set and sends its sums as 64-bit
   integers under one mask for each other site: ChaCha20, with a key from X25519 of the two sites' pinned keys by HKDF,
   bound to the run, the request and the nonces of the set. Of two sites one adds the mask and the other takes it away.
   In the total over the set all masks cancel; in any other total they do not.

The server needs no cryptography. A server that lies about the set reads noise. Within an approval a set may only
shrink, and no request is revealed for two sets; what a site's leaving can show is said in THREATS.md. The protocol has
not been reviewed by a third party.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import Tensor

from ..core.draws import uniform
from ..core.settings import Settings
from ..errors import SettingError
from ..io.codec import join, specs_of, split
from ..sites import Evaluate, Reply, Train
from ..sites.messages import encode
from .messages import FederationError, Masked, Ready, Refused, Reveal, SumColumns

PROTOCOL = "ppfl secure sums 2"
STEPS = {"totals": 2.0**-32, "metrics": 2.0**-24}  # to which numbers are rounded
SUMS = Train | Evaluate | SumColumns  # requests that are answered with sums
_OPEN = ("asked", "participants", "lost", "refused")  # of a site in which nobody took part
_BITS = 62  # of a total, with its sign

Integers = npt.NDArray[np.uint64]
PublicKey = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class SecureSettings(Settings):
    """`[secure_sums]` of site.toml."""

    key: Path = Path("secure.key")  # made by `ppfl site init`
    min_sites: Annotated[int, Field(ge=2, le=10_000)] = 3  # a total over fewer is not revealed
    peers: dict[str, PublicKey]  # public keys of the other sites, which their owners compare over the telephone


def new_key() -> str:
    """A private key, as its file has it."""
    return secrets.token_hex(32)


def public_key(file: Path) -> str:
    """Of the private key in a file: what the other sites have under peers."""
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    raw: bytes = _private_key(file).public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
    return raw.hex()


# ---------------------------------------------------------------------- at a site


class SiteMasks:
    """The masks of one site."""

    def __init__(self, name: str, settings: SecureSettings, base: Path) -> None:
        from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

        self.name, self.min_sites = name, settings.min_sites
        private = _private_key(base / settings.key)
        if name in settings.peers:
            raise SettingError(f"peers of site {name!r} has its own name; name the other sites there")
        try:
            keys = {peer: X25519PublicKey.from_public_bytes(bytes.fromhex(key)) for peer, key in settings.peers.items()}
            self._secrets = {peer: private.exchange(key) for peer, key in keys.items()}
        except ValueError:  # a key of low order would give everyone the same secret
            raise SettingError("a key under peers is no public key; ask its owner for it again") from None

    def check_set(self, sites: Sequence[str], before: Sequence[str] | None) -> None:
        """Refuse a set that this site is not in, that is too small, has strangers, or has grown. before: the last
        set."""
        if self.name not in sites or not set(sites) <= {self.name, *self._secrets}:
            raise Refused("secure-set", f"the set is {sorted(sites)!r:.200}; peers are {sorted(self._secrets)!r:.200}")
        if len(sites) < self.min_sites:
            raise Refused("secure-set", f"a total over {len(sites)} sites; min_sites is {self.min_sites}")
        if before is not None and not set(sites) <= set(before):
            raise Refused("secure-set", "the set has a site that was not in the last one; sets may only shrink")

    def mask(self, reveal: Reveal, run: str, start: int, sums: Mapping[str, Integers]) -> Masked:
        """The sums under one mask for each other site of the set."""
        context = [PROTOCOL, run, start, reveal.number, reveal.digest, sorted(reveal.nonces.items())]
        found = {}
        for part, integers in sums.items():
            masked = integers.copy()
            for peer in sorted(reveal.nonces.keys() - {self.name}):
                key = derive_key(self._secrets[peer], json.dumps([*context, part, sorted((self.name, peer))]).encode())
                add_mask(masked, key, 1 if self.name < peer else -1)
            found[part] = torch.from_numpy(masked.view(np.int64))
        return Masked(found)


def derive_key(secret: bytes, info: bytes) -> bytes:
    """A key for one purpose (HKDF-SHA256, RFC 5869)."""
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    return HKDF(SHA256(), 32, None, info).derive(secret)


def mask_stream(key: bytes, count: int) -> Integers:
    """So many integers of 64 bits, every value equally likely (ChaCha20, RFC 8439). Every key is used once."""
    from cryptography.hazmat.primitives.ciphers import Cipher
    from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

    cipher = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    return np.frombuffer(cipher.update(bytes(8 * count)), dtype="<u8")


def add_mask(onto: Integers, key: bytes, sign: int) -> None:
    """Add a mask, or take it away, in place and modulo 2^64."""
    change = np.add if sign > 0 else np.subtract
    change(onto, mask_stream(key, len(onto)), out=onto)


def _private_key(file: Path) -> Any:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    try:
        return X25519PrivateKey.from_private_bytes(bytes.fromhex(file.read_text(encoding="ascii")))
    except (OSError, ValueError) as error:
        raise SettingError(f"{file} is no key for secure sums ({error}); make one with ppfl site init") from None


# ---------------------------------------------------------------------- sums as integers


def took_part(request: Any, reply: Reply) -> bool:
    """Whether a reply has sums of any client."""
    return not isinstance(request, Train) or float(reply.metrics["participants"]) > 0


def ready(reply: Reply, digest: str, *, took_part: bool) -> tuple[Reply, dict[str, Tensor]]:
    """What a site answers first, and the sums that it keeps. Without clients that took part there are no sums."""
    if not took_part:
        counts = {name: reply.metrics[name] for name in _OPEN}
        return Reply(metrics=counts, facts={"ready": Ready("", digest, {}, 0)}, refused=reply.refused), {}
    sums, layout = {}, {}
    for part, tree in (("totals", reply.totals), ("metrics", reply.metrics)):
        text, tensors = split(tree)
        flat = [tensor.detach().cpu().double().flatten() for tensor in tensors]
        sums[part], layout[part] = torch.cat([torch.zeros(0, dtype=torch.float64), *flat]), text.decode()
    found = Ready(secrets.token_hex(16), digest, layout, 1)
    return Reply(facts={"ready": found}, refused=reply.refused), sums


def to_integers(sums: Mapping[str, Tensor], sites: int, *purpose: int | str) -> dict[str, Integers]:
    """Sums in steps, each rounded up with a probability that is its fraction, so that rounding adds no drift. The same
    purpose, such as a seed and an exchange, gives the same integers."""
    found = {}
    for part, values in sums.items():
        steps = values / STEPS[part]
        if not bool((steps.abs() < 2.0 ** (_BITS - sites.bit_length())).all()):  # nor where one is not a number
            raise Refused("out-of-range", f"a number in {part} is too large for secure sums, or not a number")
        below = steps.floor()
        draws = uniform("rounding", part, *purpose, torch.arange(len(values)))
        found[part] = (below + (draws < steps - below)).to(torch.int64).numpy().view(np.uint64)
    return found


# ---------------------------------------------------------------------- at the server


class RollCall:
    """The sites that are ready for one request."""

    def __init__(self, replies: Mapping[str, Reply]) -> None:
        said = {site: reply.facts.get("ready") for site, reply in replies.items()}
        if odd := [site for site, found in said.items() if not isinstance(found, Ready)]:
            raise FederationError(f"site {odd[0]!r} has no secure sums; set them at all sites, or run without")
        self.replies = replies
        self.ready: dict[str, Ready] = {site: found for site, found in said.items() if found and found.layout}
        layouts = [json.dumps([found.digest, found.layout], sort_keys=True) for found in self.ready.values()]
        if len(set(layouts)) > 1:
            raise FederationError("sites do not agree on what they sum; install the same ppfl at all of them")

    def reveal(self, number: int) -> Reveal:
        """What every site of the set is asked."""
        first = next(iter(self.ready.values()))
        return Reveal(number, first.digest, {site: found.nonce for site, found in self.ready.items()})

    def total(self, masked: Mapping[str, Any]) -> Reply:
        """One reply of all sites of the set, and of those in which nobody took part."""
        first = next(iter(self.ready.values()))
        trees: dict[str, Any] = {}
        for part, layout in first.layout.items():
            specs = specs_of(layout.encode())
            sizes = [torch.Size(shape).numel() for _, shape in specs]
            together: Any = np.uint64(0)
            for site in self.ready:
                found = masked[site].parts.get(part) if isinstance(masked[site], Masked) else None
                if not isinstance(found, Tensor) or found.dtype != torch.int64 or found.shape != (sum(sizes),):
                    raise FederationError(f"site {site!r} revealed something else than it was ready for")
                together = together + found.numpy().view(np.uint64)
            numbers = torch.from_numpy(together.view(np.int64).astype(np.float64) * STEPS[part])
            parts = torch.split(numbers, sizes)
            whole = [one.reshape(shape).to(dtype) for one, (dtype, shape) in zip(parts, specs, strict=True)]
            trees[part] = join(layout.encode(), whole)
        metrics = dict(trees["metrics"])
        for site in self.replies.keys() - self.ready.keys():
            for name, value in self.replies[site].metrics.items():
                metrics[name] = metrics[name] + value
        refused = tuple(refusal for reply in self.replies.values() for refusal in reply.refused)
        return Reply(trees["totals"], metrics, refused=refused)


def digest_of_request(request: Any) -> str:
    """The same at all sites: of what was asked of all of them, with the tensors that all were sent."""
    if isinstance(request, Train):
        request = request._replace(who=None, own={}, merged=0, saved=0)
    elif isinstance(request, Evaluate):
        request = request._replace(own={}, without=())
    return sha256(encode(request)).hexdigest()
