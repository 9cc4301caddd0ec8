"""The plans of one link: the structure of calls that repeat is described once, and left out from then on.

A plan works like a prepared statement. The first calls of a function go in full, as the messages of the
contract. One of them gives its structure a number: the function and its modes, the containers among the
arguments, the dtype and shape of each tensor. Once its response has said that the number is kept, calls of
the same structure name the number, and bring only ids, scalars and the bytes of tensors. The structures of
results are numbered in the same way, for each plan by itself.

A number is never used again, and never means something else, so a request that is sent again after any time
still means the same. Both ends stop keeping new plans when those that they have take a certain amount of
memory; calls of other structures then go in full.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Hashable, Sequence

from gradwire.errors import MalformedMessage
from gradwire.proto.v1 import autograd_pb2

from .layouts import Flat, Layout, flatten

__all__ = ["MARK", "Plans", "ReceivedPlan", "SentPlan", "is_short"]

MARK = 0
"""The first byte of a body in short: no protobuf message begins with a zero byte."""

_MARK = bytes([MARK])
_MOST_BYTES = 8 * 1024 * 1024
"""Of all structures of a link together, as `_memory_of` estimates them."""
_LEAST_BYTES = 1200
"""Of one structure."""
_MOST_SEEN = _MOST_BYTES // _LEAST_BYTES
"""Of how many calls that were made once the hashes are kept: no more structures than that have room."""
_MOST_RESULTS = 16
"""How many structures of results a plan numbers: as many as there are bits in what a request says of them."""


def is_short(body: bytes) -> bool:
    """Whether a body has the short form, and is no protobuf message."""
    return body[:1] == _MARK


def _memory_of(structure: object) -> int:
    """The memory that it takes to keep a structure, as measured for the most costly ones: many that are
    empty, and lists within lists. Others take less."""
    return _LEAST_BYTES + 9 * len(repr(structure))


class SentPlan:
    """A plan of calls that this peer sends."""

    __slots__ = ("_results", "is_kept", "known_results", "layout", "number")

    def __init__(self, number: int, layout: Layout) -> None:
        self.number = number
        self.layout = layout
        self.is_kept = False
        """Whether the other peer has said that it keeps the plan."""
        self._results: dict[int, Layout] = {}
        """The structures of results that the other peer has numbered."""
        self.known_results = 0
        """Their numbers as bits: number 1 is the lowest."""

    def learn(self, plans: Plans, response: autograd_pb2.ForwardWithAutogradResponse, result: object) -> None:
        """Notes what a response in full says of the plan. `result` is its result."""
        if response.plan_is_kept:
            self.is_kept = plans.are_understood = True
        number = response.result_number
        if number and number not in self._results:
            flat = flatten([result])
            if flat is None or number > _MOST_RESULTS:
                raise MalformedMessage(f"a result cannot be number {number} of its plan")
            with plans.lock:
                if number not in self._results and plans.has_room(flat.key):
                    self._results[number] = Layout(1, flat)
                    self.known_results |= 1 << (number - 1)

    def result(self, number: int) -> Layout:
        """The structure of a result that came in short."""
        layout = self._results.get(number)
        if layout is None:
            raise MalformedMessage(f"there is no result {number} of the plan {self.number}")
        return layout


class ReceivedPlan:
    """A plan of calls that another peer sends."""

    __slots__ = ("_numbers", "_results", "layout", "names", "request")

    def __init__(
        self, request: autograd_pb2.ForwardWithAutogradRequest, layout: Layout, names: Sequence[str]
    ) -> None:
        self.request = request
        """What all calls have in common."""
        self.layout = layout
        self.names = names
        """Of the keyword arguments, which come after the others."""
        self._results: dict[tuple[Hashable, ...], tuple[int, Layout]] = {}
        self._numbers = iter(range(1, _MOST_RESULTS + 1))

    def result(self, plans: Plans, flat: Flat) -> tuple[int, Layout] | None:
        """The number and structure of a result; None if it has no number."""
        key = tuple(flat.key)
        found = self._results.get(key)
        if found is None:
            with plans.lock:
                found = self._results.get(key)
                if found is None and plans.has_room(key):
                    number = next(self._numbers, None)
                    if number is not None:
                        found = self._results[key] = number, Layout(1, flat)
        return found


class Plans:
    """Those of the calls that this peer sends over one link, and of those that it receives."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        """Guards what is added. Reentrant: a destructor, within any line, may make a call over the same link.
        So numbers are drawn from counters."""
        self.are_understood = False
        """Whether the other peer has shown that it knows plans, and so the short form."""
        self._sent: dict[tuple[Hashable, ...], SentPlan] = {}
        self._numbers = itertools.count(1)
        self._seen: set[int] = set()
        """The hashes of keys, which may be large. Two of one hash only mean a plan one call early."""
        self._received: dict[int, ReceivedPlan] = {}
        self._bytes = 0

    def has_room(self, structure: object) -> bool:
        """Whether one more structure, and what is kept with it, has room; counts it if so. The lock is
        held."""
        size = _memory_of(structure)
        if self._bytes + size > _MOST_BYTES:
            return False
        self._bytes += size
        return True

    def plan_for(self, key: tuple[Hashable, ...], values: int, flat: Flat) -> SentPlan | None:
        """The plan of a call, new if the call is of a kind that was made before; None if it has none."""
        plan = self._sent.get(key)
        if plan is None:
            with self.lock:
                plan = self._sent.get(key)
                if plan is None and hash(key) in self._seen and self.has_room(key):
                    plan = self._sent[key] = SentPlan(next(self._numbers), Layout(values, flat))
                    self._seen.discard(hash(key))
                elif plan is None:
                    if len(self._seen) == _MOST_SEEN:
                        self._seen.clear()
                    self._seen.add(hash(key))
        return plan

    def keep(
        self,
        request: autograd_pb2.ForwardWithAutogradRequest,
        names: Sequence[str],
        flat: Flat,
    ) -> ReceivedPlan | None:
        """Keeps what a call in full has in common with others that will name its plan. None if it cannot."""
        self.are_understood = True
        plan = self._received.get(request.plan)
        if plan is None:
            common = autograd_pb2.ForwardWithAutogradRequest(function=request.function)
            if request.HasField("target"):
                common.target.CopyFrom(request.target)
            if request.HasField("modes"):
                common.modes.CopyFrom(request.modes)
            layout = Layout(len(request.args) + len(names), flat)
            with self.lock:
                plan = self._received.get(request.plan)
                if plan is None and self.has_room((flat.key, names, common.SerializeToString())):
                    plan = self._received[request.plan] = ReceivedPlan(common, layout, names)
        return plan

    def received(self, number: int) -> ReceivedPlan:
        """The plan that a call names."""
        plan = self._received.get(number)
        if plan is None:
            raise MalformedMessage(f"there is no plan {number} here")
        return plan
