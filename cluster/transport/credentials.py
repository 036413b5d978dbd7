"""Certificates that authenticate the Router, its workers and Ingresses to each other.

A process makes self-signed certificates, valid until it ends, and sends them through Ray. Each side of a connection
accepts exactly the certificate that it was given. Only the key of an inbox's senders leaves its process.
"""

import ssl
import tempfile
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

_NAME = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "paceline")])
_LIFETIME = timedelta(days=3650)  # longer than any process runs
_CLOCK_SKEW = timedelta(days=1)


@dataclass(frozen=True, slots=True)
class Credentials:
    """A certificate and its secret key, both in PEM format."""

    certificate: str
    secret_key: str = field(repr=False)


def make_credentials() -> Credentials:
    """Return a new key and its self-signed certificate."""
    key = ec.generate_private_key(ec.SECP256R1())
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(_NAME)
        .issuer_name(_NAME)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + _LIFETIME)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    return Credentials(certificate.public_bytes(Encoding.PEM).decode(), secret.decode())


def tls_context(credentials: Credentials, peer_certificate: str, *, is_server: bool) -> ssl.SSLContext:
    """Return a TLS 1.3 context that presents `credentials` and accepts only the holder of `peer_certificate`."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_server else ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # the certificate itself is compared, not its name
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=peer_certificate)
    with tempfile.NamedTemporaryFile("w") as file:  # readable by its owner only; OpenSSL loads keys from files only
        file.write(credentials.secret_key + credentials.certificate)
        file.flush()
        context.load_cert_chain(file.name)
    return context
