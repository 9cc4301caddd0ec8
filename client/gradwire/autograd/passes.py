"""Backward passes: all that one backward() sets off, on every peer.

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
"""One counter for all peers of the process, because one object store may serve several of them."""


def new_id(peer: int) -> AutogradMessageId:
    """An id for a message or a pass that no other of the peer has."""
    return AutogradMessageId(peer, next(_numbers))


class Passes:
    """The passes that this peer has started, and what it knows of those of others."""

    def __init__(self, peer: int) -> None:
        self._peer = peer
        # Reentrant: the destructor of a graph task's state ends its pass, at any moment.
        self._lock = threading.RLock()
        self._newest = 0
        self._running: set[int] = set()
        """The numbers of this peer's own passes that go on."""
        self._oldest: dict[int, int] = {}
        """For each peer, the number of the oldest of its passes that goes on, as far as it is known here."""
        self.hooks = WaitingHooks()
        """Hooks of leaves that wait for the end of a pass."""

    def start(self) -> AutogradMessageId:
        """A backward starts here."""
        with self._lock:
            id = new_id(self._peer)
            self._running.add(id.number)
            self._newest = id.number
            return id

    def end(self, id: AutogradMessageId) -> None:
        """A pass is over, well or not: what still comes of it is refused from the next call on."""
        self.hooks.take(id)
        with self._lock:
            self._running.discard(id.number)
            self._oldest[self._peer] = min(self._running, default=self._newest + 1)

    def oldest_of(self, peer: int) -> int:
        """The number of the oldest pass of a peer that may go on."""
        return self._oldest.get(peer, 0)

    def learn_oldest(self, peer: int, number: int) -> None:
        """A call has told the oldest pass of a peer that goes on."""
        if number > self._oldest.get(peer, 0):
            self._oldest[peer] = number
            self.hooks.forget(peer, number)

    def is_over(self, id: AutogradMessageId) -> bool:
        return id.number < self._oldest.get(id.peer, 0)

    def forget(self, peer: int) -> None:
        """A peer is gone."""
        self._oldest.pop(peer, None)
        self.hooks.forget(peer)
