"""What sites and servers send each other: messages opened, changed, and sealed again."""

from ppfl.core.trees import named_leaves, tree_map
from ppfl.federation.envelope import REPLIES, REQUESTS, seal, unseal
from ppfl.federation.secure_sums.messages import AcceptKeys, KeyOffer, Masked, OfferKey, Unmask
from ppfl.io.codec import size_of
from ppfl.sites.messages import decode, encode

__all__ = ["AcceptKeys", "KeyOffer", "Masked", "OfferKey", "Unmask", "encode", "named_leaves", "size_of", "tree_map"]


def payload_of(sealed: bytes):
    """The requests or replies in a message, or the text of an error."""
    envelope = unseal(sealed)
    return decode(envelope.payload) if envelope.kind in (REQUESTS, REPLIES) else envelope.payload.decode()


def with_payload(sealed: bytes, payload) -> bytes:
    return seal(unseal(sealed)._replace(payload=encode(payload)))
