"""Looking out for what is about to come, for a moment, before going to sleep.

To sleep and to be woken costs more than to serve a small call: the core has to be woken, too, or is shared
with the one who wakes, and what the thread needs is no longer at hand. So a thread that waits keeps looking
for a moment, and lets everybody else go first who wants the core. Only one of a process does so at a time,
and only where that was of use lately.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Protocol

__all__ = ["Spinning"]

_SECONDS = 0.001
_CROWDED_SECONDS = 0.0002
"""Who is away for so long after letting others go first is in their way."""
_MOST_SKIPPED = 63
"""How many waits go without, after several for which it was of no use."""

_one_at_a_time = threading.Lock()


class Poll(Protocol):
    """What tells whether something has come: `select.poll`."""

    def poll(self, timeout: int, /) -> list[tuple[int, int]]: ...


class Spinning:
    """For one place where a thread waits."""

    def __init__(self, poll: Poll) -> None:
        self._poll = poll
        self._skipped = self._to_skip = 0

    def __call__(self) -> None:
        """Returns when something has come, or when it is better to sleep."""
        if self._skipped < self._to_skip:
            self._skipped += 1
            return
        self._skipped = 0
        if not _one_at_a_time.acquire(blocking=False):
            return
        try:
            if self._poll.poll(0):
                return  # which says nothing: where many want the cores, it was here before this thread was
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
