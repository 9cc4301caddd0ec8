"""Certificates for tests, made as ``gradwire certs`` makes them, good and bad ones."""

from __future__ import annotations

import shutil
from pathlib import Path

import gradwire as gw
from gradwire.cli import signing
from gradwire.cli.certs import make_certificates

__all__ = ["Certificates", "install"]

_EXPIRED_DAYS = -0.02
"""Half an hour ago; it became valid another half an hour before."""


class Certificates:
    """A CA in a folder of its own, and what it has signed."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        make_certificates(folder)
        self._authority, _ = signing.open_authority(folder)

    @property
    def ca(self) -> Path:
        return self.folder / "ca.pem"

    def path(self, name: str) -> Path:
        return self.folder / f"{name}.pem"

    def sign(self, name: str, host: str = "", *, serves: bool = True, expired: bool = False) -> None:
        """Another certificate, for this host alone, else for this machine."""
        names = signing.client_names(host) if host else signing.server_names(())
        days = _EXPIRED_DAYS if expired else 1.0
        signing.sign(self._authority, self.path(name), names, days, serves=serves)

    def of_server(self, name: str = "server") -> dict[str, Path]:
        """Arguments of a worker that shows this certificate."""
        return {"tls_cert": self.path(name), "tls_key": self.path(f"{name}-key")}

    def flags(self, name: str = "server") -> list[str]:
        """The same for the command line."""
        return ["--tls-cert", str(self.path(name)), "--tls-key", str(self.path(f"{name}-key"))]

    def tls(self, client: str | None = None, server_name: str | None = None) -> gw.Tls:
        """For a client that trusts this CA, and shows a certificate of it."""
        if client is None:
            return gw.Tls(self.ca, server_name=server_name)
        return gw.Tls(self.ca, self.path(client), self.path(f"{client}-key"), server_name)

    def environment(self, client: str | None = None) -> dict[str, str]:
        """The same as variables."""
        tls = self.tls(client)
        values = {"CA": tls.ca, "CERT": tls.cert, "KEY": tls.key}
        return {f"GRADWIRE_TLS_{name}": str(value) for name, value in values.items() if value}


def install(found: Certificates, name: str, folder: Path, as_name: str) -> None:
    """Copies a certificate and its key over others, as who renews them does: each at once."""
    for suffix in ("-key.pem", ".pem"):
        new = folder / f".{as_name}{suffix}"
        shutil.copy(found.folder / f"{name}{suffix}", new)
        new.replace(folder / f"{as_name}{suffix}")
