"""Results that lead into a common graph on the worker that sent them: state that it keeps between calls."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Container, Iterable, Sequence

import torch

from gradwire.autograd.records import ReceivedTensors, SentArguments

__all__ = ["Group", "Reach", "awaited_by", "group_of", "joins"]

_lock = threading.Lock()
_joins = 0


def joins() -> int:
    """How often groups became one so far."""
    return _joins


class Group:
    """Results that have parts of a worker's graph in common: their gradients had better go together."""

    def __init__(self) -> None:
        self._members: weakref.WeakSet[ReceivedTensors] = weakref.WeakSet()
        self._joined: Group | None = None

    def add(self, received: ReceivedTensors) -> None:
        with _lock:
            self.whole._members.add(received)

    @property
    def members(self) -> list[ReceivedTensors]:
        with _lock:
            return list(self.whole._members)

    @property
    def whole(self) -> Group:
        """The group that this one has become part of."""
        group = self
        while group._joined is not None:
            group = group._joined
        return group

    @property
    def has_others(self) -> bool:
        """Whether there is more than one result in it."""
        return len(self.whole._members) > 1

    def join(self, other: Group) -> Group:
        global _joins
        with _lock:
            small, large = sorted((self.whole, other.whole), key=lambda group: len(group._members))
            if small is not large:
                large._members.update(small._members)
                small._members.clear()
                small._joined = large
                _joins += 1
            return large


def group_of(received: ReceivedTensors) -> Group:
    """The group of results: of those that they build on, or that reach the same arguments."""
    group: Group | None = None
    for other in (
        *(reach.group for reach in received.builds_on),
        *(sent.group for sent in received.depends_on if sent.group is not None),
    ):
        group = other if group is None else group.join(other)
    return group or Group()


class Reach:
    """What results reach of what this node sent, for later results that are built on them.

    Kept until the worker says that nothing there leads into their graph any more.
    """

    def __init__(self, received: ReceivedTensors, group: Group) -> None:
        self.source = received.source
        self.peer = received.source.peer
        self.context = received.context
        self.group = group
        self.builds_on: Sequence[Reach] = received.builds_on
        self.token: torch.Tensor | None = None
        """An edge to it means: depends on all that is reached."""
        # Weakly: the worker says of each by itself when nothing there refers to it any more.
        self._arguments = [weakref.ref(sent) for sent in received.depends_on]
        self._received = weakref.ref(received)

    @property
    def received(self) -> ReceivedTensors | None:
        """The results, if they are part of a graph here."""
        return self._received()

    @property
    def arguments(self) -> list[SentArguments]:
        """Arguments that this node sent: those that only what these build on reaches are left out."""
        return [sent for reference in self._arguments if (sent := reference()) is not None]


def awaited_by(
    results: Iterable[ReceivedTensors], later: Container[ReceivedTensors | None] = ()
) -> list[SentArguments]:
    """The arguments that gradients for results reach, save what is only reached through those that have
    their turn later."""
    awaited: dict[SentArguments, None] = {}
    stack: list[Reach] = []
    for received in results:
        awaited.update(dict.fromkeys(received.depends_on))
        stack.extend(received.builds_on)
    seen = set(stack)
    while stack:
        reach = stack.pop()
        if reach.received in later:
            continue
        awaited.update(dict.fromkeys(reach.arguments))
        stack.extend(below for below in reach.builds_on if below not in seen)
        seen.update(reach.builds_on)
    return list(awaited)
