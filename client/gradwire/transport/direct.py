"""A TCP socket between two hosts, beside the gRPC port.

gRPC copies each message several times at both ends, and hands it from thread to thread. The worker offers a
socket of its own in the Welcome, and the client takes it if it can be reached within a moment, and if the
connection of the gRPC stream is direct: a proxy is never bypassed. Otherwise the session goes over gRPC."""

from __future__ import annotations

import socket

from gradwire.proto.v1 import link_pb2
from gradwire.transport import handshake
from gradwire.transport.addresses import remote_of
from gradwire.transport.base import LinkSettings
from gradwire.transport.channels import silence_before_cut
from gradwire.transport.handshake import OnHandshake, SocketListener

__all__ = ["connect", "listen", "offer", "prepare"]

_CONNECT_SECONDS = 0.5
"""A firewall may drop what is sent to the port, and nobody should have to wait for that."""


def listen(address: str, on_handshake: OnHandshake) -> SocketListener | None:
    """Listens at HOST:PORT; port 0 takes a free one. None if that cannot be had."""
    host, colon, port = address.rpartition(":")
    if not colon:
        return None
    try:
        family, _, _, _, endpoint = socket.getaddrinfo(
            host.strip("[]") or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except OSError:
        return None
    return SocketListener.open(family, endpoint, on_handshake)


def offer(listener: SocketListener, token: bytes, seen_address: str) -> link_pb2.Direct:
    return link_pb2.Direct(port=listener.address[1], token=token, seen_address=seen_address)


def connect(
    offer: link_pb2.Direct, target: str, seconds: float, settings: LinkSettings
) -> socket.socket | None:
    """Accepts a worker's offer. Returns None if that fails or takes too long, or if a proxy lies in
    between."""
    remote = remote_of(offer.seen_address, target)
    if remote is None:
        return None
    host = remote[0]
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    connection = handshake.connect(
        family,
        (host, offer.port),
        offer.token,
        seconds,
        target=target,
        connect_seconds=_CONNECT_SECONDS,
    )
    if connection is not None:
        prepare(connection, settings)
    return connection


def prepare(connection: socket.socket, settings: LinkSettings) -> None:
    """Has the system send at once, and notice when the other host does not respond any more: the gRPC stream
    may still be alive then, if only the socket is blocked."""
    silence = silence_before_cut(settings)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        ("TCP_KEEPIDLE", max(int(silence), 1)),
        ("TCP_KEEPINTVL", 1),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", int((silence + 3) * 1000)),
    ):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
