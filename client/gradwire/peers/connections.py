"""The connection to a worker: made when it is first needed, and again when it was lost."""

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

__all__ = ["Again", "WorkerConnection"]


class Again(Enum):
    """Why a worker is connected to that was connected before. Either takes no longer than its loss may."""

    NEEDED = "needed"
    """What it is needed for begins now. It has `lost_after` seconds to answer, else it counts as lost."""
    LOST = "lost"
    """It was out of reach for so long already. It is asked once whether it is back."""


class WorkerConnection:
    """A place for the link to one worker, made when it is first needed and again when it was lost."""

    def __init__(
        self,
        engine: DistEngine,
        target: str,
        connect: Callable[[Again | None], Link],
        lost_after: float = LinkSettings.lost_after,
    ) -> None:
        self.engine = engine
        self._target = target
        self._connect = connect
        self._lost_after = lost_after
        self._connecting = threading.Lock()
        self._lock = threading.Lock()
        self._link: Link | None = None
        self._failures = 0
        """How often connecting has failed."""
        self._failure: errors.GradwireError | None = None
        """Why it did the last time, unless it worked since."""
        self._failed_again: Again | None = None
        """What it was tried for then, and so for how long."""
        self._users: weakref.WeakSet[object] = weakref.WeakSet()

    def get(self, again: Again | None = None) -> Link:
        """The link. Connects if need be, for as long as the deadline in force allows.

        For who had a link before, `again` says why: then the worker is lost if it does not answer soon.
        """
        refuse_if_forked()
        link = self._link
        if link is not None and link.ended is None:
            return link
        if again is Again.LOST and not (link is not None and link.ended_by_timeout):
            again = Again.NEEDED  # it ended for another reason: the worker may well be there
        # Whoever comes while another connects waits for the same connection, or for the same failure.
        failures = self._failures
        left = deadline()
        waits = -1 if left is None else left
        if again is not None and not 0 <= waits < self._lost_after:
            waits = self._lost_after
        if not self._connecting.acquire(timeout=waits):
            message = f"no time left to wait for the connection to {self._target}"
            raise (errors.DeadlineExceeded if waits == left else errors.WorkerLost)(
                message, worker=self._target
            )
        try:
            if self._link is None or self._link.ended is not None:
                is_shared = self._failures != failures and again is self._failed_again
                if is_shared and self._failure is not None:
                    raise self._failure.again()
                try:
                    self._link, self._failure = self._connect(again), None
                except errors.LinkError as error:
                    self._failures += 1
                    self._failure, self._failed_again = error.again(), again
                    raise
            return self._link
        finally:
            self._connecting.release()

    @property
    def link(self) -> Link | None:
        """The link as it is: maybe ended, None if there was none yet."""
        return self._link

    def join(self, user: object) -> None:
        with self._lock:
            self._users.add(user)

    def leave(self, user: object) -> None:
        """Ends the link if this was its last user. Users that were just dropped do not count, so that a
        program may ask for a handle whenever it needs one and pay for one link."""
        with self._lock:
            self._users.discard(user)
            unused = not self._users
        if unused:
            self.close()

    def close(self, *, leaving: bool = False) -> None:
        link, self._link = self._link, None
        if link is not None:
            link.close(leaving=leaving)
