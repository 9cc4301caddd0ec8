"""Runs users' callbacks for responses, on threads that read no link.

A callback may take long, or wait for another response or another callback. Most are fast, so one thread calls
them in turn; another thread takes over if a callback takes long.
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
"""A thread without a callback to call ends after this long."""


def call_each(callbacks: Iterable[Callable[[], object]]) -> None:
    """Calls all callbacks; an error in one is logged and does not keep the others from being called."""
    for callback in callbacks:
        try:
            callback()
        except Exception:
            log.exception("a callback failed")


class _Callbacks:
    """The queue of callbacks, and the thread that calls them."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a destructor, at any moment, may settle a future with callbacks
        self._arrived = threading.Condition(self._lock)
        self._waiting: deque[Callable[[], object]] = deque()
        self._caller: object | None = None
        """A token of the thread that takes the next callback."""
        self._busy_since = 0.0
        """Since when that thread has been in a callback; 0 if it is not in one."""

    def add(self, callback: Callable[[], object]) -> None:
        with self._lock:
            self._waiting.append(callback)
            if self._caller is None:
                self._start()
            else:
                self._arrived.notify()
        watch(self)

    def check(self, now: float) -> bool:
        """Called by the watchdog: starts another thread if the current one is busy for long.
        Returns whether callbacks wait."""
        with self._lock:
            if not self._waiting:
                return False
            is_stuck = self._busy_since and now - self._busy_since > INLINE_SECONDS
            if is_stuck or self._caller is None:
                self._start()
                check_often()
            return True

    def _start(self) -> None:
        """Starts a thread that takes over calling. The lock is held."""
        me = object()
        thread = threading.Thread(target=self._call_on, args=(me,), name="gradwire-callback", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            log.warning("cannot start a thread: %s", error)  # the watchdog tries again
        else:
            self._caller, self._busy_since = me, 0.0

    def _call_on(self, me: object) -> None:
        while True:
            with self._lock:
                if self._caller is me:
                    self._busy_since = 0.0
                    self._arrived.wait_for(lambda: self._waiting or self._caller is not me, _IDLE_SECONDS)
                if self._caller is not me:
                    return  # another thread has taken over
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
    """Calls back soon, on another thread. The callback may block."""
    _callbacks.add(callback)


def _after_fork() -> None:
    global _callbacks
    _callbacks = _Callbacks()


os.register_at_fork(after_in_child=_after_fork)
