"""Backward passes. A pass is all the graph tasks, on all peers, that a backward() sets off.

A pass that failed may leave work behind on a peer that was slow or stopped. Each call carries the number of
the oldest unfinished pass of its context's owner; work of older passes is refused.
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
    return AutogradMessageId(peer, next(_numbers))


class Passes:
    """The passes that this peer started, and the oldest unfinished pass of each other peer."""

    def __init__(self, peer: int) -> None:
        self._peer = peer
        # Reentrant: the destructor of a graph task's state ends its pass, at any moment.
        self._lock = threading.RLock()
        self._newest = 0
        self._running: set[int] = set()
        """The numbers of the unfinished passes that this peer started."""
        self._oldest: dict[int, int] = {}
        """For each peer, the number of its oldest unfinished pass, as far as this peer has been told."""
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
            self._oldest[self._peer] = min(self._running, default=self._newest + 1)

    def oldest_of(self, peer: int) -> int:
        """The number of the oldest unfinished pass of a peer; 0 if none is known."""
        return self._oldest.get(peer, 0)

    def learn_oldest(self, peer: int, number: int) -> None:
        """Notes the number of the oldest unfinished pass of a peer, as a call brought it."""
        if number > self._oldest.get(peer, 0):
            self._oldest[peer] = number
            self.hooks.forget(peer, number)

    def is_over(self, id: AutogradMessageId) -> bool:
        return id.number < self._oldest.get(id.peer, 0)

    def forget(self, peer: int) -> None:
        """Forgets the passes of a peer that is gone."""
        self._oldest.pop(peer, None)
        self.hooks.forget(peer)
