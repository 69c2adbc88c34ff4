"""Keys that each two sites have in common and the server has not.

For every run a site makes a key pair (X25519, RFC 7748) and signs its public half with the key that `ppfl federation
init` gave it. The others know the public key that belongs to the signature, so that the server, which carries the
offers, cannot put a key of its own in their place. Private keys are in memory alone and are gone when a run ends: what
was recorded in a run cannot be read with keys that are stolen later.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_ssh_private_key,
    load_ssh_public_key,
)

from ..federation_errors import FederationError
from .mask_streams import KEY_BYTES, PROTOCOL, derive_key
from .messages import KeyOffer
from .secure_settings import SecureSettings
from .shamir import RandomBytes

PublicKeys = Mapping[str, bytes]  # by site, in the OpenSSH format


class SiteIdentity:
    """The key by which the other sites know a site."""

    def __init__(self, name: str, private_key: bytes, public_keys: PublicKeys) -> None:
        key = load_ssh_private_key(private_key, None)
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise FederationError(f"the private key of site {name!r} is of another kind; use the one that init made")
        if key.public_key() != _pinned_key(name, public_keys):
            raise FederationError(
                f"the private key of site {name!r} does not belong to the public key that the others know it by; use "
                f"the folder that init made for {name!r}"
            )
        self.name, self.public_keys, self._key = name, public_keys, key

    def offer(self, run: str, public: X25519PublicKey, settings: SecureSettings) -> KeyOffer:
        """A public key for one run, signed."""
        key, text = public.public_bytes(Encoding.Raw, PublicFormat.Raw).hex(), settings.model_dump_json()
        signature = self._key.sign(_signed_text(run, self.name, key, text), ec.ECDSA(SHA384()))
        return KeyOffer(key, text, signature.hex())


def check_offers(run: str, offers: Mapping[str, KeyOffer], public_keys: PublicKeys, settings: SecureSettings) -> None:
    """Refuse keys that a site did not sign for this run, and sites with other settings."""
    for name, offer in offers.items():
        text = _signed_text(run, name, offer.key, offer.settings)
        try:
            _pinned_key(name, public_keys).verify(bytes.fromhex(offer.signature), text, ec.ECDSA(SHA384()))
        except (InvalidSignature, ValueError) as error:
            if isinstance(error, FederationError):
                raise
            raise FederationError(
                f"site {name!r} offered a key that is not signed, for run {run!r}, with the key that init gave it; "
                f"someone else may have answered in its place, or it uses another folder"
            ) from None
        if offer.settings != settings.model_dump_json():
            raise FederationError(
                f"site {name!r} has the secure sums settings {offer.settings}, here they are "
                f"{settings.model_dump_json()}; give all sites the same"
            )


def name_of_keys(run: str, offers: Mapping[str, KeyOffer]) -> str:
    """A name for the keys of all sites, that all derive from what they have seen."""
    seen = [[name, offer.key, offer.settings] for name, offer in sorted(offers.items())]
    return sha256(json.dumps([PROTOCOL, run, seen]).encode()).hexdigest()


class PairKeys:
    """What a site has in common with each of the others in one run."""

    def __init__(self, run: str, name: str, private: X25519PrivateKey, offers: Mapping[str, KeyOffer]) -> None:
        self.run, self.name, self.sites = run, name, tuple(sorted(offers))
        self.keys = name_of_keys(run, offers)
        self._salt = bytes.fromhex(self.keys)
        self._shared = {site: _exchange(private, site, offer) for site, offer in offers.items()}

    @property
    def others(self) -> tuple[str, ...]:
        return tuple(site for site in self.sites if site != self.name)

    def seed(self, other: str, number: int) -> bytes:
        """Of the masks that this site and another one put on request `number`: the same for both."""
        return derive_key(self._shared[other], "mask", number, *sorted((self.name, other)), salt=self._salt)

    def seal(self, receiver: str, number: int, text: bytes) -> bytes:
        """A packet for one site alone. There is one packet per key, so the nonce is zero."""
        key = self._packet_key(receiver, number, self.name, receiver)
        return ChaCha20Poly1305(key).encrypt(bytes(12), text, None)

    def open(self, sender: str, number: int, packet: bytes) -> bytes:
        """What another site, or this one, has sealed for this one."""
        try:
            key = self._packet_key(sender, number, sender, self.name)
            return ChaCha20Poly1305(key).decrypt(bytes(12), packet, None)
        except InvalidTag:
            raise FederationError(
                f"a packet from site {sender!r} to {self.name!r} is not of request {number} with these keys, or was "
                f"changed on its way; nothing is opened"
            ) from None

    def _packet_key(self, other: str, number: int, sender: str, receiver: str) -> bytes:
        return derive_key(self._shared[other], "packet", number, sender, receiver, salt=self._salt)


def new_private_key(random_bytes: RandomBytes) -> X25519PrivateKey:
    """For one run."""
    return X25519PrivateKey.from_private_bytes(random_bytes(KEY_BYTES))


def _exchange(private: X25519PrivateKey, site: str, offer: KeyOffer) -> bytes:
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(bytes.fromhex(offer.key)))
    except ValueError:  # a key of low order would give everyone the same secret
        raise FederationError(f"site {site!r} offered a key that is no public key; start it again") from None


def _signed_text(run: str, name: str, key: str, settings: str) -> bytes:
    return json.dumps([PROTOCOL, "offer", run, name, key, settings]).encode()


def _pinned_key(name: str, public_keys: PublicKeys) -> ec.EllipticCurvePublicKey:
    if name not in public_keys:
        raise FederationError(f"site {name!r} is not one of {', '.join(sorted(public_keys))}; add it with init first")
    key = load_ssh_public_key(public_keys[name])
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise FederationError(f"the public key of site {name!r} is of another kind; use the one that init made")
    return key
