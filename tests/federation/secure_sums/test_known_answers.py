"""Key agreement, masks and shares give what their standards print."""

import hmac
import json
from itertools import combinations

import pytest
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given
from hypothesis import strategies as st

from kit.messages import KeyOffer
from kit.refusals import SettingError, assert_refused
from ppfl.federation.federation_errors import FederationError
from ppfl.federation.secure_sums.key_agreement import PairKeys, new_private_key
from ppfl.federation.secure_sums.mask_streams import PROTOCOL, derive_key, mask_stream
from ppfl.federation.secure_sums.shamir import PRIME, SHARE_BYTES, join_shares, split_secret

# RFC 7748, section 6.1
ALICE = "77076d0a7318a57d3c16c17251b26645df4c2f87ebc0992ab177fba51db92c2a"
ALICE_PUBLIC = "8520f0098930a754748b7ddcb43ef75a0dbf3a0d26381af4eba4a98eaa9b4e6a"
BOB = "5dab087e624a8a4b79e17f8b83800ee66f3bb1292618b6fd1c2f8b27ff88e0eb"
BOB_PUBLIC = "de9edb7d7b7dc1b4d35b61c2ece435373f8343c85b78674dadfc7e146f882b4f"
SHARED = "4a5d9d5ba4ce2de1728e3bf480350f25e07e21c947d19e3376f09b3c1e161742"

# RFC 8439, appendix A.1: test vectors 1 and 2 are two blocks of one stream
ZERO_STREAM = (
    "76b8e0ada0f13d90405d6ae55386bd28bdd219b8a08ded1aa836efcc8b770dc7"
    "da41597c5157488d7724e03fb8d84a376a43b8f41518a11cc387b669b2ee6586"
    "9f07e7be5551387a98ba977c732d080dcb0f29a048e3656912c6533e32ee7aed"
    "29b721769ce64e43d57133b074d839d531ed1f28510afb45ace10a1f4b794d6f"
)
SECOND_BLOCK_OF_KEY_1 = (  # test vector 3
    "3aeb5224ecf849929b9d828db1ced4dd832025e8018b8160b82284f3c949aa5a"
    "8eca00bbb4a73bdad192b5c42f73f2fd4e273644c8b36125a64addeb006c13a0"
)


def test_two_sites_agree_on_the_secret_of_rfc_7748():
    private = {name: new_private_key(lambda size: bytes.fromhex(key)) for name, key in [("alice", ALICE), ("bob", BOB)]}
    raw = (Encoding.Raw, PublicFormat.Raw)
    public = {name: key.public_key().public_bytes(*raw).hex() for name, key in private.items()}
    assert public == {"alice": ALICE_PUBLIC, "bob": BOB_PUBLIC}
    offers = {name: KeyOffer(key, "{}", "") for name, key in public.items()}
    for name, other in [("alice", "bob"), ("bob", "alice")]:
        assert PairKeys("run", name, private[name], offers)._shared[other].hex() == SHARED
    low_order = {"b": KeyOffer("00" * 32, "{}", "")}
    assert_refused(lambda: PairKeys("run", "a", private["alice"], low_order), FederationError, "no public key")


@pytest.mark.parametrize("bits", [32, 64])
def test_masks_are_the_stream_of_rfc_8439(bits):
    assert mask_stream(bytes(32), 128 * 8 // bits, bits).tobytes().hex() == ZERO_STREAM
    assert mask_stream(bytes(31) + b"\1", 128 * 8 // bits, bits).tobytes()[64:].hex() == SECOND_BLOCK_OF_KEY_1


def naive_hkdf(secret, salt, info, length):
    """RFC 5869, section 2, line by line."""
    key = hmac.digest(salt or bytes(32), secret, "sha256")
    block, found = b"", b""
    for at in range(1, length // 32 + 2):
        block = hmac.digest(key, block + info + bytes([at]), "sha256")
        found += block
    return found[:length]


def test_keys_are_derived_as_in_rfc_5869():
    """The naive twin gives the RFC's first and third vectors, and our keys are the twin's."""
    first = naive_hkdf(b"\x0b" * 22, bytes(range(13)), bytes(range(0xF0, 0xFA)), 42)
    assert first.hex() == "3cb25f25faacd57a90434f64d0362f2a2d2d0a90cf1a5a4c5db02d56ecc4c5bf34007208d5b887185865"
    third = naive_hkdf(b"\x0b" * 22, b"", b"", 42)
    assert third.hex() == "8da4e775a563c18f715f802a063c5a31b8a11f5c5ee1879ec3454e5f3c738d2d9d201395faa4b61a96c8"
    for salt in (b"", b"salt"):
        info = json.dumps([PROTOCOL, "mask", 7]).encode()
        assert derive_key(b"s" * 32, "mask", 7, salt=salt) == naive_hkdf(b"s" * 32, salt, info, 32)
    alike = [("a", "b"), ("ab",), ("a,b",), ("a", "b", ""), ("a", 1), ("a", "1"), ("a1",), ("a", 11)]
    assert len({derive_key(bytes(32), *purpose) for purpose in alike}) == len(alike)


def from_numbers(*numbers):
    """Random bytes that stand for these numbers."""
    rest = iter(numbers)
    return lambda size: next(rest).to_bytes(size, "big")


def test_the_textbook_polynomial_and_shares_that_cannot_be_used():
    """1234 + 166 x + 94 x^2 at 1, ..., 6: worked by hand in many a text, and on paper here."""
    secret = (1234).to_bytes(32, "big")
    shares = split_secret(secret, shares=6, threshold=3, random_bytes=from_numbers(166, 94))
    assert [int.from_bytes(share, "big") for share in shares] == [1494, 1942, 2578, 3402, 4414, 5614]
    assert join_shares({2: shares[1], 4: shares[3], 5: shares[4]}, threshold=3) == secret
    assert_refused(lambda: join_shares({2: shares[1], 4: shares[3]}, threshold=3), SettingError, "3 are needed")
    too_large = {1: (PRIME - 1).to_bytes(SHARE_BYTES, "big")}  # a value that no secret of 32 bytes has
    assert_refused(lambda: join_shares(too_large, threshold=1), SettingError, "do not belong together")


@given(secret=st.binary(min_size=32, max_size=32), n=st.integers(1, 6), data=st.data())
def test_any_shares_that_are_enough_give_the_secret(secret, n, data):
    threshold = data.draw(st.integers(1, n))
    shares = dict(enumerate(split_secret(secret, n, threshold), start=1))
    for some in combinations(shares, threshold):
        assert join_shares({at: shares[at] for at in some}, threshold) == secret
    assert join_shares(shares, threshold) == secret


def test_one_share_too_few_fits_every_secret():
    """For any other secret there is a polynomial that gives the same share, so the share says nothing."""
    one, other = 5, 2**255 + 11
    shares = split_secret(one.to_bytes(32, "big"), 2, 2, from_numbers(77))
    shift = (one + 77 - other) % PRIME
    assert split_secret(other.to_bytes(32, "big"), 2, 2, from_numbers(shift))[0] == shares[0]
