"""One thread that calls back at given times, for all deadlines of the process."""

from __future__ import annotations

import heapq
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable

__all__ = ["Timer", "call_later"]

log = logging.getLogger("gradwire.timers")


class Timer:
    """A callback that is due at some time, unless it is cancelled."""

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
    """Runs while there are timers to wait for, and a little longer."""

    IDLE_SECONDS = 5.0
    KEPT_CANCELLED = 1000
    """Entries of cancelled timers are swept out when there are more, and more than of live ones."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._heap: list[tuple[float, int, Timer]] = []
        self._counter = itertools.count()
        self._cancelled = 0
        self._thread: threading.Thread | None = None

    def call_later(self, seconds: float, callback: Callable[[], object]) -> Timer:
        timer = Timer(self, time.monotonic() + seconds, callback)
        with self._changed:
            heapq.heappush(self._heap, (timer.due, next(self._counter), timer))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gradwire-timers", daemon=True)
                self._thread.start()
            elif self._heap[0][2] is timer:
                self._changed.notify()
        return timer

    def count_cancelled(self) -> None:
        # Nearly every call is answered long before its deadline: without this the heap would hold the
        # timers of all calls of the last minutes.
        with self._changed:
            self._cancelled += 1
            if self._cancelled > max(self.KEPT_CANCELLED, len(self._heap) // 2):
                self._heap = [entry for entry in self._heap if entry[2].callback is not None]
                heapq.heapify(self._heap)
                self._cancelled = 0

    def _next_due(self) -> Timer | None:
        """Waits for the next timer; None when there was nothing to wait for."""
        with self._changed:
            while True:
                while self._heap and self._heap[0][2].callback is None:
                    heapq.heappop(self._heap)
                    self._cancelled -= 1
                if not self._heap:
                    self._changed.wait(self.IDLE_SECONDS)
                    if not self._heap:
                        self._thread = None
                        return None
                    continue
                wait = self._heap[0][0] - time.monotonic()
                if wait <= 0:
                    return heapq.heappop(self._heap)[2]
                self._changed.wait(wait)

    def _run(self) -> None:
        while (timer := self._next_due()) is not None:
            callback, timer.callback = timer.callback, None
            if callback is None:
                continue
            try:
                callback()
            except Exception:
                log.exception("a timer's callback failed")


_clock = _Clock()


def call_later(seconds: float, callback: Callable[[], object]) -> Timer:
    """Calls back in so many seconds, on the timers' thread: the callback must not block."""
    return _clock.call_later(seconds, callback)


def _after_fork() -> None:
    # The thread did not come along, and its lock may have been held.
    global _clock
    _clock = _Clock()


os.register_at_fork(after_in_child=_after_fork)
