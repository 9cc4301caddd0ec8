"""Certificates in PEM files: checked before they are used, and read again when the files change.

Kept apart from all that loads torch: health checks use it.
"""

from __future__ import annotations

import logging
import os
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NoReturn

__all__ = ["BadCertificates", "CertificateFiles", "Certificates", "WatchedCertificates", "read_certificates"]

log = logging.getLogger("gradwire.tls")


class BadCertificates(Exception):
    """A file cannot be read, or is not what it has to be. The message names the file and what to do."""


@dataclass(frozen=True)
class CertificateFiles:
    """The paths of PEM files. What a process does not need is None."""

    ca: str | None = None
    """The CAs that have signed the certificates of the other processes."""
    cert: str | None = None
    """The certificate of this process, followed by those between it and its CA, if there are any."""
    key: str | None = None
    """The private key of that certificate."""


@dataclass(frozen=True)
class Certificates:
    """What was in the files, after it was checked."""

    files: CertificateFiles
    ca: bytes | None = None
    cert: bytes | None = None
    key: bytes | None = None

    def ssl_context(self) -> ssl.SSLContext:
        """The context of a client that uses them. Raises BadCertificates if they cannot be used."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        # As gRPC does: a certificate in the file is trusted, also if it is not a root.
        context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
        if self.ca is None:
            context.load_default_certs()
        else:
            self._load_ca(context, self.ca)
        if self.cert is not None and self.key is not None:
            self._load_chain(context, self.cert, self.key)
        return context

    def _load_ca(self, context: ssl.SSLContext, ca: bytes) -> None:
        try:
            # Comments between the certificates may be in any encoding.
            context.load_verify_locations(cadata=ca.decode("ascii", "ignore"))
        except (ssl.SSLError, ValueError) as error:
            raise BadCertificates(
                f"{self.files.ca} has no certificate of a CA that can be read ({_reason(error)}); "
                "it must be a PEM file"
            ) from None

    def _load_chain(self, context: ssl.SSLContext, cert: bytes, key: bytes) -> None:
        if b"-----BEGIN CERTIFICATE-----" not in cert:
            raise BadCertificates(f"{self.files.cert} has no certificate in it; it must be a PEM file")
        if b"PRIVATE KEY-----" not in key:
            raise BadCertificates(f"{self.files.key} has no private key in it; it must be a PEM file")

        def refuse_password() -> NoReturn:
            raise BadCertificates(f"{self.files.key} is encrypted; store the key without a password")

        try:
            with _in_memory(cert) as cert_path, _in_memory(key) as key_path:
                context.load_cert_chain(cert_path, key_path, password=refuse_password)
        except ssl.SSLError as error:
            if error.reason == "KEY_VALUES_MISMATCH":
                raise BadCertificates(
                    f"{self.files.key} is not the key of the certificate in {self.files.cert}; "
                    "give the two files that were made together"
                ) from None
            raise BadCertificates(
                f"{self.files.cert} with the key {self.files.key} cannot be used: {_reason(error)}"
            ) from None


@contextmanager
def _in_memory(content: bytes) -> Iterator[str]:
    """The path of a file in memory. `ssl` reads certificates from files only, and what is checked must be the
    very bytes that are used afterwards."""
    descriptor = os.memfd_create("gradwire-certificates")
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(content)
        yield f"/proc/self/fd/{descriptor}"
    finally:
        os.close(descriptor)


def _reason(error: Exception) -> str:
    reason: str = getattr(error, "reason", None) or str(error).partition(":")[0]
    return reason.replace("_", " ").lower()


def read_certificates(files: CertificateFiles) -> Certificates:
    """Raises BadCertificates if a file cannot be read, or cannot be used."""
    if (files.cert is None) != (files.key is None):
        given, missing = (files.cert, "key") if files.key is None else (files.key, "certificate")
        raise BadCertificates(f"{given} was given without the {missing} that belongs to it; give both")
    found = Certificates(files, _read(files.ca), _read(files.cert), _read(files.key))
    found.ssl_context()
    return found


def _read(path: str | None) -> bytes | None:
    if path is None:
        return None
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise BadCertificates(
            f"cannot read {path}: {error.strerror or error}; "
            "give a PEM file that this process may read (`gradwire certs` makes some)"
        ) from None


class WatchedCertificates:
    """Certificates that follow their files. If these change to something that cannot be used, what was read
    before stays in use."""

    def __init__(self, files: CertificateFiles) -> None:
        """Raises BadCertificates."""
        self.files = files
        self._lock = threading.Lock()
        self._seen = _state(files)
        self._latest = read_certificates(files)

    def latest(self) -> Certificates:
        """The latest that can be used: the same object as before if nothing has changed. Looks at the files,
        which is cheap, and logs once if they were changed."""
        with self._lock:
            level, message = self._look()
            latest = self._latest
        if message:
            log.log(level, "%s", message)
        return latest

    def _look(self) -> tuple[int, str]:
        """Reads the files if they were changed. Returns what there is to log. The lock is held."""
        state = _state(self.files)
        if state == self._seen:
            return logging.NOTSET, ""
        self._seen = state  # before they are read: should they change meanwhile, the next look sees that
        try:
            found = read_certificates(self.files)
        except BadCertificates as error:
            return logging.WARNING, f"certificates were not reloaded, the last good ones stay in use: {error}"
        if found == self._latest:
            return logging.NOTSET, ""
        self._latest = found
        names = (self.files.ca, self.files.cert, self.files.key)
        return logging.INFO, f"reloaded certificates: {', '.join(name for name in names if name)}"


def _state(files: CertificateFiles) -> list[object]:
    """What the system says of the files. It differs when they were written to, or replaced."""
    return [_state_of(path) for path in (files.ca, files.cert, files.key)]


def _state_of(path: str | None) -> object:
    if path is None:
        return None
    try:
        found = os.stat(path)
    except OSError as error:
        return error.errno
    return found.st_mtime_ns, found.st_ctime_ns, found.st_size, found.st_ino, found.st_dev
