"""Polls for a moment before a thread goes to sleep.

Sleeping and being woken costs more than serving a small call: the core has to wake up as well, or is shared
with the thread that wakes it, and the caches have gone cold. So a thread that waits keeps polling for a
moment, and yields the core to any other thread that wants it. Only one thread of a process spins at a time,
and only where spinning was useful lately.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Protocol

__all__ = ["Spinning"]

_SECONDS = 0.001
_CROWDED_SECONDS = 0.0002
"""A thread that was descheduled for longer than this after yielding is delaying other threads."""
_MOST_SKIPPED = 63
"""The most waits that do without spinning, after spinning was useless several times."""

_one_at_a_time = threading.Lock()


class Poll(Protocol):
    """The part of `select.poll` that spinning uses."""

    def poll(self, timeout: int, /) -> list[tuple[int, int]]: ...


class Spinning:
    """Spins for one place where a thread waits."""

    def __init__(self, poll: Poll) -> None:
        self._poll = poll
        self._skipped = self._to_skip = 0

    def __call__(self) -> None:
        """Returns when something can be read, or when it is better to sleep."""
        if self._skipped < self._to_skip:
            self._skipped += 1
            return
        self._skipped = 0
        if not _one_at_a_time.acquire(blocking=False):
            return
        try:
            if self._poll.poll(0):
                return  # not counted as useful: on busy cores, the data was there before this thread ran
            now = time.monotonic()
            give_up_at = now + _SECONDS
            while True:
                os.sched_yield()
                before, now = now, time.monotonic()
                if now > give_up_at or now - before > _CROWDED_SECONDS:
                    self._to_skip = min(2 * self._to_skip + 1, _MOST_SKIPPED)
                    return
                if self._poll.poll(0):
                    self._to_skip = 0
                    return
        finally:
            _one_at_a_time.release()


def _after_fork() -> None:
    global _one_at_a_time
    _one_at_a_time = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
