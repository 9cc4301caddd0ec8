"""Making and signing certificates. Only this module imports cryptography, which is an extra."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

__all__ = ["Authority", "client_names", "names_in", "open_authority", "server_names", "sign"]

_CA_DAYS = 3650
_CLOCKS_MAY_DIFFER = timedelta(hours=1)
_LOCAL = ("localhost", "127.0.0.1", "::1")
_CLIENT_URI = "spiffe://gradwire/client"


@dataclass(frozen=True)
class Authority:
    """A CA and its key."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey


def open_authority(directory: Path) -> tuple[Authority, list[Path]]:
    """The CA in a directory, made if there is none. Also returns the files that were written. Raises
    ValueError if the files there cannot be used."""
    path, key_path = directory / "ca.pem", directory / "ca-key.pem"
    if path.exists() or key_path.exists():
        return _load(path, key_path), []
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gradwire development CA")])
    usage = _key_usage(signs_certificates=True)
    builder = (
        _builder(name, name, key, _CA_DAYS)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
    )
    certificate = builder.sign(key, hashes.SHA256())
    return Authority(certificate, key), _write(path, certificate, key)


def _load(path: Path, key_path: Path) -> Authority:
    for needed in (path, key_path):
        if not needed.exists():
            raise ValueError(f"{needed} is missing, without which no certificate can be signed")
    certificate = x509.load_pem_x509_certificate(path.read_bytes())
    key = serialization.load_pem_private_key(key_path.read_bytes(), password=None)
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise ValueError(f"{key_path} is not the key of {path}")
    return Authority(certificate, key)


def server_names(hosts: Iterable[str]) -> list[x509.GeneralName]:
    """The names of a worker: those of this machine, and these."""
    names: list[x509.GeneralName] = []
    for host in dict.fromkeys([*_LOCAL, *hosts]):
        try:
            names.append(x509.IPAddress(ip_address(host.strip("[]"))))
        except ValueError:
            names.append(x509.DNSName(host))
    return names


def client_names(name: str) -> list[x509.GeneralName]:
    """The name of a client; if it is empty, that of a client of no particular name."""
    return [x509.DNSName(name) if name else x509.UniformResourceIdentifier(_CLIENT_URI)]


def names_in(path: Path) -> list[x509.GeneralName]:
    """The names in a certificate. Raises ValueError if the file is none."""
    extensions = x509.load_pem_x509_certificate(path.read_bytes()).extensions
    try:
        return list(extensions.get_extension_for_class(x509.SubjectAlternativeName).value)
    except x509.ExtensionNotFound:
        return []


def sign(
    authority: Authority, path: Path, names: Sequence[x509.GeneralName], days: float, *, serves: bool
) -> list[Path]:
    """Writes a certificate and its key. Workers need one that serves; as they call others, it is one of a
    client, too."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, f"gradwire {path.stem}"[:64])])
    uses = [ExtendedKeyUsageOID.CLIENT_AUTH, *([ExtendedKeyUsageOID.SERVER_AUTH] if serves else [])]
    identifier = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.key.public_key())
    certificate = (
        _builder(subject, authority.certificate.subject, key, days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(uses), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(identifier, critical=False)
        .sign(authority.key, hashes.SHA256())
    )
    return _write(path, certificate, key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: float
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCKS_MAY_DIFFER)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _write(path: Path, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> list[Path]:
    key_path = path.with_name(f"{path.stem}-key.pem")
    encoded_key = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    # Each replaces what is there at once: whoever looks meanwhile never sees half a file.
    _put(key_path, encoded_key, 0o600)
    _put(path, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    return [path, key_path]


def _put(path: Path, content: bytes, mode: int) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
