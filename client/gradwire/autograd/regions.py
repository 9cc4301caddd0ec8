"""What the graph on this node reaches, found without walking any of its nodes twice.

A walk goes from tensors that are about to be sent back to where the graph is known already. The nodes that
it finds first are a `Region`. Regions are to one another as their nodes are, so what a message reaches can
be read off them; only that two of the same walk may lead to each other: some nodes of the one lead to those
of the other, and those to the rest of the one. Nodes never change what they lead to, so what was found once
stays true.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from gradwire.autograd.edges import edge_of
from gradwire.autograd.nodes import is_leaf_node, is_token_node, received_of
from gradwire.autograd.records import ReceivedTensors
from gradwire.wire.ids import AutogradMessageId, ContextId

__all__ = ["Name", "Reached", "Regions"]


class Name:
    """Results as the name of the graph that they lead into, for results that are sent later.

    Every region of that graph refers to it. When the last one goes, the receiver is told to forget the name.
    """

    def __init__(self, id: AutogradMessageId, context: ContextId, peer: int) -> None:
        self.id = id
        self.context = context
        self.peer = peer
        self.order = 0
        """Counts up: what has a name leads only to what has the same or an earlier one."""
        self.parts = 0
        """How many of the regions that have this name lead to other nodes."""
        self.is_usable = False
        """Whether everything that the graph reaches is the receiver's own, so that it can follow."""
        self.is_known = False
        """Whether the receiver has said that it received it."""


class Region:
    """The nodes that a walk found first. It lives as long as one of them does."""

    __slots__ = ("_received", "below", "name")

    def __init__(self) -> None:
        self._received: list[weakref.ref[ReceivedTensors]] = []
        self.below: dict[Region, None] = {}
        self.name: Name | None = None
        """The first results that lead here, if results do."""

    def add(self, node: Any) -> None:
        received = received_of(node)
        if received is not None and (received.are_arguments or received.foreign):
            # Weakly: the graph of this region may lose the node, and then its message is to be released.
            self._received.append(weakref.ref(received))

    @property
    def is_part(self) -> bool:
        """Whether it led to other nodes when it was found."""
        return bool(self._received)

    @property
    def received(self) -> Iterator[ReceivedTensors]:
        """The records in it that lead to other nodes."""
        return (record for reference in self._received if (record := reference()) is not None)

    def skipped(self) -> Region:
        """The first region from here down that says something of its own.

        Else each of many calls in a row would be a step on the way to what the first one reached.
        """
        region, passed = self, {self}
        while not region.is_part and region.name is None and len(region.below) == 1:
            (below,) = region.below
            if below in passed:
                break  # a circle, which leads to nothing else
            passed.add(below)
            region = below
        return region


@dataclass(frozen=True, slots=True)
class Reached:
    """What tensors reach that are about to be sent."""

    messages: Sequence[AutogradMessageId]
    builds_on: Sequence[AutogradMessageId] = ()
    """Names that stand for more of it."""


def _within(name: Name, regions: Sequence[Region]) -> list[Region]:
    """All regions of a name that some of them lead to."""
    found = dict.fromkeys(regions)
    stack = list(regions)
    while stack:
        further = [below for below in stack.pop().below if below.name is name and below not in found]
        found.update(dict.fromkeys(further))
        stack += further
    return list(found)


class Regions:
    """The regions of a node's graph."""

    def __init__(self, node: int) -> None:
        self._node = node
        self._key = f"gradwire.region.{node:016x}"
        self._counter = itertools.count(1)
        # A walk must not come upon a region that another one has not finished.
        self._lock = threading.Lock()

    def reached_by(self, tensors: Sequence[torch.Tensor], peer: int) -> list[AutogradMessageId]:
        """The messages of other nodes that tensors reach which are about to go to a peer."""
        with self._lock:
            return self._messages(self._walk(tensors), peer)

    def name(
        self, tensors: Sequence[torch.Tensor], name: Name, own_call: AutogradMessageId | None
    ) -> Reached:
        """The same for results, which from now on are a name for what they reach.

        What earlier results are a name for that the peer knows, those stand for. Results that have nothing in
        common with others get no name: most functions keep nothing. Later ones that lead here after all say
        what is reached one by one.
        """
        with self._lock:
            region = self._walk(tensors)
            if not region.below and all(record.source == own_call for record in region.received):
                return Reached(self._messages(region, name.peer))
            name.order = next(self._counter)
            below: dict[Name, None] = {}
            received: list[ReceivedTensors] = []
            for reached in self._claim(region, name, below):
                received.extend(reached.received)
            # A name stands for messages of one context: gradients that are gathered for one context must not
            # wait for those of another.
            its_own = all(
                record.is_known_to(name.peer) and record.context == name.context for record in received
            )
            name.is_usable = (
                its_own
                and name.peer != self._node
                and all(
                    other.is_usable and other.peer == name.peer and other.context == name.context
                    for other in below
                )
            )
            if not name.is_usable:
                return Reached(self._messages(region, name.peer))
            if all(other.is_known for other in below):
                messages = list(dict.fromkeys(record.source for record in received if record.are_arguments))
            else:
                messages = self._messages(region, name.peer)
            return Reached(messages, [other.id for other in below])

    def _claim(self, region: Region, name: Name, below: dict[Name, None]) -> list[Region]:
        """Gives the name to what has none yet, from a region down. All regions that other names do not stand
        for; those names go into `below`."""
        found: list[Region] = []
        touched: dict[Name, list[Region]] = {}
        stack = [region]
        while stack:
            reached = stack.pop()
            if reached.name is None:
                reached.name = name
                name.parts += reached.is_part
                found.append(reached)
                stack.extend(reached.below)
            elif reached.name is not name:
                touched.setdefault(reached.name, []).append(reached)
        # Latest first: when it is the turn of a name, all that leads to it was looked at.
        names = [(-other.order, other) for other in touched]
        heapq.heapify(names)
        while names:
            other = heapq.heappop(names)[1]
            reached_of_it = _within(other, touched[other])
            if sum(reached.is_part for reached in reached_of_it) == other.parts:
                below[other] = None
                continue
            # The name would say too much: more leads to what it is a name for than is reached here.
            found += reached_of_it
            for further in {region for reached in reached_of_it for region in reached.below}:
                if further.name is not None and further.name is not other:
                    if further.name not in touched:
                        heapq.heappush(names, (-further.name.order, further.name))
                    touched.setdefault(further.name, []).append(further)
        return found

    def _walk(self, tensors: Sequence[torch.Tensor]) -> Region:
        found = [Region()]
        todo: list[tuple[Region, list[Any]]] = [(found[0], [edge_of(t).node for t in tensors])]
        while todo:
            region, stack = todo.pop()
            while stack:
                node = stack.pop()
                if is_leaf_node(node):
                    continue
                # With the node, not beside it: what Python sees of a node comes and goes.
                metadata = node.metadata
                known: Region | None = metadata.get(self._key)
                if known is None:
                    following = [further for further, _ in node.next_functions if further is not None]
                    if is_token_node(node):
                        # Of all that a result depends on, another may depend on a part.
                        known = metadata[self._key] = Region()
                        found.append(known)
                        todo.append((known, following))
                    else:
                        metadata[self._key] = region
                        region.add(node)
                        stack += following
                        continue
                if known is not region:
                    region.below[known] = None
        for region in found:
            region.below = dict.fromkeys(below.skipped() for below in region.below)
        return found[0]

    def _messages(self, region: Region, peer: int) -> list[AutogradMessageId]:
        reached: dict[AutogradMessageId, None] = {}
        stack, seen = [region], {region}
        while stack:
            region = stack.pop()
            for received in region.received:
                if received.are_arguments:
                    reached[received.source] = None
                if not received.is_known_to(peer):
                    reached.update(dict.fromkeys(received.foreign))
            stack.extend(below for below in region.below if below not in seen)
            seen.update(region.below)
        # What this node sent is in its own graph, where the walk has gone on; but one who calls itself is
        # told what it sent.
        return [id for id in reached if id.peer != self._node or peer == self._node]
