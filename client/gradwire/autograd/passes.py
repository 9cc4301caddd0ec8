"""Backward passes. A pass is all the graph tasks, on all peers, that a backward() sets off.

A pass that failed may leave work behind on a peer that was slow or stopped. Each call carries the number of
the oldest unfinished pass of its context's owner; work of older passes in that context is refused.
"""

from __future__ import annotations

import itertools
import threading

from gradwire.autograd.hooks import WaitingHooks
from gradwire.wire.ids import AutogradMessageId

__all__ = ["Passes", "new_id"]

_numbers = itertools.count(1)
"""The peers of a process share this counter, because several of them may use the same object store."""


def new_id(peer: int) -> AutogradMessageId:
    """A new id for a message or a pass of a peer."""
    return AutogradMessageId.new(peer, next(_numbers))


class Passes:
    """The passes that this peer started."""

    def __init__(self, peer: int) -> None:
        self._peer = peer
        # Reentrant: the destructor of a graph task's state ends its pass, at any moment.
        self._lock = threading.RLock()
        self._newest = 0
        self._running: set[int] = set()
        """The numbers of the unfinished passes that this peer started."""
        self.oldest = 0
        """The number of the oldest unfinished one; 0 before the first has ended."""
        self.hooks = WaitingHooks()
        """Hooks of leaves that wait for the end of a pass."""

    def start(self) -> AutogradMessageId:
        """Starts a pass, and returns its id."""
        with self._lock:
            id = new_id(self._peer)
            self._running.add(id.number)
            self._newest = id.number
            return id

    def end(self, id: AutogradMessageId) -> None:
        """Ends a pass, whether it succeeded or failed. Late requests of the pass are refused by every peer
        that gets a later call."""
        self.hooks.take(id)
        with self._lock:
            self._running.discard(id.number)
            self.oldest = min(self._running, default=self._newest + 1)
