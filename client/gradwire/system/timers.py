"""One thread that calls back at given times, for all deadlines of the process."""

from __future__ import annotations

import heapq
import itertools
import logging
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import Empty, SimpleQueue

__all__ = ["Timer", "call_later"]

log = logging.getLogger("gradwire.timers")


class Timer:
    """A callback at a given time, unless it is cancelled before."""

    __slots__ = ("_clock", "callback", "due")

    def __init__(self, clock: _Clock, due: float, callback: Callable[[], object]) -> None:
        self._clock = clock
        self.due = due
        self.callback: Callable[[], object] | None = callback

    def cancel(self) -> None:
        if self.callback is not None:
            # The entry stays in the heap for now, but must not keep anything alive.
            self.callback = None
            self._clock.count_cancelled()


class _Clock:
    """Runs a thread while there are timers, and a little longer.

    A lost timer would be a wait without end. Timers are started and cancelled at any moment: by destructors,
    which may run within any line of this code, and by users' code, which an interrupt may end between any two
    lines. So only the clock's thread uses the heap, and other threads just append to `_incoming`.
    """

    IDLE_SECONDS = 5.0
    LONGEST_SLEEP = 3600.0
    KEPT_CANCELLED = 1000
    """Cancelled entries are removed from the heap when there are more of them than
    this, and than live entries."""

    def __init__(self) -> None:
        self._incoming: deque[Timer] = deque()
        self._notices: SimpleQueue[None] = SimpleQueue()
        """A notice wakes the thread, even if it was put before the thread sleeps."""
        self._sleeps_until = -math.inf
        self._heap: list[tuple[float, int, Timer]] = []
        self._counter = itertools.count()
        self._cancelled = 0
        self._is_crowded = False
        self._start_lock = threading.RLock()
        self._thread: threading.Thread | None = None

    def call_later(self, seconds: float, callback: Callable[[], object]) -> Timer:
        timer = Timer(self, time.monotonic() + seconds, callback)
        self._incoming.append(timer)
        if timer.due < self._sleeps_until:
            self._notices.put(None)
        thread = self._thread
        if thread is None or not thread.is_alive():
            self._start()
        return timer

    def _start(self) -> None:
        with self._start_lock:
            # Created before the check: destructors that run while it is created may start timers.
            thread = threading.Thread(target=self._run, name="gradwire-timers", daemon=True)
            if self._thread is None or not self._thread.is_alive():
                self._thread = thread
                thread.start()

    def count_cancelled(self) -> None:
        # Nearly every call gets its response long before its deadline: without this check the heap would keep
        # the timers of all calls of the last minutes.
        self._cancelled += 1
        kept = len(self._heap) + len(self._incoming)
        if not self._is_crowded and self._cancelled > max(self.KEPT_CANCELLED, kept // 2):
            self._is_crowded = True
            self._notices.put(None)

    # -- the thread

    def _run(self) -> None:
        # If an interrupt came while this thread was being started, another thread may have replaced it.
        while self._thread is threading.current_thread():
            timer = self._next_due()
            if timer is None:
                if self._ends():
                    return
                continue
            callback, timer.callback = timer.callback, None
            del timer
            try:
                if callback is not None:
                    callback()
            except BaseException:  # this thread must go on, whatever the error is
                log.exception("a timer's callback failed")
            del callback  # it may refer to much memory, and the next timer may be due in an hour
        self._notices.put(None)  # the notice that woke this thread may be for the other

    def _next_due(self) -> Timer | None:
        """Waits for the next due timer; None if there was no timer for a while."""
        while True:
            self._take_in()
            now = time.monotonic()
            if self._heap and self._heap[0][0] <= now:
                return heapq.heappop(self._heap)[2]
            longest = self.LONGEST_SLEEP if self._heap else self.IDLE_SECONDS
            self._sleeps_until = min(self._heap[0][0], now + longest) if self._heap else now + longest
            try:
                # A timer that was appended just before `_sleeps_until` was set did not leave a notice.
                if not self._incoming:
                    self._notices.get(timeout=self._sleeps_until - now)
            except Empty:
                if not self._heap:
                    return None
            finally:
                self._sleeps_until = -math.inf

    def _take_in(self) -> None:
        if self._is_crowded:
            self._heap = [entry for entry in self._heap if entry[2].callback is not None]
            heapq.heapify(self._heap)
            self._cancelled, self._is_crowded = 0, False
        while self._incoming:
            timer = self._incoming.popleft()
            if timer.callback is not None:
                heapq.heappush(self._heap, (timer.due, next(self._counter), timer))
        while self._heap and self._heap[0][2].callback is None:
            heapq.heappop(self._heap)

    def _ends(self) -> bool:
        """Ends the thread, unless a timer came meanwhile. Returns whether it ends."""
        with self._start_lock:
            me, self._thread = self._thread, None
            # A timer that is started from here on starts another thread.
            if not self._incoming:
                return True
            self._thread = me
            return False


_clock = _Clock()


def call_later(seconds: float, callback: Callable[[], object]) -> Timer:
    """Calls back after `seconds`, on the timers' thread: the callback must not block."""
    return _clock.call_later(seconds, callback)


def _after_fork() -> None:
    # Threads do not survive a fork.
    global _clock
    _clock = _Clock()


os.register_at_fork(after_in_child=_after_fork)
