"""The leader/followers pattern: one thread reads at a time, and a follower takes over while it is busy.

Handing a request to another thread costs more than most small calls: the other thread may run on another core
with cold caches, and two threads of one process wait for each other at the interpreter's lock. So the thread
that reads a request also serves it. If serving takes long, a follower becomes the leader and goes on reading.
If that happens repeatedly, requests are handed to other threads for a while.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod

from gradwire.system.watchdog import INLINE_SECONDS, check_often, watch

__all__ = ["InlinePolicy", "LeaderFollowers"]

log = logging.getLogger("gradwire.link")

_LIVENESS_SECONDS = 1.0
_LONG_SECONDS = 4 * INLINE_SECONDS
"""Longer times are all counted as this one."""
_RECENT = 0.2
"""The weight of the latest request in the moving average of serving times. It is low because a single slow
request may only mean that the machine was busy."""
_FIRST_SKIPPED, _MOST_SKIPPED = 8, 64
"""How many requests are handed to other threads after requests that took long."""


class InlinePolicy:
    """Decides from a moving average of serving times whether requests of one
    connection run on the reading thread."""

    __slots__ = ("_seconds", "_skipped", "_to_skip")

    def __init__(self) -> None:
        self._seconds = 0.0
        self._skipped = self._to_skip = 0

    def may_run_inline(self) -> bool:
        """Whether the next request is expected to be fast enough to run on the thread that read it."""
        if self._skipped < self._to_skip:
            self._skipped += 1
            return False
        self._skipped = 0
        return True

    def took(self, seconds: float) -> None:
        """Records how many seconds a request took."""
        self._seconds += _RECENT * (min(seconds, _LONG_SECONDS) - self._seconds)
        if self._seconds < INLINE_SECONDS:
            self._to_skip = 0
        elif seconds >= INLINE_SECONDS:
            self._to_skip = min(2 * self._to_skip + _FIRST_SKIPPED, _MOST_SKIPPED)


class LeaderFollowers(ABC):
    """A source of frames, and the threads that read it in turn."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._leader: object | None = None
        """A token of the thread that reads; None if no thread reads."""
        self._leader_thread = 0
        """The identifier of the leader's thread; 0 if no thread reads."""
        self._followers = 0
        """How many threads wait to become the leader."""
        self._inline_policy = InlinePolicy()
        """The policy of the connection that the last frame came from."""
        self._busy_since = 0.0
        """Since when the leader has been serving a request; 0 if it is not serving one."""
        self._has_blocked = False
        """Whether the leader has waited for another peer while serving. Its time
        until then has been recorded."""
        self._ended = False

    @abstractmethod
    def _lead(self, me: object) -> None:
        """Reads and serves frames for as long as `me` is the leader."""

    def _may_lead(self) -> bool:
        """Whether a follower may become the leader. The lock is held."""
        return self._leader is None

    def _run_thread(self, *, is_ready: bool = False) -> None:
        me = object()
        is_extra = is_ready
        while True:
            with self._lock:
                if not is_ready:
                    self._followers += 1
                is_ready = False
                # Checked periodically, in case no thread was notified that there is no leader.
                while not self._changed.wait_for(lambda: self._ended or self._may_lead(), _LIVENESS_SECONDS):
                    if is_extra and self._followers > 1:
                        self._followers -= 1
                        return  # there are other followers
                self._followers -= 1
                if self._ended:
                    return
                self._leader, self._leader_thread = me, threading.get_ident()
            self._lead(me)

    def _finish_frame(self, me: object) -> bool:
        """Called after a frame was handled: records how long it took. Returns whether `me` is still
        the leader. The lock is held."""
        if self._leader is not me:
            return False  # another thread is the leader now
        if self._busy_since:
            if not self._has_blocked:
                self._inline_policy.took(time.monotonic() - self._busy_since)
            self._busy_since = 0.0
        return True

    # -- serving requests on the thread that read them

    def may_run_inline(self) -> bool:
        """Whether the thread that read a request may serve it.

        From then on another thread may read, so all frames read before must have been handled.
        """
        if not self._inline_policy.may_run_inline():
            return False
        self._has_blocked = False
        self._busy_since = time.monotonic()
        if not watch(self):
            self._busy_since = 0.0  # without a watchdog nothing would notice that serving takes long
            return False
        return True

    def about_to_block(self) -> None:
        """Called by a serving thread that is about to wait for another peer. If other connections need a
        reader, a follower takes over."""
        if self._leader_thread != threading.get_ident():
            return
        with self._lock:
            if self._leader_thread != threading.get_ident() or not self._busy_since:
                return  # another thread is the leader by now
            if not self._has_blocked:
                # The time that it waits says nothing about how long the next request will take.
                self._inline_policy.took(time.monotonic() - self._busy_since)
                self._has_blocked = True
            if self._has_other_connections():
                self._revoke()
                self._promote_follower()

    def _has_other_connections(self) -> bool:
        return False

    @abstractmethod
    def _has_pending_work(self) -> bool:
        """Whether frames or responses wait for the busy leader. The lock is held."""

    def check(self, now: float) -> bool:
        """Called by the watchdog: promotes a follower if the leader is busy for long, if work waits for a
        busy leader, or if there has been no leader for long.

        Returns whether the watchdog must check again.
        """
        with self._lock:
            if self._leader is not None:
                if not self._busy_since:
                    return False
                occupied = now - self._busy_since
                if occupied < INLINE_SECONDS or (occupied < _LONG_SECONDS and not self._has_pending_work()):
                    return True
                # Even if the leader waits for another peer: the response may be on the
                # connection that nothing reads.
                self._inline_policy.took(_LONG_SECONDS)
                self._revoke()
            if self._promote_follower():
                check_often()
            return not self._ended

    def _revoke(self) -> None:
        """Makes the busy leader lose its role; it only finishes its request. The lock is held."""
        self._leader, self._leader_thread, self._busy_since = None, 0, 0.0

    def _promote_follower(self) -> bool:
        """Wakes or starts a follower, if one may become the leader. Returns
        whether it did. The lock is held."""
        if self._ended:
            self._changed.notify_all()
            return False
        if not self._may_lead():
            return False
        if self._followers:
            self._changed.notify()
        else:
            self._followers += 1
            thread = threading.Thread(
                target=self._run_thread, kwargs={"is_ready": True}, name="gradwire-follower", daemon=True
            )
            try:
                thread.start()
            except RuntimeError as error:
                self._followers -= 1
                log.warning("cannot start a thread: %s", error)  # the watchdog tries again
                return False
        return True
