"""Reads the local connection to a worker, preferably on a thread that waits for a response anyway.

A thread that waits for a response reads the connection itself, if no other thread does. A background thread
reads when no other thread has done so for a while. The thread that supervises the link never reads: a
received request may run code that waits for the same link, and a thread must be left to reconnect.
"""

from __future__ import annotations

import math
import os
import select
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

from gradwire.errors import GradwireError, LinkClosed
from gradwire.system.interrupts import Uninterrupted
from gradwire.system.watchdog import watch
from gradwire.transport.base import ResponseFuture
from gradwire.transport.leader_followers import LeaderFollowers
from gradwire.transport.spinning import Spinning

__all__ = ["LocalReader", "Source"]

_GRACE_SECONDS = 0.005
"""After a caller's thread has read, the background thread does not read for this long: the
caller is likely to read again."""
_PAUSE_SECONDS = 0.001
"""After a request was sent, by a program whose threads read for themselves, the background thread does not
read for this long: it would compete with a caller that sends many requests."""
_PATIENCE_SECONDS = 0.02
"""The limit on how long the background thread may be held back in this way."""
_RECENT_SECONDS = 0.25
_LIVENESS_SECONDS = 1.0


class Source(Protocol):
    """A connection."""

    has_more: bool
    """Whether the next frame has already been received."""

    def fileno(self) -> int: ...

    def __next__(self) -> bytes | None:
        """The next frame; None if it has not arrived completely."""


class LocalReader(LeaderFollowers):
    """Reads frames from a connection, one thread at a time."""

    def __init__(self, source: Source, receive: Callable[[bytes], None]) -> None:
        super().__init__()
        self._source = source
        self._receive = receive
        self._is_caller_reading = False
        self._unread_since = 0.0
        self._last_request_at = self._last_caller_read_at = -math.inf
        self._awaited_futures: dict[ResponseFuture, None] = {}
        """Responses that threads wait for without reading themselves. A settled future is removed without
        taking the lock: users' destructors, which may do anything, run at any moment."""
        self._error: GradwireError | None = None
        """Why the connection ended, if the peer broke the protocol."""
        self._is_over = threading.Condition(self._lock)
        """Tells `run` that the connection has ended and that no thread reads any more."""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._arrival = select.poll()
        self._arrival.register(source.fileno(), select.POLLIN)
        self._glance = select.poll()  # two threads must not share a poll object
        self._glance.register(source.fileno(), select.POLLIN)
        self._poll = select.poll()
        self._poll.register(source.fileno(), select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)
        self._spin = Spinning(self._poll)

    def run(self) -> None:
        """Ensures that there is a thread that reads, and returns when the connection has ended.

        Raises if the peer broke the protocol.
        """
        with self._lock:
            while not self._ended or self._is_caller_reading:
                if not self._ended and self._leader is None and not self._followers:
                    self._promote_follower()
                self._is_over.wait(_LIVENESS_SECONDS)
            os.close(self._wake)
            self._wake = -1
        if self._error is not None:
            raise self._error

    def note_request_sent(self) -> None:
        """Notes that a request was just sent over the connection."""
        self._last_request_at = time.monotonic()

    def _may_lead(self) -> bool:
        if self._leader is not None:
            return False
        if self._awaited_futures:
            return True
        idle = time.monotonic() - self._unread_since
        return idle >= _PATIENCE_SECONDS or (idle >= _GRACE_SECONDS and not self._would_compete_with_caller())

    def _would_compete_with_caller(self) -> bool:
        now = time.monotonic()
        return (
            now - self._last_request_at < _PAUSE_SECONDS and now - self._last_caller_read_at < _RECENT_SECONDS
        )

    def _lead(self, me: object) -> None:
        while True:
            try:
                if not self._source.has_more:
                    self._arrival.poll()
                frame = next(self._source)
            except StopIteration:
                self._end(None)
                return
            except GradwireError as error:
                self._end(error)
                return
            if frame is None:
                continue
            was_awaited = bool(self._awaited_futures)
            self._receive(frame)
            with self._lock:
                if not self._finish_frame(me):
                    return
                # The threads that waited are likely to send further requests soon, and can then
                # read the responses themselves.
                is_last = was_awaited or (self._would_compete_with_caller() and not self._source.has_more)
                if is_last and not self._awaited_futures:
                    self._leader, self._unread_since = None, time.monotonic()
                    break
        watch(self)

    def _end(self, error: GradwireError | None) -> None:
        with self._lock:
            self._ended = True
            self._error = error
            self._leader = None
            self._changed.notify_all()
            self._is_over.notify_all()

    def _revoke(self) -> None:
        super()._revoke()
        self._unread_since = 0.0

    def check(self, now: float) -> bool:
        return not self._is_caller_reading and super().check(now)

    def _has_pending_work(self) -> bool:
        return self._source.has_more or bool(self._glance.poll(0))

    def may_run_inline(self) -> bool:
        return not self._is_caller_reading and super().may_run_inline()

    # -- reading on a caller's thread

    def read_for(self, future: ResponseFuture) -> None:
        """Reads until the response is there. Returns at once if another thread reads."""
        if future.done():
            return
        try:
            try:
                with self._lock:
                    if self._ended:
                        return
                    is_leader = self._leader is None
                    if is_leader:
                        self._leader, self._is_caller_reading = future, True
                if is_leader:
                    self._read_as_caller(future)
                else:
                    self._note_awaited(future)
            finally:
                self._stop_reading_as_caller(future)
        finally:
            # Repeated, since an interrupt may have ended the first call. It may come at any moment.
            self._stop_reading_as_caller(future)

    def _stop_reading_as_caller(self, future: ResponseFuture) -> None:
        """Ends this caller's role as the leader, if it has it. Calling this
        repeatedly is safe at any point."""
        if self._leader is not future:
            return
        with self._lock:
            self._unread_since = self._last_caller_read_at = time.monotonic()
            if self._ended or self._awaited_futures:
                self._changed.notify_all()
            if self._ended:
                self._is_over.notify_all()
            self._leader, self._is_caller_reading = None, False
        watch(self)

    def read_in_background(self, future: ResponseFuture) -> None:
        """Has another thread read the connection until the response is there."""
        self._note_awaited(future)
        with self._lock:
            self._promote_follower()

    def _note_awaited(self, future: ResponseFuture) -> None:
        if future not in self._awaited_futures:
            self._awaited_futures[future] = None
            future.when_settled(partial(self._awaited_futures.pop, future, None))

    def _read_as_caller(self, future: ResponseFuture) -> None:
        reader = threading.get_ident()

        def wake() -> None:
            # Another thread settled the future: a deadline or a cancellation.
            if threading.get_ident() != reader:
                with self._lock:
                    if self._wake >= 0:
                        os.eventfd_write(self._wake, 1)

        future.when_settled(wake)
        while not future.done():
            # An interrupt while waiting here is harmless.
            if not self._source.has_more:
                self._spin()
                if (self._wake, select.POLLIN) in self._poll.poll():
                    _drain(self._wake)
                    continue
            try:
                frame = next(self._source)
            except StopIteration:
                self._ended = True
                return
            except GradwireError as error:
                self._ended, self._error = True, error
                return
            except BaseException:
                # An interrupt in the middle of a frame: it is unknown how much of it was read.
                self._ended, self._error = True, LinkClosed("reading the link was interrupted")
                raise
            if frame is not None:
                # Handling must not stop halfway: it cannot be repeated, and the frame may be a
                # response that other threads wait for.
                with Uninterrupted():
                    self._receive(frame)


def _drain(descriptor: int) -> None:
    try:
        os.eventfd_read(descriptor)
    except BlockingIOError:
        pass
