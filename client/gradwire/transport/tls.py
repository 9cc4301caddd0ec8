"""TLS as the connecting end uses it: which certificates, and why a connection cannot be had."""

from __future__ import annotations

import os
import weakref
from dataclasses import dataclass

from gradwire.errors import ConnectFailed
from gradwire.system import tls_handshakes
from gradwire.system.certificates import BadCertificates, CertificateFiles, Certificates, WatchedCertificates
from gradwire.transport.addresses import host_and_port

__all__ = ["Tls", "certificates_of", "explain"]

_PROBE_SECONDS = 2.0

_watched: weakref.WeakValueDictionary[CertificateFiles, WatchedCertificates] = weakref.WeakValueDictionary()
"""Those that links use. A link that replaces one that has ended gets the same, so that it has the last good
certificates although the files are bad now."""


@dataclass(frozen=True)
class Tls:
    """How to connect to workers with TLS. The files are in PEM form, and may be replaced at any time.

    Without `ca`, the default root certificates of gRPC are trusted.
    """

    ca: str | os.PathLike[str] | None = None
    """A file with the CAs that have signed the workers' certificates."""
    cert: str | os.PathLike[str] | None = None
    """A file with the certificate of this process, for workers that want one of their clients."""
    key: str | os.PathLike[str] | None = None
    """A file with the private key of `cert`, without a password."""
    server_name: str | None = None
    """The name that a worker's certificate has to be for. Without it, that is the host of its address."""

    def __post_init__(self) -> None:
        # The same files are the same settings, however they are written and wherever the process goes.
        for name in ("ca", "cert", "key"):
            path: str | os.PathLike[str] | None = getattr(self, name)
            if path is not None:
                object.__setattr__(self, name, os.path.abspath(os.path.expanduser(path)))

    @classmethod
    def from_environment(cls) -> Tls | None:
        """What GRADWIRE_TLS_CA, _CERT, _KEY and _SERVER_NAME say; None if none of them is set."""
        names = ("ca", "cert", "key", "server_name")
        found = {name: os.environ.get(f"GRADWIRE_TLS_{name.upper()}") or None for name in names}
        return cls(**found) if any(found.values()) else None

    @property
    def files(self) -> CertificateFiles:
        """The paths of the files."""
        paths = (None if path is None else os.fspath(path) for path in (self.ca, self.cert, self.key))
        return CertificateFiles(*paths)


def certificates_of(tls: Tls) -> WatchedCertificates:
    """The certificates in the files. Raises ConnectFailed if they cannot be used."""
    found = _watched.get(tls.files)
    if found is None:
        try:
            found = _watched.setdefault(tls.files, WatchedCertificates(tls.files))
        except BadCertificates as error:
            raise ConnectFailed(f"TLS: {error}", retryable=False) from error
    return found


def explain(target: str, tls: Tls | None, certificates: Certificates | None, seconds: float) -> str | None:
    """Why a worker will never take a connection, if that has to do with TLS; None if it may later. Tries a
    handshake, which takes some time."""
    seconds = min(max(seconds, 0.5), _PROBE_SECONDS)
    try:
        address, host = _address(target)
        if tls is not None and certificates is not None:
            return tls_handshakes.refusal(address, tls.server_name or host, certificates, seconds)
        if tls_handshakes.speaks_tls(address, seconds):
            return "it speaks TLS: give its CA (tls=gw.Tls(ca=...), --tls-ca or GRADWIRE_TLS_CA)"
    except ValueError:
        pass  # an address, or a name, in a form that only gRPC knows
    return None


def _address(target: str) -> tuple[tuple[str, int] | str, str]:
    """Where to connect, and the name of the host."""
    if target.startswith("unix:"):
        return target.removeprefix("unix:").removeprefix("//"), "localhost"
    host, port = host_and_port(target)
    return (host, port), host
