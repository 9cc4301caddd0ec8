"""``gradwire certs``: makes a CA for development, and certificates of workers and clients."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from gradwire.cli.common import output
from gradwire.errors import GradwireError

__all__ = ["CertificatesNotMade", "certs", "make_certificates"]

_DAYS = 365
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class CertificatesNotMade(GradwireError):
    """The certificates could not be made; the message says why, and what to do."""


def certs(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where to put them. Made if need be.")],
    host: Annotated[
        list[str] | None,
        typer.Option(
            "--host",
            metavar="NAME|IP",
            help="A name or address by which workers are reached, besides localhost; repeatable.",
            show_default=False,
        ),
    ] = None,
    client: Annotated[
        list[str] | None,
        typer.Option(
            "--client",
            metavar="NAME",
            help="Make the certificate client-NAME.pem, in place of client.pem; repeatable.",
            show_default=False,
        ),
    ] = None,
    days: Annotated[
        int, typer.Option(min=1, help="How long the certificates of workers and clients are valid.")
    ] = _DAYS,
    force: Annotated[
        bool, typer.Option("--force", help="Replace certificates that are there. Never the CA.")
    ] = False,
) -> None:
    """Make certificates for development.

    A CA, and what it signs for workers and clients. Whoever has ca-key.pem can sign more. It is used again
    when the command runs again: with another --host and --force server.pem is replaced by one for all hosts,
    and another --client gets a certificate of its own. Needs the package cryptography, which gradwire[certs]
    installs.
    """
    made = make_certificates(directory, hosts=host or (), clients=client or (), days=days, force=force)
    console = output()
    for path in made:
        console.print(f"made {path}", soft_wrap=True)
    if not made:
        console.print("everything is there already; --force makes it anew", soft_wrap=True)
    there = directory.absolute()
    server, ca = there / "server", there / "ca.pem"
    own = there / (f"client-{client[0]}" if client else "client")
    console.print(
        "\nA worker takes them with\n\n"
        f"  gradwire-server serve MODULE --tls-cert {server}.pem --tls-key {server}-key.pem \\\n"
        f"      --tls-client-ca {ca}\n\n"
        "and a client with\n\n"
        f'  gw.connect(ADDRESS, tls=gw.Tls(ca="{ca}", cert="{own}.pem", key="{own}-key.pem"))\n\n'
        "or, without a change to the program, with\n\n"
        f"  export GRADWIRE_TLS_CA={ca}\n"
        f"  export GRADWIRE_TLS_CERT={own}.pem\n"
        f"  export GRADWIRE_TLS_KEY={own}-key.pem\n\n"
        "Leave out --tls-client-ca, and cert and key of the client, to let clients in without a "
        f"certificate. Keep {there / 'ca-key.pem'} to yourself: it is of no use to workers and clients.",
        soft_wrap=True,
    )


def make_certificates(
    directory: Path,
    *,
    hosts: Sequence[str] = (),
    clients: Sequence[str] = (),
    days: int = _DAYS,
    force: bool = False,
) -> list[Path]:
    """Makes what is not there yet, and with `force` all but the CA anew. Returns the files that were written.

    Raises CertificatesNotMade.
    """
    try:
        from gradwire.cli import signing
    except ImportError as error:
        raise CertificatesNotMade(
            f"this needs the package cryptography: pip install 'gradwire[certs]' ({error})"
        ) from error
    for name in clients:
        if not _NAME.fullmatch(name):
            raise CertificatesNotMade(f"{name!r} is no name of a client: letters, digits, '.', '_' and '-'")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        authority, written = signing.open_authority(directory)
        server = directory / "server.pem"
        names = signing.server_names(hosts)
        if server.exists():
            before = signing.names_in(server)
            missing = [name for name in names if name not in before]
            if missing and not force:
                shown = ", ".join(str(name.value) for name in missing)
                raise CertificatesNotMade(
                    f"{server} is not for {shown}; --force replaces it by one that is, signed by the same CA"
                )
            names = [*before, *missing]
        if force or not server.exists():
            written += signing.sign(authority, server, names, days, serves=True)
        for name in clients or ("",):
            path = directory / (f"client-{name}.pem" if name else "client.pem")
            if force or not path.exists():
                written += signing.sign(authority, path, signing.client_names(name), days, serves=False)
    except OSError as error:
        raise CertificatesNotMade(f"cannot use {directory}: {error.strerror or error}") from error
    except (ValueError, TypeError) as error:  # the latter for a key with a password
        raise CertificatesNotMade(f"{directory} has a file that cannot be used: {error}") from error
    return written
