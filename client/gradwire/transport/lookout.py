"""One thread that notices when a thread that reads is occupied for long, so that another can stand in."""

from __future__ import annotations

import os
import threading
import time
from typing import Protocol

__all__ = ["BRISK_SECONDS", "watch"]

BRISK_SECONDS = 0.004
"""What takes no longer than this is not worth another thread."""
_PAUSE_SECONDS = 0.003
_IDLE_LOOKS = 20


class Watched(Protocol):
    def look(self, now: float) -> bool:
        """Whether it is occupied."""


class _Lookout:
    """Looks every few milliseconds, while there is anything to see."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: set[Watched] = set()
        """Those of which there is news since the last look, and those that were occupied then."""
        self._is_looking = False

    def watch(self, watched: Watched) -> None:
        with self._lock:
            self._watched.add(watched)
            if not self._is_looking:
                self._is_looking = True
                threading.Thread(target=self._look, name="gradwire-lookout", daemon=True).start()

    def _look(self) -> None:
        idle = 0
        while True:
            time.sleep(_PAUSE_SECONDS)
            with self._lock:
                watched, self._watched = self._watched, set()
            now = time.monotonic()
            occupied = {one for one in watched if one.look(now)}
            idle = 0 if watched else idle + 1
            with self._lock:
                self._watched |= occupied
                if idle > _IDLE_LOOKS and not self._watched:
                    self._is_looking = False
                    return
            del watched, occupied  # nobody is kept for being looked at


_lookout = _Lookout()


def watch(watched: Watched) -> None:
    """Has something looked at from now on, until nothing is going on any more."""
    _lookout.watch(watched)


def _after_fork() -> None:
    global _lookout
    _lookout = _Lookout()


os.register_at_fork(after_in_child=_after_fork)
