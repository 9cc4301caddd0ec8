"""Who reads a local connection: whoever is about to wait for it anyway.

To hand something over to another thread costs more than most small calls: that thread may be on another core,
where nothing that it needs is at hand. So

- a question that came is answered by the thread that read it. Should that take long, another thread stands in
  and goes on reading, and the next questions are not answered that way for a while.
- a thread that waits for an answer reads the connection itself, if no other does.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable
from typing import Protocol

from gradwire.errors import GradwireError, LinkClosed
from gradwire.transport.base import Pending
from gradwire.transport.lookout import BRISK_SECONDS, watch
from gradwire.transport.spinning import Spinning

__all__ = ["Reading"]

_GRACE_SECONDS = 0.005
"""For so long after a thread read for itself nobody else reads: it is likely to come again."""
_LIVENESS_SECONDS = 1.0
_FIRST_SKIPPED, _MOST_SKIPPED = 8, 64
"""How many questions go elsewhere after one that took long."""


class Source(Protocol):
    """A connection."""

    has_more: bool
    """Whether the next frame is here already."""

    def fileno(self) -> int: ...

    def __next__(self) -> bytes: ...


class Reading:
    """Takes frames from a connection, one thread at a time."""

    def __init__(self, source: Source, receive: Callable[[bytes], None], *, gives_way: bool) -> None:
        self._source = source
        self._receive = receive
        self._gives_way = gives_way
        """Whether threads that wait for answers may read."""
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._turn: object | None = None
        """Who reads."""
        self._is_callers_turn = False
        self._ready = 0
        """Threads that wait for their turn."""
        self._free_since = 0.0
        self._expecting: list[Pending] = []
        """Answers that threads wait for who could not read themselves."""
        self._busy_since = 0.0
        """Since when the one who reads is occupied with a question. 0: it is not."""
        self._skip = self._skipped = 0
        self._ended = False
        self._error: GradwireError | None = None
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) if gives_way else -1
        self._poll = select.poll()
        self._poll.register(source.fileno(), select.POLLIN)
        if gives_way:
            self._poll.register(self._wake, select.POLLIN)
        self._spin = Spinning(self._poll)

    def run(self) -> None:
        """Reads until the connection ends, or lets others do so. Raises if what came broke the protocol."""
        self._take_turns()
        with self._lock:
            self._changed.wait_for(lambda: not self._is_callers_turn)
            if self._wake >= 0:
                os.close(self._wake)
                self._wake = -1
        if self._error is not None:
            raise self._error

    def _take_turns(self, *, is_ready: bool = False) -> None:
        me = object()
        while True:
            with self._lock:
                if not is_ready:
                    self._ready += 1
                is_ready = False
                # Looked at now and then, should nobody notice that it is free.
                while not self._changed.wait_for(lambda: self._ended or self._is_free(), _LIVENESS_SECONDS):
                    pass
                self._ready -= 1
                if self._ended:
                    return
                self._turn = me
            self._read_on(me)

    def _is_free(self) -> bool:
        if self._turn is not None:
            return False
        if any(not pending.done() for pending in self._expecting):
            return True
        return time.monotonic() - self._free_since >= _GRACE_SECONDS

    def _read_on(self, me: object) -> None:
        while True:
            try:
                if not (self._gives_way or self._source.has_more):
                    self._spin()
                frame = next(self._source)
            except StopIteration:
                self._end(None)
                return
            except GradwireError as error:
                self._end(error)
                return
            self._receive(frame)
            with self._lock:
                if self._turn is not me:
                    return  # somebody stands in
                if self._busy_since:
                    took = time.monotonic() - self._busy_since
                    self._skip = 0 if took < BRISK_SECONDS else _FIRST_SKIPPED
                self._busy_since = 0.0
                if self._expecting:
                    self._expecting = [pending for pending in self._expecting if not pending.done()]
                    if not self._expecting:
                        # They are likely to ask again soon, and can read the answer themselves then.
                        self._turn, self._free_since = None, time.monotonic()
                        break
        watch(self)

    def _end(self, error: GradwireError | None) -> None:
        with self._lock:
            self._ended = True
            self._error = error
            self._turn = None
            self._changed.notify_all()

    def look(self, now: float) -> bool:
        """Lets another thread go on if the one who reads is occupied for long, or nobody reads for long.

        Whether there is anything to look at.
        """
        with self._lock:
            if self._ended or self._is_callers_turn:
                return False
            if self._turn is not None:
                if not self._busy_since:
                    return False
                if now - self._busy_since < BRISK_SECONDS:
                    return True
                self._skip = min(2 * self._skip + _FIRST_SKIPPED, _MOST_SKIPPED)
                self._turn, self._busy_since, self._free_since = None, 0.0, 0.0
            if self._is_free():
                if self._ready:
                    self._changed.notify()
                else:
                    self._ready += 1
                    threading.Thread(
                        target=self._take_turns,
                        kwargs={"is_ready": True},
                        name="gradwire-stand-in",
                        daemon=True,
                    ).start()
            return True

    # -- answering where the question was read

    def may_run_here(self) -> bool:
        """Whether what was just read may be worked on by the thread that read it.

        From then on others may read: all that was read before must have been taken in.
        """
        if self._is_callers_turn:
            return False
        if self._skipped < self._skip:
            self._skipped += 1
            return False
        self._skipped = 0
        self._busy_since = time.monotonic()
        watch(self)
        return True

    # -- reading for oneself

    def read_for(self, pending: Pending) -> None:
        """Reads until there is an answer, if nobody else does. If somebody does, returns at once."""
        if not self._gives_way or pending.done():
            return
        try:
            with self._lock:
                if self._ended:
                    return
                if self._turn is not None:
                    self._expecting.append(pending)
                    return
                self._turn, self._is_callers_turn = pending, True
            self._read_own(pending)
        finally:
            # The user may interrupt at any moment.
            with self._lock:
                is_over = self._turn is pending
                if is_over:
                    self._turn, self._is_callers_turn = None, False
                    self._free_since = time.monotonic()
                    if self._ended or self._expecting:
                        self._changed.notify_all()
            if is_over:
                watch(self)

    def _read_own(self, pending: Pending) -> None:
        reader = threading.get_ident()

        def wake() -> None:
            # Settled by something other than what this thread reads: a deadline, a cancellation.
            if threading.get_ident() != reader:
                with self._lock:
                    if self._wake >= 0:
                        os.eventfd_write(self._wake, 1)

        pending.when_settled(wake)
        while not pending.done():
            # To be interrupted while waiting here is harmless.
            if not self._source.has_more:
                self._spin()
                if (self._wake, select.POLLIN) in self._poll.poll():
                    _drain(self._wake)
                    continue
            try:
                self._receive(next(self._source))
            except StopIteration:
                self._ended = True
                return
            except GradwireError as error:
                self._ended, self._error = True, error
                return
            except BaseException:
                # The user interrupts amid a frame, and it cannot be told what of it was done.
                self._ended, self._error = True, LinkClosed("reading the link was interrupted")
                raise


def _drain(descriptor: int) -> None:
    try:
        os.eventfd_read(descriptor)
    except BlockingIOError:
        pass
