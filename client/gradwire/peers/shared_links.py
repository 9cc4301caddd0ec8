"""The link to a worker that handles share: opened when it is first needed, and again after it was lost."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from enum import Enum

from gradwire import errors
from gradwire.autograd import DistEngine
from gradwire.peers.forking import refuse_if_forked
from gradwire.runtime.scope import deadline
from gradwire.transport import Link, LinkSettings

__all__ = ["Reconnect", "SharedLink"]


class Reconnect(Enum):
    """How long to try to reach a worker that was connected before."""

    WAIT = "wait"
    """For new work: the worker counts as lost if it does not respond within `lost_after` seconds."""
    PROBE = "probe"
    """For a worker that was waited for in vain already: one short attempt shows whether it is back."""


class SharedLink:
    """The link to one worker, shared by all handles to that worker.

    There is at most one link at a time. It is opened when it is first needed, and replaced after it ended.
    """

    def __init__(
        self,
        engine: DistEngine,
        target: str,
        connect: Callable[[Reconnect | None], Link],
        lost_after: float = LinkSettings.lost_after,
    ) -> None:
        self.engine = engine
        self._target = target
        self._connect = connect
        self._lost_after = lost_after
        self._connect_lock = threading.Lock()
        self._users_lock = threading.Lock()
        self._link: Link | None = None
        self._failures = 0
        """How many attempts to connect have failed."""
        self._failure: errors.GradwireError | None = None
        """The error of the last attempt; None if that attempt succeeded."""
        self._failed_reconnect: Reconnect | None = None
        """The `reconnect` of the last attempt that failed, which decides how long it tried."""
        self._users: weakref.WeakSet[object] = weakref.WeakSet()

    def get(self, reconnect: Reconnect | None = None) -> Link:
        """The link, opened if need be within the deadline in force.

        A user that had a link before passes `reconnect`. The worker then counts as lost, and `WorkerLost` is
        raised, if it does not respond in the time that `reconnect` allows.
        """
        refuse_if_forked()
        link = self._link
        if link is not None and link.ended is None:
            return link
        if reconnect is Reconnect.PROBE and not (link is not None and link.ended_by_timeout):
            reconnect = Reconnect.WAIT  # no timeout ended the link, so the worker may well be there
        # A thread that comes while another one connects shares the outcome: the same link, or the same
        # failure.
        failures = self._failures
        left = deadline()
        lock_timeout = -1 if left is None else left
        if reconnect is not None and not 0 <= lock_timeout < self._lost_after:
            lock_timeout = self._lost_after
        if not self._connect_lock.acquire(timeout=lock_timeout):
            message = f"no time left to wait for the link to {self._target}"
            raise (errors.DeadlineExceeded if lock_timeout == left else errors.WorkerLost)(
                message, worker=self._target
            )
        try:
            if self._link is None or self._link.ended is not None:
                is_shared = self._failures != failures and reconnect is self._failed_reconnect
                if is_shared and self._failure is not None:
                    raise self._failure.again()
                try:
                    self._link, self._failure = self._connect(reconnect), None
                except errors.LinkError as error:
                    self._failures += 1
                    self._failure, self._failed_reconnect = error.again(), reconnect
                    raise
            return self._link
        finally:
            self._connect_lock.release()

    @property
    def link(self) -> Link | None:
        """The link as it is now: it may have ended, and is None before the first connect."""
        return self._link

    def join(self, user: object) -> None:
        """Registers a handle that uses the link."""
        with self._users_lock:
            self._users.add(user)

    def leave(self, user: object) -> None:
        """Ends the link if `user` was its last user.

        Users that were garbage-collected without leaving do not end it: a program may make a handle whenever
        it needs one, and pays for one link only.
        """
        with self._users_lock:
            self._users.discard(user)
            unused = not self._users
        if unused:
            self.close()

    def close(self, *, leaving: bool = False) -> None:
        """Ends the link. `leaving` tells the worker that this whole peer goes, not only the link."""
        link, self._link = self._link, None
        if link is not None:
            link.close(leaving=leaving)
