"""What people want to have called when an answer is there, on threads that read no link.

A callback may take long, or wait for another answer, or for another callback. Most take no time: so one
thread calls them in turn, and another goes on if one of them takes long.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable

from gradwire.system.watchdog import INLINE_SECONDS, check_often, watch

__all__ = ["call_each", "call_elsewhere"]

log = logging.getLogger("gradwire.link")

_IDLE_SECONDS = 1.0
"""Without a callback for so long, the thread ends."""


def call_each(callbacks: Iterable[Callable[[], object]]) -> None:
    """Calls all of them; one that fails is logged and keeps no other from being called."""
    for callback in callbacks:
        try:
            callback()
        except Exception:
            log.exception("a callback failed")


class _Callbacks:
    """Callbacks that wait for their turn."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # destructors, at any moment, may settle what has callbacks
        self._arrived = threading.Condition(self._lock)
        self._waiting: deque[Callable[[], object]] = deque()
        self._caller: object | None = None
        """Stands for the thread that takes the next."""
        self._busy_since = 0.0
        """Since when it is occupied with one. 0: it is not."""

    def add(self, callback: Callable[[], object]) -> None:
        with self._lock:
            self._waiting.append(callback)
            if self._caller is None:
                self._start()
            else:
                self._arrived.notify()
        watch(self)

    def check(self, now: float) -> bool:
        """Has another thread go on if the one that calls is occupied for long. Whether any wait."""
        with self._lock:
            if not self._waiting:
                return False
            is_stuck = self._busy_since and now - self._busy_since > INLINE_SECONDS
            if is_stuck or self._caller is None:
                self._start()
                check_often()
            return True

    def _start(self) -> None:
        """With the lock held."""
        me = object()
        thread = threading.Thread(target=self._call_on, args=(me,), name="gradwire-callback", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            log.warning("no thread can be had: %s", error)  # it is tried again
        else:
            self._caller, self._busy_since = me, 0.0

    def _call_on(self, me: object) -> None:
        while True:
            with self._lock:
                if self._caller is me:
                    self._busy_since = 0.0
                    self._arrived.wait_for(lambda: self._waiting or self._caller is not me, _IDLE_SECONDS)
                if self._caller is not me:
                    return  # another goes on
                if not self._waiting:
                    self._caller = None
                    return
                callback = self._waiting.popleft()
                self._busy_since = time.monotonic()
            try:
                callback()
            except Exception:
                log.exception("a callback failed")
            del callback


_callbacks = _Callbacks()


def call_elsewhere(callback: Callable[[], object]) -> None:
    """Has it called soon, on another thread. It may wait for whatever it likes."""
    _callbacks.add(callback)


def _after_fork() -> None:
    global _callbacks
    _callbacks = _Callbacks()


os.register_at_fork(after_in_child=_after_fork)
