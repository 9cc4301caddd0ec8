"""What carries a session: a gRPC stream, or a socket that goes around gRPC."""

from __future__ import annotations

import socket
from collections.abc import Callable
from queue import SimpleQueue
from typing import Protocol

__all__ = ["GrpcStream", "SocketStream"]


class Source(Protocol):
    """A session, as the stream that carries it sees it."""

    def take_output(self, stream: GrpcStream) -> bytes | None:
        """What the stream is to write next; empty if there is nothing now, and None if nothing more comes."""


class GrpcStream:
    """What a session writes to a gRPC stream: an iterator over the writes.

    It ends when it is closed, or when the session has ended and everything is written.
    """

    def __init__(self, session: Source) -> None:
        self._session = session
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._first: list[bytes] = []
        self.is_asleep = False
        """Whether the writing thread waits for `wake`. The session's lock guards it."""
        self.was_attached = False
        """Whether the session has been attached to it. Until then only what was put is written."""
        self.closed = False

    def put(self, data: bytes) -> None:
        """Adds something that is written before anything of the session."""
        self._first.append(data)

    def wake(self) -> None:
        """There is something to write."""
        self._wakes.put(None)

    def close(self) -> None:
        self.closed = True
        self.wake()

    def __iter__(self) -> GrpcStream:
        return self

    def __next__(self) -> bytes:
        while True:
            if self._first:
                return self._first.pop(0)
            if self.closed:
                break
            data = self._session.take_output(self)
            if data:
                return data
            if data is None:
                break
            self._wakes.get()  # `close` wakes, too, and ending a stream always closes it
        raise StopIteration


class SocketStream:
    """A connected socket that a session goes over. It is read and written in C++."""

    number = 0
    """Of the socket, once the session is attached to it."""
    lacked_descriptors = False
    """Whether it was cut because this process had no descriptor left for shared memory."""

    def __init__(
        self,
        connection: socket.socket,
        on_cut: Callable[[SocketStream, str], object],
        *,
        is_accepted: bool = False,
        parent: GrpcStream | None = None,
    ) -> None:
        """`on_cut` is called with this stream and the reason when the connection was cut."""
        self._connection: socket.socket | None = connection
        self.parent = parent
        """The stream over which the socket was offered. Without it, the socket is of no use."""
        self.on_cut = on_cut
        self.is_local = connection.family == socket.AF_UNIX
        """Whether both processes are on one host, so that shared memory can be used."""
        self.is_accepted = is_accepted
        """Whether the other peer has connected. Then no thread that waits for a response reads the socket."""

    def take_descriptor(self) -> int:
        """The descriptor, which the caller has to close from now on."""
        assert self._connection is not None, "the session was attached to this socket before"
        connection, self._connection = self._connection, None
        connection.setblocking(False)
        return connection.detach()

    def wake(self) -> None:
        """There is something to write: `Session._flush` does so."""

    def close(self) -> None:
        """Once it is attached, the session closes the socket."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
