"""What the graph on this peer depends on, found without walking any of its nodes twice.

A walk goes from tensors that are about to be sent back to where the graph is known already. The nodes that it
finds first are a `GraphSegment`. GraphA segment has another below it if one of its nodes leads to a node of
the other. So the messages that a tensor depends on can be read from the segments. Segments of one walk may
form a circle. Nodes never change what they lead to, so a segment stays correct.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from gradwire.autograd.graph import edge_of, is_leaf_node, is_token_node
from gradwire.autograd.records import ReceivedTensors
from gradwire.wire.ids import AutogradMessageId, ContextId

__all__ = ["GraphSegments", "SegmentHandle"]


class SegmentHandle:
    """Results as the name of the part of the graph that they lead into, for results that are sent later.

    Every segment of that part refers to the handle. When the last segment goes, the receiver of the results
    is told to forget the handle.
    """

    def __init__(self, id: AutogradMessageId, context: ContextId, peer: int) -> None:
        self.id = id
        self.context = context
        self.peer = peer
        self.is_usable = False
        """Whether the receiver itself sent every message that the results depend on, so that it can
        follow."""
        self.is_known = False
        """Whether the receiver has said that it received the results."""


class GraphSegment:
    """The nodes that a walk found first. It lives as long as one of them does."""

    __slots__ = ("_received", "below", "handle")

    def __init__(self) -> None:
        # Weakly: the graph may lose a recv node, and then its message is to be released.
        self._received: list[weakref.ref[ReceivedTensors]] = []
        self.below: dict[GraphSegment, None] = {}
        self.handle: SegmentHandle | None = None
        """Of the first results that lead here, if results do."""

    def add(self, received: ReceivedTensors | None) -> None:
        """Adds the received tensors of a recv node; None for any other node."""
        if received is not None and (received.are_arguments or received.foreign):
            self._received.append(weakref.ref(received))

    @property
    def has_messages(self) -> bool:
        """Whether it depended on messages of other peers when it was found."""
        return bool(self._received)

    @property
    def received(self) -> Iterator[ReceivedTensors]:
        """The received tensors in it that depend on messages of other peers."""
        return (received for reference in self._received if (received := reference()) is not None)

    def first_informative(self) -> GraphSegment:
        """The first segment from here down that has messages, a handle, or more than one segment below.

        Without this, a chain of T calls would be T segments long.
        """
        segment, passed = self, {self}
        while not segment.has_messages and segment.handle is None and len(segment.below) == 1:
            (below,) = segment.below
            if below in passed:
                break  # a circle, which leads to nothing else
            passed.add(below)
            segment = below
        return segment


class Dependencies(NamedTuple):
    """What tensors depend on that are about to be sent."""

    messages: Sequence[AutogradMessageId]
    builds_on: Sequence[AutogradMessageId] = ()
    """Handles that stand for more of it."""


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
            return self._messages(self._walk(tensors), peer)

    def dependencies_of_results(
        self, tensors: Sequence[torch.Tensor], handle: SegmentHandle, own_call: AutogradMessageId | None
    ) -> Dependencies:
        """What results depend on. `handle` becomes the name of the part of the graph that they lead into.

        Where the peer knows an earlier handle, that handle is named instead of the messages behind it.
        Results that share nothing with others get no handle, since most functions keep nothing; if later
        results lead there after all, the messages are named one by one.
        """
        with self._lock:
            segment = self._walk(tensors)
            if segment.below or any(received.source != own_call for received in segment.received):
                found, below = self._claim(segment, handle)
                received = [record for part in found for record in part.received]
                handle.is_usable = self._is_usable(handle, received, below)
                if handle.is_usable and all(other.is_known for other in below):
                    own = dict.fromkeys(record.source for record in received if record.are_arguments)
                    return Dependencies(list(own), [other.id for other in below])
                if handle.is_usable:
                    return Dependencies(self._messages(segment, handle.peer), [other.id for other in below])
            return Dependencies(self._messages(segment, handle.peer))

    def _is_usable(
        self, handle: SegmentHandle, received: Sequence[ReceivedTensors], below: Sequence[SegmentHandle]
    ) -> bool:
        # A handle stands for messages of one context: gradients that are gathered for one context must not
        # wait for those of another.
        return (
            handle.peer != self._peer
            and all(one.is_known_to(handle.peer) and one.context == handle.context for one in received)
            and all(
                other.is_usable and other.peer == handle.peer and other.context == handle.context
                for other in below
            )
        )

    def _claim(
        self, segment: GraphSegment, handle: SegmentHandle
    ) -> tuple[list[GraphSegment], list[SegmentHandle]]:
        """Gives the handle to segments that have none yet, from a segment down.

        Returns the segments that got this handle, and the earlier handles met on the way.
        """
        found: list[GraphSegment] = []
        earlier: dict[SegmentHandle, None] = {}
        stack = [segment]
        while stack:
            reached = stack.pop()
            if reached.handle is None:
                reached.handle = handle
                found.append(reached)
                stack.extend(reached.below)
            elif reached.handle is not handle:
                earlier[reached.handle] = None
        return found, list(earlier)

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
                        segment.add(metadata.get("gradwire.received"))
                        stack += following
                        continue
                    # A token node starts a segment of its own: another result may depend on that token alone.
                    known = metadata[self._key] = GraphSegment()
                    found.append(known)
                    todo.append((known, following))
                if known is not segment:
                    segment.below[known] = None
        for segment in found:
            segment.below = dict.fromkeys(below.first_informative() for below in segment.below)
        return found[0]

    def _messages(self, segment: GraphSegment, peer: int) -> list[AutogradMessageId]:
        reached: dict[AutogradMessageId, None] = {}
        stack, seen = [segment], {segment}
        while stack:
            segment = stack.pop()
            for received in segment.received:
                if received.are_arguments:
                    reached[received.source] = None
                if not received.is_known_to(peer):
                    reached.update(dict.fromkeys(received.foreign))
            stack.extend(below for below in segment.below if below not in seen)
            seen.update(segment.below)
        # Own messages are left out, because the walk went through their send nodes. They are kept if the peer
        # calls itself.
        return [id for id in reached if id.peer != self._peer or peer == self._peer]
