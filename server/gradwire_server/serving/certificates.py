"""The certificates of a worker: reloaded whenever a client connects and the files have changed."""

from __future__ import annotations

import grpc

from gradwire.system.certificates import (
    BadCertificates,
    CertificateFiles,
    Certificates,
    WatchedCertificates,
    read_certificates,
)
from gradwire_server.errors import CertificateError

__all__ = ["ServerCertificates", "check_certificates"]


class ServerCertificates:
    """What a worker shows to its clients, and by which CAs it knows theirs."""

    def __init__(self, files: CertificateFiles) -> None:
        """With a `ca`, clients need a certificate that it has signed. Raises CertificateError."""
        try:
            self._watched = WatchedCertificates(files)
        except BadCertificates as error:
            raise CertificateError(str(error)) from error
        self._used = self._watched.latest()
        self._needs_client_certificate = files.ca is not None

    def credentials(self) -> grpc.ServerCredentials:
        """What gRPC needs to listen with TLS, of version 1.2 or later."""
        credentials: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
            _configuration(self._used),
            self._renewed,  # type: ignore[arg-type]  # it may return None, the stubs do not know that
            self._needs_client_certificate,
        )
        return credentials

    def _renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC before each handshake: the new certificates; None if they are those of before."""
        latest = self._watched.latest()
        if latest is self._used:
            return None
        self._used = latest
        return _configuration(latest)


def check_certificates(files: CertificateFiles) -> None:
    """Raises CertificateError if the files cannot be used."""
    try:
        read_certificates(files)
    except BadCertificates as error:
        raise CertificateError(str(error)) from error


def _configuration(certificates: Certificates) -> grpc.ServerCertificateConfiguration:
    assert certificates.key is not None
    assert certificates.cert is not None
    return grpc.ssl_server_certificate_configuration([(certificates.key, certificates.cert)], certificates.ca)
