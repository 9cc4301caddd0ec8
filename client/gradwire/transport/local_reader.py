"""Who reads the local connection to a worker: whoever is about to wait for it anyway.

A thread that waits for an answer reads the connection itself, if no other does. A thread of the connection's
own reads when nobody has done so for a while. The thread that supervises the link never reads: what comes may
be a question whose answer waits for the same link, and somebody must be left to mend it.
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
"""For so long after a thread read for itself nobody else reads: it is likely to come again."""
_PAUSE_SECONDS = 0.001
"""For so long after something was asked, by a program whose threads read for themselves, the connection's own
thread does not read: it would only be in the way of one who asks much ..."""
_PATIENCE_SECONDS = 0.02
"""... for so long at most."""
_RECENT_SECONDS = 0.25
_LIVENESS_SECONDS = 1.0


class Source(Protocol):
    """A connection."""

    has_more: bool
    """Whether the next frame is here already."""

    def fileno(self) -> int: ...

    def __next__(self) -> bytes | None:
        """The next frame; None if it has not come whole."""


class LocalReader(LeaderFollowers):
    """Takes frames from a connection, one thread at a time."""

    def __init__(self, source: Source, receive: Callable[[bytes], None]) -> None:
        super().__init__()
        self._source = source
        self._receive = receive
        self._is_callers_turn = False
        self._free_since = 0.0
        self._asked_at = self._read_own_at = -math.inf
        self._expecting: dict[ResponseFuture, None] = {}
        """Answers that threads wait for who could not read themselves. Each is taken out when it has come,
        without the lock: people's destructors, which may do anything, run at any moment."""
        self._error: GradwireError | None = None
        """Why it ended, if what came broke the protocol."""
        self._over = threading.Condition(self._lock)
        """For `run`: whether it has ended, and nobody reads any more."""
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._arrival = select.poll()
        self._arrival.register(source.fileno(), select.POLLIN)
        self._glance = select.poll()  # one of its own: no two threads may use the same
        self._glance.register(source.fileno(), select.POLLIN)
        self._poll = select.poll()
        self._poll.register(source.fileno(), select.POLLIN)
        self._poll.register(self._wake, select.POLLIN)
        self._spin = Spinning(self._poll)

    def run(self) -> None:
        """Returns when the connection has ended, and sees to it until then that there is a thread that reads.

        Raises if what came broke the protocol.
        """
        with self._lock:
            while not self._ended or self._is_callers_turn:
                if not self._ended and self._turn is None and not self._ready:
                    self._go_on()
                self._over.wait(_LIVENESS_SECONDS)
            os.close(self._wake)
            self._wake = -1
        if self._error is not None:
            raise self._error

    def asked(self) -> None:
        """Something was just asked over the connection."""
        self._asked_at = time.monotonic()

    def _is_free(self) -> bool:
        if self._turn is not None:
            return False
        if self._expecting:
            return True
        idle = time.monotonic() - self._free_since
        return idle >= _PATIENCE_SECONDS or (idle >= _GRACE_SECONDS and not self._is_in_the_way())

    def _is_in_the_way(self) -> bool:
        now = time.monotonic()
        return now - self._asked_at < _PAUSE_SECONDS and now - self._read_own_at < _RECENT_SECONDS

    def _read_on(self, me: object) -> None:
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
            was_expecting = bool(self._expecting)
            self._receive(frame)
            with self._lock:
                if not self._is_dealt_with(me):
                    return
                # Those who had to wait are likely to ask again soon, and can read the answer themselves then.
                is_last = was_expecting or (self._is_in_the_way() and not self._source.has_more)
                if is_last and not self._expecting:
                    self._turn, self._free_since = None, time.monotonic()
                    break
        watch(self)

    def _end(self, error: GradwireError | None) -> None:
        with self._lock:
            self._ended = True
            self._error = error
            self._turn = None
            self._changed.notify_all()
            self._over.notify_all()

    def _relieve(self) -> None:
        super()._relieve()
        self._free_since = 0.0

    def look(self, now: float) -> bool:
        return not self._is_callers_turn and super().look(now)

    def _is_missed(self) -> bool:
        return self._source.has_more or bool(self._glance.poll(0))

    def may_run_here(self) -> bool:
        return not self._is_callers_turn and super().may_run_here()

    # -- reading for oneself

    def read_for(self, future: ResponseFuture) -> None:
        """Reads until there is an answer, if nobody else does. If somebody does, returns at once."""
        if future.done():
            return
        try:
            try:
                with self._lock:
                    if self._ended:
                        return
                    is_own = self._turn is None
                    if is_own:
                        self._turn, self._is_callers_turn = future, True
                if is_own:
                    self._read_own(future)
                else:
                    self._note_expected(future)
            finally:
                self._hand_on(future)
        finally:
            # Once more: the user may interrupt at any moment, and that is one, too.
            self._hand_on(future)

    def _hand_on(self, future: ResponseFuture) -> None:
        """Ends the turn of the one who waits for an answer, if it has it. Can be done again at any point."""
        if self._turn is not future:
            return
        with self._lock:
            self._free_since = self._read_own_at = time.monotonic()
            if self._ended or self._expecting:
                self._changed.notify_all()
            if self._ended:
                self._over.notify_all()
            self._turn, self._is_callers_turn = None, False
        watch(self)

    def expect(self, future: ResponseFuture) -> None:
        """Has the connection read until there is an answer, by another thread than this."""
        self._note_expected(future)
        with self._lock:
            self._go_on()

    def _note_expected(self, future: ResponseFuture) -> None:
        if future not in self._expecting:
            self._expecting[future] = None
            future.when_settled(partial(self._expecting.pop, future, None))

    def _read_own(self, future: ResponseFuture) -> None:
        reader = threading.get_ident()

        def wake() -> None:
            # Settled by something other than what this thread reads: a deadline, a cancellation.
            if threading.get_ident() != reader:
                with self._lock:
                    if self._wake >= 0:
                        os.eventfd_write(self._wake, 1)

        future.when_settled(wake)
        while not future.done():
            # To be interrupted while waiting here is harmless.
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
                # The user interrupts amid a frame, and it cannot be told how much of it was read.
                self._ended, self._error = True, LinkClosed("reading the link was interrupted")
                raise
            if frame is not None:
                # What is half done could not be done again: it may be an answer that others wait for.
                with Uninterrupted():
                    self._receive(frame)


def _drain(descriptor: int) -> None:
    try:
        os.eventfd_read(descriptor)
    except BlockingIOError:
        pass
