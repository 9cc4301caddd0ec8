"""One thread that notices when a reading thread is busy for long, so that another thread can take over."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Protocol

__all__ = ["INLINE_SECONDS", "check_often", "watch"]

log = logging.getLogger("gradwire.link")

INLINE_SECONDS = 0.004
"""Work that takes no longer than this is not worth a handover to another thread."""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.01, 0.04
"""The pause between two checks; it grows while nothing happens. Each check takes the interpreter's lock from
the working thread for a moment, and may move that thread to another core: checking every 3 ms slowed down all
calls that take a few milliseconds."""
_IDLE_SECONDS = 0.1
"""The thread ends after this long without anything to watch."""


class Watched(Protocol):
    def check(self, now: float) -> bool:
        """Hands work over if that is needed. Returns whether to check again."""


class _Watchdog:
    """Checks watched objects repeatedly, while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: set[Watched] = set()
        """Objects that were registered since the last check, and those that were busy at it."""
        self._is_running = False
        self._pause = _SHORTEST_PAUSE

    def check_often(self) -> None:
        self._pause = _SHORTEST_PAUSE

    def watch(self, watched: Watched) -> bool:
        with self._lock:
            self._watched.add(watched)
            if not self._is_running:
                self._pause = _SHORTEST_PAUSE
                try:
                    threading.Thread(target=self._run, name="gradwire-watchdog", daemon=True).start()
                except RuntimeError as error:
                    log.warning("cannot start a thread: %s", error)  # the next call to `watch` tries again
                    return False
                self._is_running = True
            return True

    def _run(self) -> None:
        idle = 0.0
        while True:
            pause = self._pause
            self._pause = min(1.2 * pause, _LONGEST_PAUSE)
            time.sleep(pause)
            with self._lock:
                watched, self._watched = self._watched, set()
            now = time.monotonic()
            occupied = {each for each in watched if self._is_occupied(each, now)}
            idle = 0.0 if watched else idle + pause
            with self._lock:
                self._watched |= occupied
                if idle > _IDLE_SECONDS and not self._watched:
                    self._is_running = False
                    return
            del watched, occupied  # the watchdog must not keep them alive

    def _is_occupied(self, watched: Watched, now: float) -> bool:
        try:
            return watched.check(now)
        except Exception:  # the other objects must still be checked
            log.exception("a check of the watchdog failed")
            return False


_watchdog = _Watchdog()


def watch(watched: Watched) -> bool:
    """Checks an object from now on, until it is no longer busy.

    Returns False if no thread could be started to do so; the next call to `watch` tries again.
    """
    return _watchdog.watch(watched)


def check_often() -> None:
    """Shortens the pause between checks: work had to be handed over, which may soon happen again."""
    _watchdog.check_often()


def _after_fork() -> None:
    global _watchdog
    _watchdog = _Watchdog()


os.register_at_fork(after_in_child=_after_fork)
