"""One thread that calls back at given times, for all deadlines of the process."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable

__all__ = ["Timer", "call_later"]

log = logging.getLogger("gradwire.timers")


class Timer:
    """A callback that is due at some time, unless it is cancelled."""

    __slots__ = ("callback", "due")

    def __init__(self, due: float, callback: Callable[[], None]) -> None:
        self.due = due
        self.callback: Callable[[], None] | None = callback

    def cancel(self) -> None:
        # The entry stays in the heap until it is due, but must not keep anything alive.
        self.callback = None


class _Clock:
    """Runs while there are timers to wait for, and a little longer."""

    IDLE_SECONDS = 5.0

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._heap: list[tuple[float, int, Timer]] = []
        self._counter = itertools.count()
        self._thread: threading.Thread | None = None

    def add(self, timer: Timer) -> None:
        with self._changed:
            heapq.heappush(self._heap, (timer.due, next(self._counter), timer))
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gradwire-timers", daemon=True)
                self._thread.start()
            elif self._heap[0][2] is timer:
                self._changed.notify()

    def _next_due(self) -> Timer | None:
        """Waits for the next timer; None when there was nothing to wait for."""
        with self._changed:
            while True:
                while self._heap and self._heap[0][2].callback is None:
                    heapq.heappop(self._heap)
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
            callback = timer.callback
            if callback is None:
                continue
            try:
                callback()
            except Exception:
                log.exception("a timer's callback failed")


_clock = _Clock()


def call_later(seconds: float, callback: Callable[[], None]) -> Timer:
    """Calls back in so many seconds, on the timers' thread: the callback must not block."""
    timer = Timer(time.monotonic() + seconds, callback)
    _clock.add(timer)
    return timer
