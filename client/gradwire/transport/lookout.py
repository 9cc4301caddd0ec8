"""One thread that notices when a thread that reads is occupied for long, so that another can stand in."""

from __future__ import annotations

import os
import threading
import time
import weakref
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
    """Looks once in a millisecond, while there is anything to see."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._watched: weakref.WeakSet[Watched] = weakref.WeakSet()
        self._is_looking = False
        self._seen = False

    def watch(self, watched: Watched) -> None:
        with self._lock:
            self._seen = True
            self._watched.add(watched)
            if not self._is_looking:
                self._is_looking = True
                threading.Thread(target=self._look, name="gradwire-lookout", daemon=True).start()

    def _look(self) -> None:
        idle = 0
        while True:
            time.sleep(_PAUSE_SECONDS)
            with self._lock:
                watched, seen, self._seen = list(self._watched), self._seen, False
            now = time.monotonic()
            occupied = [one.look(now) for one in watched]
            idle = 0 if seen or any(occupied) else idle + 1
            if idle > _IDLE_LOOKS:
                with self._lock:
                    if not self._seen:
                        self._is_looking = False
                        self._watched.clear()
                        return


_lookout = _Lookout()


def watch(watched: Watched) -> None:
    """Has something looked at from now on, until nothing is going on any more."""
    _lookout.watch(watched)


def _after_fork() -> None:
    global _lookout
    _lookout = _Lookout()


os.register_at_fork(after_in_child=_after_fork)
