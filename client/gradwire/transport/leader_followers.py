"""Threads that take turns at reading: one at a time, and another while that one is occupied.

To hand something over to another thread costs more than most small calls: that thread may be on another core,
where nothing that it needs is at hand, and two threads of one process only wait for the interpreter. So a
question is answered by the thread that read it. Should that take long, another thread stands in and goes on
reading; where that happens again and again, questions are answered elsewhere for a while.
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
"""Longer is no worse."""
_RECENT = 0.2
"""How much the latest answer says about the next, compared with all before. One that took long by chance says
nothing: the machine was busy."""
_FIRST_SKIPPED, _MOST_SKIPPED = 8, 64
"""How many questions go elsewhere after some that took long."""


class InlinePolicy:
    """How long it takes to answer what comes from one place."""

    __slots__ = ("_seconds", "_skipped", "_to_skip")

    def __init__(self) -> None:
        self._seconds = 0.0
        self._skipped = self._to_skip = 0

    def may_run_inline(self) -> bool:
        """Whether the next question may be expected to take no time."""
        if self._skipped < self._to_skip:
            self._skipped += 1
            return False
        self._skipped = 0
        return True

    def took(self, seconds: float) -> None:
        """One of them took so long."""
        self._seconds += _RECENT * (min(seconds, _LONG_SECONDS) - self._seconds)
        if self._seconds < INLINE_SECONDS:
            self._to_skip = 0
        elif seconds >= INLINE_SECONDS:
            self._to_skip = min(2 * self._to_skip + _FIRST_SKIPPED, _MOST_SKIPPED)


class LeaderFollowers(ABC):
    """What reads, and the threads that do."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._leader: object | None = None
        """Who reads."""
        self._leader_thread = 0
        """The thread that does."""
        self._followers = 0
        """Threads that wait for their turn."""
        self._inline_policy = InlinePolicy()
        """Of where the last thing came from that was read."""
        self._busy_since = 0.0
        """Since when the one who reads is occupied with a question. 0: it is not."""
        self._has_blocked = False
        """Whether it has waited for somebody else meanwhile. What it took until then has been noted."""
        self._ended = False

    @abstractmethod
    def _lead(self, me: object) -> None:
        """Reads for as long as it is one's turn."""

    def _may_lead(self) -> bool:
        """Whether somebody may take a turn. With the lock held."""
        return self._leader is None

    def _run_thread(self, *, is_ready: bool = False) -> None:
        me = object()
        is_extra = is_ready
        while True:
            with self._lock:
                if not is_ready:
                    self._followers += 1
                is_ready = False
                # Looked at now and then, should nobody notice that it is free.
                while not self._changed.wait_for(lambda: self._ended or self._may_lead(), _LIVENESS_SECONDS):
                    if is_extra and self._followers > 1:
                        self._followers -= 1
                        return  # there are others
                self._followers -= 1
                if self._ended:
                    return
                self._leader, self._leader_thread = me, threading.get_ident()
            self._lead(me)

    def _finish_frame(self, me: object) -> bool:
        """What was read last has been taken in, and answered if that was possible here. Whether it is still
        one's turn. With the lock held."""
        if self._leader is not me:
            return False  # somebody stands in
        if self._busy_since:
            if not self._has_blocked:
                self._inline_policy.took(time.monotonic() - self._busy_since)
            self._busy_since = 0.0
        return True

    # -- answering where the question was read

    def may_run_inline(self) -> bool:
        """Whether what was just read may be worked on by the thread that read it.

        From then on others may read: all that was read before must have been taken in.
        """
        if not self._inline_policy.may_run_inline():
            return False
        self._has_blocked = False
        self._busy_since = time.monotonic()
        if not watch(self):
            self._busy_since = 0.0  # nobody would notice that it takes long
            return False
        return True

    def about_to_block(self) -> None:
        """For the code that answers: it is about to wait. Others need not wait with it."""
        if self._leader_thread != threading.get_ident():
            return
        with self._lock:
            if self._leader_thread != threading.get_ident() or not self._busy_since:
                return  # somebody stands in by now
            if not self._has_blocked:
                # How long it waits says nothing about the next question.
                self._inline_policy.took(time.monotonic() - self._busy_since)
                self._has_blocked = True
            if self._has_other_connections():
                self._revoke()
                self._promote_follower()

    def _has_other_connections(self) -> bool:
        return False

    @abstractmethod
    def _has_pending_work(self) -> bool:
        """Whether anything waits for the one who reads and is occupied. With the lock held."""

    def check(self, now: float) -> bool:
        """Lets another thread go on if the one who reads is occupied for long, or is missed, or if nobody
        reads for long.

        Whether there is anything to look at.
        """
        with self._lock:
            if self._leader is not None:
                if not self._busy_since:
                    return False
                occupied = now - self._busy_since
                if occupied < INLINE_SECONDS or (occupied < _LONG_SECONDS and not self._has_pending_work()):
                    return True
                # Also if it waits: it may be for what has come over the connection that nobody reads.
                self._inline_policy.took(_LONG_SECONDS)
                self._revoke()
            if self._promote_follower():
                check_often()
            return not self._ended

    def _revoke(self) -> None:
        """Takes the turn from the one who is occupied. With the lock held."""
        self._leader, self._leader_thread, self._busy_since = None, 0, 0.0

    def _promote_follower(self) -> bool:
        """Has another thread read, if it is free to. Whether one does. With the lock held."""
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
                log.warning("no thread can be had: %s", error)  # it is tried again
                return False
        return True
