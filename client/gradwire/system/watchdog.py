"""One thread that notices when a thread that reads is occupied for long, so that another can stand in."""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import Protocol

__all__ = ["INLINE_SECONDS", "check_often", "watch"]

log = logging.getLogger("gradwire.link")

INLINE_SECONDS = 0.004
"""What takes no longer than this is not worth another thread."""
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.01, 0.04
"""Between two looks: the longer, the longer there was nothing to do. Each keeps the thread that is at work
from the interpreter for a moment, and may bring it to another core: looking every 3 ms made everything slower
that takes a few."""
_IDLE_SECONDS = 0.1
"""Without anything to see for so long, the thread ends."""


class Watched(Protocol):
    def check(self, now: float) -> bool:
        """Whether it is occupied."""


class _Watchdog:
    """Looks again and again, while there is anything to see."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: set[Watched] = set()
        """Those of which there is news since the last look, and those that were occupied then."""
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
                    log.warning("no thread can be had: %s", error)  # it is tried again
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
            del watched, occupied  # nobody is kept for being looked at

    def _is_occupied(self, watched: Watched, now: float) -> bool:
        try:
            return watched.check(now)
        except Exception:  # the others must go on being looked at
            log.exception("looking at what reads failed")
            return False


_watchdog = _Watchdog()


def watch(watched: Watched) -> bool:
    """Has something looked at from now on, until nothing is going on any more.

    Whether it is: there may be no thread to do so. Then it is with the next that is to be looked at.
    """
    return _watchdog.watch(watched)


def check_often() -> None:
    """Something had to be done about it: that may soon be so again."""
    _watchdog.check_often()


def _after_fork() -> None:
    global _watchdog
    _watchdog = _Watchdog()


os.register_at_fork(after_in_child=_after_fork)
