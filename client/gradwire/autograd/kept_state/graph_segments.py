"""What the graph on this peer depends on, found without walking any of its nodes twice.

A walk goes from tensors that are about to be sent back to where the graph is known already. The nodes that it
finds first are a `GraphSegment`; the known segments that it meets are below it. So the messages that a tensor
depends on can be read from the segments. They may be too many, because a segment stands for all of its nodes,
but never too few. Nodes never change what they lead to, so a segment stays correct.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradwire.autograd.graph import edge_of, is_leaf_node
from gradwire.autograd.passes import new_id
from gradwire.autograd.records import ReceivedTensors, SentResults
from gradwire.torch_internals import sequence_number, set_sequence_number
from gradwire.wire.ids import AutogradMessageId, ContextId

__all__ = ["GraphSegments", "SegmentHandle"]


@dataclass(slots=True, eq=False, weakref_slot=True)
class SegmentHandle:
    """Names the part of the graph that results lead into, for results that are sent later.

    Every segment of that part refers to the handle. When the last segment goes, the handle is released, so
    that the receiver of the results forgets it. (So it is no segment itself: it would keep itself alive.)
    """

    id: AutogradMessageId
    is_known: bool = False
    """Whether the receiver has released it: it says so when it has read the results that brought it."""


class GraphSegment:
    """The nodes that a walk found first. It lives as long as one of them does."""

    __slots__ = ("below", "handle", "places", "received")

    def __init__(self) -> None:
        # Weakly: the graph may lose a recv node, and then its message is to be released.
        self.received = weakref.WeakValueDictionary[AutogradMessageId, ReceivedTensors]()
        """Received tensors in it that depend on messages of other peers."""
        self.below: dict[GraphSegment, None] = {}
        self.places: set[tuple[int, ContextId] | None] = set()
        """The peers and contexts that all came from which is in it or below; None for what a third peer has
        part in."""
        self.handle: SegmentHandle | None = None
        """Of the first results that lead here, if results do."""

    @property
    def stand_in(self) -> GraphSegment:
        """The segment below, if there is nothing else to it. Without this, a chain of T calls would be T
        segments long."""
        if self.received or self.handle is not None or len(self.below) != 1:
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
            return self._messages(_reached_from(self._walk(tensors)), peer)

    def dependencies_of_results(
        self, sent: SentResults, tensors: Sequence[torch.Tensor], own_call: AutogradMessageId | None
    ) -> tuple[list[AutogradMessageId], list[AutogradMessageId], SegmentHandle | None]:
        """The messages that results depend on, handles of earlier results that stand for more of them, and
        the handle by which later results may name these.

        There is a handle only if the peer itself sent every message, in one context, so that it can follow:
        gradients that are gathered for one context must not wait for those of another. Results that share
        nothing with others get none either, since most functions keep nothing.

        Where the peer knows all earlier handles, the messages behind those are not named.
        """
        with self._lock:
            segment = self._walk(tensors)
            is_shared = segment.below or set(segment.received) - {own_call}
            place = sent.peer, sent.context
            if not is_shared or sent.peer == self._peer or not segment.places <= {place}:
                return self._messages(_reached_from(segment), sent.peer), [], None
            handle = SegmentHandle(new_id(self._peer))
            reached = _reached_from(segment, up_to_handles=True)
            earlier = {one.handle: None for one in reached if one.handle is not None}
            named = [one for one in reached if one.handle is None]
            for one in named:
                one.handle = handle
                one.places.add(place)
            if not all(other.is_known for other in earlier):
                named = _reached_from(segment)
            return self._messages(named, sent.peer), [other.id for other in earlier], handle

    def _walk(self, tensors: Sequence[torch.Tensor]) -> GraphSegment:
        segment = GraphSegment()
        stack: list[Any] = [edge_of(tensor).node for tensor in tensors]
        while stack:
            node = stack.pop()
            if is_leaf_node(node):
                continue
            # With the node, not beside it: what Python sees of a node comes and goes.
            metadata = node.metadata
            known: GraphSegment | None = metadata.get(self._key)
            if known is None:
                metadata[self._key] = segment
                if sequence_number(node) == 0:  # the first node that a thread makes; 0 is for barriers alone
                    set_sequence_number(node, 1)
                received: ReceivedTensors | None = metadata.get("gradwire.received")
                if received is not None and received.is_live:
                    segment.received[received.source] = received
                    place = (received.source.peer, received.context) if received.are_arguments else None
                    segment.places.add(place)
                stack += [further for further, _ in node.next_functions if further is not None]
            elif known is not segment:
                segment.below[known.stand_in] = None
                segment.places |= known.places
        return segment

    def _messages(self, segments: Iterable[GraphSegment], peer: int) -> list[AutogradMessageId]:
        """The messages in segments, as far as `peer` cannot find them by itself."""
        reached: dict[AutogradMessageId, None] = {}
        for received in (one for segment in segments for one in segment.received.values()):
            if received.are_arguments:
                reached[received.source] = None
            if not received.is_known_to(peer):
                reached.update(dict.fromkeys(received.foreign))
        # Own messages are left out, because the walk went through their send nodes. They are kept if the peer
        # calls itself.
        return [id for id in reached if id.peer != self._peer or peer == self._peer]


def _reached_from(segment: GraphSegment, *, up_to_handles: bool = False) -> list[GraphSegment]:
    """A segment, and all below it; if so wished, not what is below those that have a handle."""
    reached = {segment: None}
    stack = [segment]
    while stack:
        one = stack.pop()
        if one.handle is None or not up_to_handles:
            new = [below for below in one.below if below not in reached]
            reached.update(dict.fromkeys(new))
            stack += new
    return list(reached)
