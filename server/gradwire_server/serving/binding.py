"""Listening on addresses, with errors that say why an address cannot be had."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Sequence

import grpc

from gradwire_server.errors import BindFailed

__all__ = ["bind", "direct_address"]


def bind(server: grpc.Server, address: str, credentials: grpc.ServerCredentials | None = None) -> str:
    """Has a server listen on an address, with TLS if there are credentials. Returns the address with the real
    port. Raises BindFailed.

    A unix socket is plain text in any case: nothing leaves the host, and the permissions of the file and its
    folder say who may connect.
    """
    is_unix = address.startswith("unix:")
    if is_unix:
        _free_unix_path(address)
    else:
        _check_tcp_address(address)
    try:
        if credentials is None or is_unix:
            port = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, credentials)
    except RuntimeError:
        port = 0
    if not port:
        raise BindFailed(
            f"cannot listen on {address}: gRPC refused it; an address is HOST:PORT or unix:PATH",
            address=address,
        )
    return address if is_unix else f"{address.rpartition(':')[0]}:{port}"


def direct_address(addresses: Sequence[str]) -> str | None:
    """Where to listen for direct sockets if nothing else is said: any port of the host of the first TCP
    address."""
    for address in addresses:
        if not address.startswith("unix:"):
            return f"{address.rpartition(':')[0]}:0"
    return None


def _free_unix_path(address: str) -> None:
    """Removes the socket of a server that is dead. Refuses the socket of a live server, which gRPC would
    silently take over."""
    path = address.removeprefix("unix:").removeprefix("//")
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise BindFailed(f"cannot listen on {address}: the file exists and is no socket", address=address)
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise BindFailed(f"cannot listen on {address}: another process serves there", address=address)


def _check_tcp_address(address: str) -> None:
    """Binds a socket of our own first, because the system's error says why an address cannot be had. gRPC
    says only that it failed, in a line of its own on stderr."""
    host, _, port = address.rpartition(":")
    try:
        family, kind, protocol, _, endpoint = socket.getaddrinfo(
            host.strip("[]") or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(endpoint)
    except OSError as error:
        raise BindFailed(f"cannot listen on {address}: {error.strerror or error}", address=address) from None
