"""One thread that reads all local connections of a worker, and serves the requests that it reads."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from gradwire.errors import GradwireError, InternalError
from gradwire.transport import local_reader
from gradwire.transport.leader_followers import InlinePolicy, LeaderFollowers
from gradwire.transport.spinning import Spinning

__all__ = ["EventLoop"]

log = logging.getLogger("gradwire.link")

_SLICE_SECONDS = 0.001
"""The time slice of a connection that has more frames, before the next connection is served. The responses to
requests that arrived together are written together, which wakes their requester once."""


class Source(local_reader.Source, Protocol):
    def flush(self) -> None:
        """Writes the frames that wait in the outbox."""

    def flush_elsewhere(self) -> None:
        """Has another thread write the frames that wait in the outbox."""


class _Connection:
    """A connection that the event loop serves."""

    def __init__(self, source: Source, receive: Callable[[bytes], None]) -> None:
        self.source = source
        self.descriptor = source.fileno()
        self.receive = receive
        self.inline_policy = InlinePolicy()
        self.is_ready = False
        """Whether the connection is in the queue of connections with something to read."""
        self.has_responses = False
        """Whether responses wait to be written."""
        self.gone = threading.Event()
        self.error: GradwireError | None = None


class EventLoop(LeaderFollowers):
    """Serves connections in round-robin order."""

    def __init__(self) -> None:
        super().__init__()
        self._connections: dict[int, _Connection] = {}
        self._ready_connections: deque[_Connection] = deque()
        """The connections with something to read, in the order in which they are
        served. Only the leader uses it."""
        self._polled_at = 0.0
        self._current: _Connection | None = None
        self._slice_ends_at = 0.0
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._epoll.register(self._wake, select.EPOLLIN)
        self._spin = Spinning(self._epoll)
        self._threads = 0
        threading.Thread(target=self._run_thread, name="gradwire-event-loop", daemon=True).start()

    def serve(self, source: Source, receive: Callable[[bytes], None]) -> None:
        """Serves a connection until it has ended. Raises if the peer broke the protocol."""
        connection = _Connection(source, receive)
        with self._lock:
            if self._ended or connection.descriptor < 0:
                return
            self._epoll.register(connection.descriptor, select.EPOLLIN)
            self._connections[connection.descriptor] = connection
        connection.gone.wait()  # either peer shuts the socket down when it closes, which the leader notices
        error = connection.error
        del connection, source, receive  # otherwise the traceback of the error would keep them alive
        if error is not None:
            raise error

    def close(self, timeout: float = 0.0) -> None:
        """Ends all connections. Waits up to `timeout` seconds for the threads of the event loop."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            os.eventfd_write(self._wake, 1)
            self._changed.notify_all()
            for connection in list(self._connections.values()):
                self._unregister(connection)
            self._changed.wait_for(lambda: not self._threads, timeout)

    def _run_thread(self, *, is_ready: bool = False) -> None:
        with self._lock:
            self._threads += 1
        try:
            super()._run_thread(is_ready=is_ready)
        finally:
            with self._lock:
                self._threads -= 1
                if not self._threads and self._wake >= 0:
                    # This was the last thread, and no other will be started.
                    self._epoll.close()
                    os.close(self._wake)
                    self._wake = -1
                    self._changed.notify_all()

    def _lead(self, me: object) -> None:
        while not self._ended and self._serve_next(me):
            pass

    def _serve_next(self, me: object) -> bool:
        """Reads a frame and serves it. Returns whether this thread is still the leader."""
        if not self._ready_connections or time.monotonic() - self._polled_at > _SLICE_SECONDS:
            self._poll_connections()
        if not self._ready_connections:
            return True
        connection = self._next_connection()
        try:
            frame = next(connection.source)
            if frame is None:
                return True
            if connection.source.has_more:
                self._mark_ready(connection, is_next=True)
            connection.receive(frame)
            if connection.has_responses and not self._may_delay_responses(connection):
                self._write_responses(connection)
        except StopIteration:
            self._end_connection(connection, None)
        except GradwireError as error:
            self._end_connection(connection, error)
        except BaseException as error:  # whatever the error is, the other connections must still be served
            log.exception("a connection could not be served")
            self._end_connection(connection, InternalError(f"the connection could not be served: {error!r}"))
        with self._lock:
            is_still_leader = self._finish_frame(me)
        if not is_still_leader and connection.has_responses:
            self._write_responses(connection)  # the new leader does not know of these responses
        return is_still_leader

    def _next_connection(self) -> _Connection:
        """The connection that was served last, if it has more frames and its time slice
        is not over; else the next."""
        now, last = time.monotonic(), self._current
        # A connection with unwritten responses stays first, since they were left to
        # be written with its next frame.
        if now >= self._slice_ends_at and self._ready_connections[0] is last and not last.has_responses:
            self._ready_connections.rotate(-1)
        connection = self._ready_connections.popleft()
        connection.is_ready = False
        if connection is not last or now >= self._slice_ends_at:
            self._current, self._inline_policy = connection, connection.inline_policy
            self._slice_ends_at = now + _SLICE_SECONDS
        return connection

    def _may_delay_responses(self, connection: _Connection) -> bool:
        """Whether responses may wait for further responses on the same
        connection, which is served next then."""
        return connection.is_ready and time.monotonic() < self._slice_ends_at

    def _poll_connections(self) -> None:
        if not self._ready_connections:
            self._current = None  # the connection may have ended, and must not be kept alive
            self._spin()
        for descriptor, _ in self._epoll.poll(0 if self._ready_connections else None):
            connection = self._connections.get(descriptor)
            if connection is not None:
                self._mark_ready(connection)
        self._polled_at = time.monotonic()

    def _mark_ready(self, connection: _Connection, *, is_next: bool = False) -> None:
        if not connection.is_ready:
            connection.is_ready = True
            if is_next:
                self._ready_connections.appendleft(connection)
            else:
                self._ready_connections.append(connection)

    def _end_connection(self, connection: _Connection, error: GradwireError | None) -> None:
        with self._lock:
            connection.error = connection.error or error
            self._unregister(connection)

    def _unregister(self, connection: _Connection) -> None:
        """Removes a connection from the epoll set, and wakes the thread in `serve`. The lock is held."""
        if self._connections.pop(connection.descriptor, None) is not None:
            try:
                self._epoll.unregister(connection.descriptor)
            except (OSError, ValueError):
                pass  # the socket was closed already
        connection.gone.set()

    # -- responding

    def will_write(self, source: Source) -> bool:
        """Whether the event loop will soon write a response that was put into the outbox of `source`,
        together with the responses to further requests."""
        connection = self._current
        if (
            connection is None
            or connection.source is not source
            or self._leader_thread != threading.get_ident()
        ):
            return False
        connection.has_responses = True
        return True

    def _write_responses(self, connection: _Connection) -> None:
        connection.has_responses = False
        connection.source.flush()

    def _has_pending_work(self) -> bool:
        has_responses = self._current is not None and self._current.has_responses
        return has_responses or bool(self._ready_connections) or bool(self._epoll.poll(0))

    def _has_other_connections(self) -> bool:
        return len(self._connections) > 1

    def _revoke(self) -> None:
        super()._revoke()
        connection, self._current = self._current, None
        if connection is not None and connection.has_responses:
            # Responses to earlier requests must not wait for a request that takes long to serve.
            connection.has_responses = False
            connection.source.flush_elsewhere()
