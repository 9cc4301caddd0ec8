"""The handshake in which two processes find that they share a host, and switch to a unix socket.

The worker offers the socket in its Welcome, and the client accepts the offer if it can reach the
socket. The socket is in Linux's abstract namespace: it can be reached only from the same network
namespace, and vanishes with its process.
"""

from __future__ import annotations

import hmac
import ipaddress
import logging
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from urllib.parse import unquote

from gradwire.proto.v1 import link_pb2
from gradwire.transport.segments import are_supported

__all__ = ["LocalListener", "accept_handshake", "client_handshake"]

log = logging.getLogger("gradwire.link")

_TOKEN_BYTES = 32
_HANDSHAKE_SECONDS = 5.0
_PAUSE_SECONDS = 0.1
"""The pause before the next attempt to accept, after one has failed."""
_CREDENTIALS = struct.Struct("3i")
_ACCEPTED = b"\x01"

Address = tuple[str, int]


class LocalListener:
    """The unix socket at which a worker listens for clients on the same host."""

    def __init__(self, on_handshake: Callable[[object, socket.socket], None]) -> None:
        """`on_handshake` is called on a thread of its own, with the purpose of the offer and the connection.
        It must call `accept_handshake`, or raise OSError, after which the client uses the network."""
        self._on_handshake = on_handshake
        self._lock = threading.Lock()
        self._offers: dict[bytes, object] = {}
        self._name = f"gradwire-{os.getpid()}-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(f"\0{self._name}")
        self._listener.listen(128)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="gradwire-local-listener", daemon=True)
        self._thread.start()

    @classmethod
    def open(cls, on_handshake: Callable[[object, socket.socket], None]) -> LocalListener | None:
        """Opens a listener; None if the system does not support or permit it."""
        if not are_supported():
            return None
        try:
            return cls(on_handshake)
        except OSError as error:
            log.info("no local socket for clients on this host: %s", error)
            return None

    def offer(self, purpose: object, seen_address: str) -> link_pb2.SameHost:
        """Makes an offer for a client. `forget` must follow when it is no longer valid."""
        token = secrets.token_bytes(_TOKEN_BYTES)
        with self._lock:
            self._offers[token] = purpose
        return link_pb2.SameHost(socket=self._name, token=token, seen_address=seen_address)

    def forget(self, offer: link_pb2.SameHost) -> None:
        with self._lock:
            self._offers.pop(offer.token, None)

    def close(self) -> None:
        self._closed.set()
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._thread.join(_HANDSHAKE_SECONDS)
        self._listener.close()

    def _accept(self) -> None:
        is_failing = False
        while not self._closed.is_set():
            connection = None
            try:
                connection, _ = self._listener.accept()
                threading.Thread(
                    target=self._handshake, args=(connection,), name="gradwire-local", daemon=True
                ).start()
                is_failing = False
            except (OSError, RuntimeError) as error:
                # There is no descriptor or thread left. Clients that wait here fall
                # back to the network meanwhile.
                if connection is not None:
                    connection.close()
                if not is_failing and not self._closed.is_set():
                    log.warning("cannot accept connections at the local socket now: %s", error)
                is_failing = True
                self._closed.wait(_PAUSE_SECONDS)

    def _handshake(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_HANDSHAKE_SECONDS)
            if not _is_same_user(connection):
                raise PermissionError("a process of another user")
            purpose = self._redeem(_read(connection, _TOKEN_BYTES))
            connection.setblocking(False)
            if _has_hung_up(connection):
                raise ConnectionResetError("the client has hung up")
            connection.setblocking(True)
            self._on_handshake(purpose, connection)
        except OSError as error:
            log.warning("refused a connection to the local socket: %s", error)
            connection.close()

    def _redeem(self, token: bytes) -> object:
        with self._lock:
            for expected in self._offers:
                if hmac.compare_digest(expected, token):
                    return self._offers.pop(expected)
        raise PermissionError("an unknown token")


def accept_handshake(connection: socket.socket) -> None:
    """Tells the client that its token was accepted. From now on all frames to it go over this connection."""
    connection.sendall(_ACCEPTED)


def client_handshake(
    offer: link_pb2.SameHost, target: str, seconds: float = _HANDSHAKE_SECONDS
) -> socket.socket | None:
    """Accepts a worker's offer. Returns None if that fails or takes too long, or
    if a proxy lies in between."""
    if not are_supported() or not _is_direct(offer.seen_address, target):
        return None
    connection = None
    try:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        # Only the last step of the handshake takes time, unless the worker is overloaded.
        connection.settimeout(min(max(seconds, 0.1), _HANDSHAKE_SECONDS))
        connection.connect(f"\0{offer.socket}")
        if not _is_same_user(connection):
            raise PermissionError("a process of another user")
        connection.sendall(offer.token)
        _read(connection, len(_ACCEPTED))
        connection.settimeout(None)
        return connection
    except OSError as error:
        log.debug("no local socket to %s: %s", target, error)
        if connection is not None:
            connection.close()
        return None


def _read(connection: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        more = connection.recv(length - len(data))
        if not more:
            raise ConnectionResetError("the other process closed the socket")
        data += more
    return data


def _has_hung_up(connection: socket.socket) -> bool:
    """Whether the other process has closed a non-blocking connection."""
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False


def _is_same_user(connection: socket.socket) -> bool:
    """Whether the process at the other end runs as the same user."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return bool(user == os.geteuid())


# -- whether a proxy lies in between


def _is_direct(seen: str, target: str) -> bool:
    """Whether the client address that the worker sees belongs to a direct connection to the target.

    If a proxy accepts the connection and opens another, the worker sees an address that leads elsewhere.
    """
    if target.startswith("unix:"):
        return seen.startswith("unix")
    local = _parse(seen)
    remote = _remote_of(local) if local is not None else None
    return remote is not None and remote in _resolve(target)


def _parse(address: str) -> Address | None:
    """Parses an address as gRPC writes it: ``ipv4:127.0.0.1:50051`` or ``ipv6:%5B::1%5D:50051``."""
    kind, _, rest = unquote(address).partition(":")
    host, _, port = rest.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdigit():
        return None
    try:
        return _plain(host.strip("[]")), int(port)
    except ValueError:
        return None


def _plain(host: str) -> str:
    """The canonical form of an IP address."""
    address = ipaddress.ip_address(host.partition("%")[0])
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return str(mapped or address)


def _resolve(target: str) -> set[Address]:
    name = target
    for prefix in ("dns:", "ipv4:", "ipv6:"):
        name = name.removeprefix(prefix)
    host, _, port = name.rpartition("/")[2].rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        return {(_plain(str(address[0])), int(address[1])) for *_, address in found}
    except (OSError, ValueError):
        return set()


def _remote_of(local: Address) -> Address | None:
    """The remote address of the TCP connection with this local address, according to the kernel."""
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        try:
            with open(table) as lines:
                next(lines)
                for line in lines:
                    fields = line.split()
                    if int(fields[1].rpartition(":")[2], 16) == local[1] and _hex_address(fields[1]) == local:
                        return _hex_address(fields[2])
        except (OSError, StopIteration):
            continue
    return None


def _hex_address(text: str) -> Address:
    """Parses an address as /proc writes it: 32-bit words in the byte order of the machine."""
    host, _, port = text.partition(":")
    words = [int(host[at : at + 8], 16) for at in range(0, len(host), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    return _plain(str(ipaddress.ip_address(packed))), int(port, 16)
