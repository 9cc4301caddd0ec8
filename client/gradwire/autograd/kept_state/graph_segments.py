"""What the graph on this peer depends on, found without walking any of its nodes twice.

A walk goes from tensors that are about to be sent back to where the graph is known already. The nodes that it
finds first are a `GraphSegment`. A segment has another below it if one of its nodes leads to a node of
the other. So the messages that a tensor depends on can be read from the segments. Segments of one walk may
form a circle. Nodes never change what they lead to, so a segment stays correct.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradwire.autograd.graph import edge_of, is_leaf_node, is_token_node
from gradwire.autograd.records import ReceivedTensors
from gradwire.wire.ids import AutogradMessageId, ContextId

__all__ = ["GraphSegments", "SegmentHandle"]


@dataclass(slots=True, eq=False, weakref_slot=True)
class SegmentHandle:
    """Results as the name of the part of the graph that they lead into, for results that are sent later.

    Every segment of that part refers to the handle. When the last segment goes, the receiver of the results
    is told to forget the handle. (So the handle is no segment itself: it would keep itself alive.)
    """

    id: AutogradMessageId
    context: ContextId
    peer: int
    is_usable: bool = False
    """Whether the receiver itself sent every message that the results depend on, so that it can follow."""
    is_known: bool = False
    """Whether the receiver has said that it received the results."""


class GraphSegment:
    """The nodes that a walk found first. It lives as long as one of them does."""

    __slots__ = ("below", "handle", "references")

    def __init__(self) -> None:
        # Weakly: the graph may lose a recv node, and then its message is to be released.
        self.references: list[weakref.ref[ReceivedTensors]] = []
        """To received tensors in it that depend on messages of other peers."""
        self.below: dict[GraphSegment, None] = {}
        self.handle: SegmentHandle | None = None
        """Of the first results that lead here, if results do."""

    @property
    def received(self) -> Iterator[ReceivedTensors]:
        """Those that still exist."""
        return (received for reference in self.references if (received := reference()) is not None)

    @property
    def stand_in(self) -> GraphSegment:
        """The segment below, if there is nothing else to it. Without this, a chain of T calls would be T
        segments long."""
        if self.references or self.handle is not None or len(self.below) != 1:
            return self
        return next(iter(self.below))


class GraphSegments:
    """The segments of a peer's graph."""

    def __init__(self, peer: int) -> None:
        self._peer = peer
        self._key = f"gradwire.segment.{peer:016x}"
        # A walk must not come upon a segment that another walk has not finished.
        self._lock = threading.Lock()

    def reached_by(self, tensors: Sequence[torch.Tensor], peer: int) -> list[AutogradMessageId]:
        """The messages of other peers that `tensors` depend on. They are about to be sent to `peer`."""
        with self._lock:
            return self._messages(_all_from(self._walk(tensors)), peer)

    def dependencies_of_results(
        self, tensors: Sequence[torch.Tensor], handle: SegmentHandle, own_call: AutogradMessageId | None
    ) -> tuple[list[AutogradMessageId], list[AutogradMessageId]]:
        """The messages that results depend on, and earlier handles that stand for more of it. `handle`
        becomes the name of the part of the graph that they lead into.

        Where the peer knows all earlier handles, the messages behind those are not named. Results that share
        nothing with others get no handle, since most functions keep nothing; if later results lead there
        after all, the messages are named one by one.
        """
        with self._lock:
            segment = self._walk(tensors)
            named: Iterable[GraphSegment] = _all_from(segment)
            earlier: list[SegmentHandle] = []
            if segment.below or any(received.source != own_call for received in segment.received):
                claimed, earlier = _claim(segment, handle)
                handle.is_usable = self._is_usable(handle, claimed, earlier)
                if not handle.is_usable:
                    earlier = []
                elif all(other.is_known for other in earlier):
                    named = claimed
            return self._messages(named, handle.peer), [other.id for other in earlier]

    def _is_usable(
        self, handle: SegmentHandle, claimed: Iterable[GraphSegment], earlier: Iterable[SegmentHandle]
    ) -> bool:
        # A handle stands for messages of one context: gradients that are gathered for one context must not
        # wait for those of another.
        place = handle.peer, handle.context
        received = (received for segment in claimed for received in segment.received)
        return (
            handle.peer != self._peer
            and all(one.are_arguments and (one.source.peer, one.context) == place for one in received)
            and all(other.is_usable and (other.peer, other.context) == place for other in earlier)
        )

    def _walk(self, tensors: Sequence[torch.Tensor]) -> GraphSegment:
        found = [GraphSegment()]
        todo: list[tuple[GraphSegment, list[Any]]] = [(found[0], [edge_of(t).node for t in tensors])]
        while todo:
            segment, stack = todo.pop()
            while stack:
                node = stack.pop()
                if is_leaf_node(node):
                    continue
                # With the node, not beside it: what Python sees of a node comes and goes.
                metadata = node.metadata
                known: GraphSegment | None = metadata.get(self._key)
                if known is None:
                    following = [further for further, _ in node.next_functions if further is not None]
                    if not is_token_node(node):
                        metadata[self._key] = segment
                        received: ReceivedTensors | None = metadata.get("gradwire.received")
                        if received is not None and received.is_live:
                            segment.references.append(weakref.ref(received))
                        stack += following
                        continue
                    # A token node starts a segment of its own: another result may depend on that token alone.
                    known = metadata[self._key] = GraphSegment()
                    found.append(known)
                    todo.append((known, following))
                if known is not segment:
                    segment.below[known] = None
        for segment in reversed(found):
            segment.below = dict.fromkeys(below.stand_in for below in segment.below)
        return found[0]

    def _messages(self, segments: Iterable[GraphSegment], peer: int) -> list[AutogradMessageId]:
        """The messages in segments, as far as `peer` cannot find them by itself."""
        reached: dict[AutogradMessageId, None] = {}
        for received in (received for segment in segments for received in segment.received):
            if received.are_arguments:
                reached[received.source] = None
            if not received.is_known_to(peer):
                reached.update(dict.fromkeys(received.foreign))
        # Own messages are left out, because the walk went through their send nodes. They are kept if the peer
        # calls itself.
        return [id for id in reached if id.peer != self._peer or peer == self._peer]


def _all_from(segment: GraphSegment) -> Iterator[GraphSegment]:
    """A segment, and all that are reached from it."""
    stack, seen = [segment], {segment}
    while stack:
        segment = stack.pop()
        yield segment
        stack.extend(below for below in segment.below if below not in seen)
        seen.update(segment.below)


def _claim(segment: GraphSegment, handle: SegmentHandle) -> tuple[list[GraphSegment], list[SegmentHandle]]:
    """Gives the handle to segments that have none yet, from a segment down.

    Returns the segments that got this handle, and the earlier handles met on the way.
    """
    claimed: list[GraphSegment] = []
    earlier: dict[SegmentHandle, None] = {}
    stack = [segment]
    while stack:
        reached = stack.pop()
        if reached.handle is None:
            reached.handle = handle
            claimed.append(reached)
            stack.extend(reached.below)
        elif reached.handle is not handle:
            earlier[reached.handle] = None
    return claimed, list(earlier)
