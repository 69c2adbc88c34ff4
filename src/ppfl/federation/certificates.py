"""Keys and certificates of a federation, as bytes of files.

One authority of its own signs the server's certificate: sites trust this authority and no other. Every site proves who
it is with a key of its own, in the form that flwr's SuperNode reads (OpenSSH, an elliptic curve of NIST).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from typing import NamedTuple

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA384
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from ..errors import SettingError

AUTHORITY_DAYS, CERTIFICATE_DAYS = 3650, 825
CLOCKS_DIFFER = timedelta(hours=1)  # a machine whose clock is slow must not find that a certificate is not valid yet
_HOST = re.compile(
    r"(\*\.)?([a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9])?\.)*[a-z0-9_]([a-z0-9_-]{0,61}[a-z0-9])?", re.IGNORECASE
)


class Issued(NamedTuple):
    """A certificate and the private key that belongs to it, both PEM."""

    certificate: bytes
    private_key: bytes


class KeyPair(NamedTuple):
    """Keys by which a site proves who it is, both in the OpenSSH format."""

    private_key: bytes
    public_key: bytes


def create_authority(
    name: str = "ppfl federation", days: int = AUTHORITY_DAYS, valid_from: datetime | None = None
) -> Issued:
    """An authority that signs certificates of servers. Its private key is needed for nothing else.

    >>> create_authority().certificate.splitlines()[0]
    b'-----BEGIN CERTIFICATE-----'
    """
    key, subject = ec.generate_private_key(ec.SECP384R1()), _name(name)
    builder = (
        _builder(subject, subject, key.public_key(), days, valid_from)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(key_cert_sign=True, crl_sign=True), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
    )
    return Issued(builder.sign(key, SHA384()).public_bytes(Encoding.PEM), _private_pem(key))


def create_certificate(
    authority: Issued, hosts: Sequence[str], days: int = CERTIFICATE_DAYS, valid_from: datetime | None = None
) -> Issued:
    """A server's certificate for these host names and IP addresses.

    >>> server = create_certificate(create_authority(), ["localhost", "127.0.0.1"])
    >>> server.private_key.splitlines()[0]
    b'-----BEGIN PRIVATE KEY-----'
    """
    if not hosts:
        raise SettingError(
            "a certificate without a host; name the server as sites will call it, such as 'fl.example.org'"
        )
    names = x509.SubjectAlternativeName([_alternative_name(host) for host in hosts])
    signer = load_pem_private_key(authority.private_key, password=None)
    issuer = x509.load_pem_x509_certificate(authority.certificate)
    assert isinstance(signer, ec.EllipticCurvePrivateKey)
    key = ec.generate_private_key(ec.SECP384R1())
    builder = (
        _builder(_name(hosts[0]), issuer.subject, key.public_key(), days, valid_from)
        .add_extension(names, critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(digital_signature=True), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
    )
    return Issued(builder.sign(signer, SHA384()).public_bytes(Encoding.PEM), _private_pem(key))


def create_key_pair() -> KeyPair:
    """Keys of a site: the private one stays with it, the server registers the public one.

    >>> create_key_pair().public_key[:19]
    b'ecdsa-sha2-nistp384'
    """
    key = ec.generate_private_key(ec.SECP384R1())
    return KeyPair(
        key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()),
        key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + b"\n",
    )


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    public_key: ec.EllipticCurvePublicKey,
    days: int,
    valid_from: datetime | None,
) -> x509.CertificateBuilder:
    if days < 1:
        raise SettingError(f"a certificate for {days} days; set days >= 1")
    start = datetime.now(UTC) - CLOCKS_DIFFER if valid_from is None else valid_from
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public_key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(start + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])  # longer ones are not valid


def _alternative_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        if not _HOST.fullmatch(host) or len(host) > 253:
            raise SettingError(
                f"{host!r} is no host name and no IP address; write it without port or scheme, such as 'fl.example.org'"
            ) from None
        return x509.DNSName(host)


def _usage(*, digital_signature: bool = False, key_cert_sign: bool = False, crl_sign: bool = False) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=digital_signature,
        key_cert_sign=key_cert_sign,
        crl_sign=crl_sign,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
