"""What carries a session: a gRPC stream, or a socket that goes around gRPC."""

from __future__ import annotations

import logging
import socket
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Literal, Protocol

import grpc

from gradwire.system.interrupts import Uninterrupted
from gradwire.transport.grpc_messages import Messages

__all__ = ["GrpcStream", "SocketCarrier"]

log = logging.getLogger("gradwire.link")

_WRITTEN_AT_ONCE = 64 * 1024
"""After a larger message the stream's iterator goes on: the next may take long to copy, and all streams share
gRPC's own thread."""


Writer = Literal["nobody", "caller", "iterator"]
"""Who has the right to write to a gRPC stream, of which there is one. A caller is a thread that has made
something to write; when that is written, gRPC's own thread takes its place."""


class Source(Protocol):
    """A session, as the stream that carries it sees it."""

    def begin_output(self, stream: GrpcStream) -> bool:
        """Gives the calling thread the right to write if nobody has it, and there is something to write."""

    def take_output(self, stream: GrpcStream) -> bytes | None:
        """What the stream is to write next. Empty if there is nothing now: then nobody has the right to
        write. None if nothing more comes."""

    def feed(self, data: bytes, stream: GrpcStream) -> None:
        """Takes what the stream has read."""


class GrpcStream:
    """A session's end of a gRPC stream.

    It is the iterator over the writes, which a thread of gRPC's runs. With `Messages`, whoever has something
    to write writes it while that thread sleeps, and gRPC's own thread reads; without, a thread is started to
    read. Nothing is written before the session is attached.
    """

    def __init__(self, session: Source) -> None:
        self._session = session
        self._on_first: Callable[[], object] | None = None
        self._messages: Messages | None = None
        self._wakes: SimpleQueue[None] = SimpleQueue()
        """One for each reason for the iterator to look again."""
        self.writer: Writer = "nobody"
        """Where it is nobody, and where it becomes nobody, the session's lock guards it."""
        self.opening: bytes | None = None
        """What is written before anything of the session."""
        self.closed = False

    # -- reading

    def read(
        self,
        received: Iterator[bytes],
        messages: Messages | None,
        thread_name: str,
        on_first: Callable[[], object] | None = None,
    ) -> threading.Thread | None:
        """Has what is received read from now on, to its end. Returns the thread that does, if one was started
        for it. `on_first` is called before the session gets the first message."""
        self._messages = messages
        self._on_first = on_first
        if messages is not None:
            messages.read(self._on_message)
            return None
        thread = threading.Thread(target=self._read_all, args=(received,), name=thread_name, daemon=True)
        thread.start()
        return thread

    def _read_all(self, received: Iterator[bytes]) -> None:
        try:
            for data in received:
                self._on_message(data)
        except grpc.RpcError:
            pass  # the stream was cut
        except Exception:
            log.exception("a stream could not be read")
        finally:
            self._on_message(None)

    def _on_message(self, data: bytes | None) -> None:
        if data is None:
            self.close()
            return
        if self._on_first is not None:
            self._on_first()
            self._on_first = None
        self._session.feed(data, self)

    # -- writing

    def flush(self) -> None:
        """Writes what there is to write, unless another thread does. No lock is held."""
        with Uninterrupted():  # the right to write must not be lost
            if self._session.begin_output(self):
                self._write()

    def _write(self) -> None:
        """Writes a message, as a caller."""
        if self._messages is None or self.closed:
            self.hand_over()
            return
        try:
            data = self._session.take_output(self)
            if data == b"":
                return
            on_written = self.hand_over if data and len(data) > _WRITTEN_AT_ONCE else self._write
            if data is None or not self._messages.write(data, on_written):
                self.hand_over()  # it ends
        except BaseException:
            # Without memory. What was taken is sent again over the next stream.
            self.close()
            self.hand_over()
            raise

    def hand_over(self) -> None:
        """Gives the right to write to the iterator. It is the calling thread's, or it is nobody's and the
        session's lock is held."""
        self.writer = "iterator"
        self._wakes.put(None)

    def rest(self) -> None:
        """Nobody has the right to write any more. The session's lock is held."""
        self.writer = "nobody"
        if self.closed:
            self._wakes.put(None)

    def close(self) -> None:
        self.closed = True
        self._wakes.put(None)

    def __iter__(self) -> GrpcStream:
        return self

    def __next__(self) -> bytes:
        while True:
            # What a caller writes has to be written before gRPC is told that the stream ends.
            if self.closed and self.writer != "caller":
                raise StopIteration
            if self.writer == "iterator":
                if self.opening is not None:
                    opening, self.opening = self.opening, None
                    return opening
                data = self._session.take_output(self)
                if data is None:
                    raise StopIteration
                if data:
                    return data
            self._wakes.get()


class SocketCarrier:
    """A connected socket that a session goes over. It is read and written in C++."""

    number = 0
    """Of the socket, once the session is attached to it."""
    lacked_descriptors = False
    """Whether it was cut because this process had no descriptor left for shared memory."""

    def __init__(
        self,
        connection: socket.socket,
        on_cut: Callable[[SocketCarrier, str], object],
        *,
        is_accepted: bool = False,
        parent: GrpcStream | None = None,
    ) -> None:
        """`on_cut` is called with this carrier and the reason when the connection was cut."""
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

    def close(self) -> None:
        """Once it is attached, the session closes the socket."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()
