"""A unix socket between two processes of one host.

The worker offers the socket in its Welcome, and the client accepts the offer if it can reach the socket,
which is in Linux's abstract namespace: it can be reached only from the same network namespace, and vanishes
with its process. Large tensors then go through shared memory (`native/shared_memory.cpp`).
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import sys

from gradwire.proto.v1 import link_pb2
from gradwire.transport import handshake
from gradwire.transport.addresses import remote_of
from gradwire.transport.handshake import OnHandshake, SocketListener

__all__ = ["connect", "listen", "offer"]

_CREDENTIALS = struct.Struct("3i")


def listen(on_handshake: OnHandshake) -> SocketListener | None:
    """Listens for clients on this host; None if the system does not support or permit it."""
    if not _is_supported():
        return None
    name = f"gradwire-{os.getpid()}-{secrets.token_hex(8)}"
    return SocketListener.open(socket.AF_UNIX, f"\0{name}", on_handshake, _check_same_user)


def offer(listener: SocketListener, token: bytes, seen_address: str) -> link_pb2.SameHost:
    name: bytes = listener.address
    return link_pb2.SameHost(socket=name[1:].decode(), token=token, seen_address=seen_address)


def connect(offer: link_pb2.SameHost, target: str, seconds: float) -> socket.socket | None:
    """Accepts a worker's offer. Returns None if that fails or takes too long, or if a proxy lies in
    between."""
    if not _is_supported() or not _is_direct(offer.seen_address, target):
        return None
    return handshake.connect(
        socket.AF_UNIX, f"\0{offer.socket}", offer.token, seconds, check=_check_same_user, target=target
    )


def _is_supported() -> bool:
    return sys.platform == "linux"


def _is_direct(seen: str, target: str) -> bool:
    if target.startswith("unix:"):
        return seen.startswith("unix")
    return remote_of(seen, target) is not None


def _check_same_user(connection: socket.socket) -> None:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    if user != os.geteuid():
        raise PermissionError("a process of another user")
