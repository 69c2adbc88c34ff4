"""Certificates that TLS accepts from our authority alone, and keys that flwr reads."""

import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key, load_ssh_public_key
from cryptography.x509.oid import ExtendedKeyUsageOID

from ppfl.core.errors import SettingError
from ppfl.federation.certificates import Issued, create_authority, create_certificate, create_key_pair

AUTHORITY = create_authority()
SERVER = create_certificate(AUTHORITY, ["localhost", "127.0.0.1"])


def shake_hands(folder: Path, server: Issued, trusted: bytes | None, host: str = "localhost") -> None:
    """A TLS handshake between two ends that exchange bytes in memory; raises what a client would see."""
    (folder / "certificate.pem").write_bytes(server.certificate)
    (folder / "key.pem").write_bytes(server.private_key)
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(folder / "certificate.pem", folder / "key.pem")
    asking = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    asking.verify_flags |= ssl.VERIFY_X509_STRICT
    if trusted is not None:
        asking.load_verify_locations(cadata=trusted.decode())
    up, down = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = asking.wrap_bio(down, up, server_hostname=host)
    other = serving.wrap_bio(up, down, server_side=True)
    for _ in range(10):
        for end in (client, other):
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    assert client.version() == "TLSv1.3"
    assert client.getpeercert() is not None


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1"])
def test_a_site_that_trusts_the_authority_connects(tmp_path: Path, host: str) -> None:
    shake_hands(tmp_path, SERVER, AUTHORITY.certificate, host)


@pytest.mark.parametrize("trusted", [None, create_authority().certificate], ids=["none", "another authority"])
def test_a_site_without_the_authority_does_not_connect(tmp_path: Path, trusted: bytes | None) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="unable to get|self-signed|signature"):
        shake_hands(tmp_path, SERVER, trusted)


def test_a_certificate_is_for_its_hosts_alone(tmp_path: Path) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match="Hostname mismatch"):
        shake_hands(tmp_path, SERVER, AUTHORITY.certificate, "elsewhere.example")


def test_a_certificate_of_the_past_is_refused(tmp_path: Path) -> None:
    old = create_certificate(AUTHORITY, ["localhost"], days=30, valid_from=datetime.now(UTC) - timedelta(days=31))
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        shake_hands(tmp_path, old, AUTHORITY.certificate)


def test_a_server_cannot_sign_for_others(tmp_path: Path) -> None:
    """Whoever takes the server's key must not be able to make certificates that sites trust."""
    forged = create_certificate(SERVER, ["localhost"])
    chain = forged._replace(certificate=forged.certificate + SERVER.certificate)
    with pytest.raises(ssl.SSLCertVerificationError, match="invalid CA|CA cert"):
        shake_hands(tmp_path, chain, AUTHORITY.certificate)


def test_key_usages() -> None:
    authority, server = (x509.load_pem_x509_certificate(issued.certificate) for issued in (AUTHORITY, SERVER))
    for certificate, signs in [(authority, True), (server, False)]:
        usage = certificate.extensions.get_extension_for_class(x509.KeyUsage)
        assert usage.critical
        assert usage.value.key_cert_sign is signs
        assert usage.value.digital_signature is not signs
        basic = certificate.extensions.get_extension_for_class(x509.BasicConstraints)
        assert basic.critical and basic.value.ca is signs
    extended = server.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    assert list(extended) == [ExtendedKeyUsageOID.SERVER_AUTH]
    assert server.not_valid_before_utc < datetime.now(UTC) < server.not_valid_after_utc < authority.not_valid_after_utc
    server.verify_directly_issued_by(authority)


def test_a_site_key_is_one_that_flwr_takes() -> None:
    """Read as flwr's SuperNode reads its private key, and `flwr supernode register` the public one."""
    pair = create_key_pair()
    private, public = load_ssh_private_key(pair.private_key, None), load_ssh_public_key(pair.public_key)
    assert isinstance(private, ec.EllipticCurvePrivateKey) and isinstance(public, ec.EllipticCurvePublicKey)
    assert isinstance(public.curve, ec.SECP384R1)
    assert private.public_key() == public
    assert create_key_pair().public_key != pair.public_key


@pytest.mark.parametrize(
    ("hosts", "found"),
    [([], "without a host"), (["https://here"], "no host name"), (["here:9092"], "no host name"), ([""], "no host")],
)
def test_hosts_that_cannot_be_certified(hosts: list[str], found: str) -> None:
    with pytest.raises(SettingError, match=found):
        create_certificate(AUTHORITY, hosts)
