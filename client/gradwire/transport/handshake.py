"""The handshake of a socket that goes around gRPC.

The worker offers it in the Welcome, with a token that is valid once and for this attempt to connect. The
client sends the token first, and the worker responds with one byte. From then on the session's bytes go over
the socket.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import socket
import threading
from collections.abc import Callable
from typing import Any

__all__ = ["OnHandshake", "SocketListener", "accept", "connect"]

log = logging.getLogger("gradwire.link")

_TOKEN_BYTES = 32
_SECONDS = 5.0
_PAUSE_SECONDS = 0.1
"""The pause before the next attempt to accept, after one has failed."""
_MOST_AT_ONCE = 64
"""How many connections may be in their handshake. Others are closed at once, and their clients use gRPC."""
_ACCEPTED = b"\x01"

OnHandshake = Callable[[object, socket.socket], None]
"""Called on a thread of its own, with the purpose of the offer and the connection. It must call `accept`, or
raise OSError, after which the client uses gRPC."""
Check = Callable[[socket.socket], None]
"""Raises OSError if the process at the other end may not connect."""


class SocketListener:
    """Accepts the connections that were offered."""

    def __init__(self, listener: socket.socket, on_handshake: OnHandshake, check: Check) -> None:
        self._listener = listener
        self._on_handshake = on_handshake
        self._check = check
        self._lock = threading.Lock()
        self._offers: dict[bytes, object] = {}
        self._closed = threading.Event()
        self._may_begin = threading.Semaphore(_MOST_AT_ONCE)
        self.address: Any = listener.getsockname()
        self._thread = threading.Thread(target=self._accept, name="gradwire-listener", daemon=True)
        self._thread.start()

    @classmethod
    def open(
        cls, family: int, address: Any, on_handshake: OnHandshake, check: Check = lambda _: None
    ) -> SocketListener | None:
        """None if the address cannot be had."""
        listener = None
        try:
            listener = socket.socket(family, socket.SOCK_STREAM)
            if family != socket.AF_UNIX:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(128)
            return cls(listener, on_handshake, check)
        except (OSError, RuntimeError) as error:
            log.info("cannot listen for connections around gRPC at %s: %s", address, error)
            if listener is not None:
                listener.close()
            return None

    def new_token(self, purpose: object) -> bytes:
        """Makes an offer to a client. `forget` must follow when it is no longer valid."""
        token = secrets.token_bytes(_TOKEN_BYTES)
        with self._lock:
            self._offers[token] = purpose
        return token

    def forget(self, token: bytes) -> None:
        with self._lock:
            self._offers.pop(token, None)

    def close(self) -> None:
        self._closed.set()
        try:
            self._listener.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._thread.join(_SECONDS)
        self._listener.close()

    def _accept(self) -> None:
        is_failing = False
        while not self._closed.is_set():
            connection = None
            try:
                connection, _ = self._listener.accept()
                if not self._may_begin.acquire(blocking=False):
                    connection.close()
                    continue
                try:
                    threading.Thread(
                        target=self._shake_hands, args=(connection,), name="gradwire-handshake", daemon=True
                    ).start()
                except RuntimeError:
                    self._may_begin.release()
                    raise
                is_failing = False
            except (OSError, RuntimeError) as error:
                # There is no descriptor or thread left. Clients that wait here fall back to gRPC meanwhile.
                if connection is not None:
                    connection.close()
                if not is_failing and not self._closed.is_set():
                    log.warning("cannot accept connections around gRPC now: %s", error)
                is_failing = True
                self._closed.wait(_PAUSE_SECONDS)

    def _shake_hands(self, connection: socket.socket) -> None:
        try:
            connection.settimeout(_SECONDS)
            self._check(connection)
            purpose = self._redeem(_read(connection, _TOKEN_BYTES))
            connection.setblocking(False)
            if _has_hung_up(connection):
                raise ConnectionResetError("the client has hung up")
            connection.setblocking(True)
            self._on_handshake(purpose, connection)
        except OSError as error:
            log.warning("refused a connection around gRPC: %s", error)
            connection.close()
        finally:
            self._may_begin.release()

    def _redeem(self, token: bytes) -> object:
        with self._lock:
            for expected in self._offers:
                if hmac.compare_digest(expected, token):
                    return self._offers.pop(expected)
        raise PermissionError("an unknown token")


def accept(connection: socket.socket) -> None:
    """Tells the client that its token was accepted."""
    connection.sendall(_ACCEPTED)


def connect(
    family: int,
    address: Any,
    token: bytes,
    seconds: float,
    *,
    target: str,
    check: Check = lambda _: None,
    connect_seconds: float = _SECONDS,
) -> socket.socket | None:
    """Connects, and sends the token. Returns None if that fails or takes too long."""
    connection = None
    try:
        connection = socket.socket(family, socket.SOCK_STREAM)
        seconds = min(max(seconds, 0.1), _SECONDS)
        connection.settimeout(min(seconds, connect_seconds))
        connection.connect(address)
        check(connection)
        # Only the last step takes time, and only if the worker is overloaded.
        connection.settimeout(seconds)
        connection.sendall(token)
        _read(connection, len(_ACCEPTED))
        connection.settimeout(None)
        return connection
    except (OSError, OverflowError) as error:  # OverflowError: the worker offers a port beyond 65535
        log.debug("no socket to %s around gRPC: %s", target, error)
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
