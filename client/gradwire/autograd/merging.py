"""Sending gradients together that meet in a common graph on the worker.

A worker that keeps state from call to call has one graph for all of their results. If the gradient of each
result went back through it alone, T calls would cost T runs of up to T steps. So a graph task gathers the
gradients of a `Group`, and sends them in one request when the last of them is there: the worker runs its
graph once.

A send node may need contributions before that: where the arguments of a call were computed from the result
of the one before. Then what is there goes, and says what is still to come, and the worker holds its run
open: its engine keeps the gradients where the graph meets, and goes on when the others come. A response never
waits for gradients that were not sent yet, so nobody can wait for one another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence, Set
from typing import TYPE_CHECKING

import torch

from gradwire.autograd.groups import Group, joins
from gradwire.autograd.propagating import Batch, HeldElsewhere, Propagation
from gradwire.autograd.records import Gradients, ReceivedTensors

if TYPE_CHECKING:
    from gradwire.autograd.graph_tasks import GraphTaskState

__all__ = ["Merge", "Merges"]


class Merges:
    """Those of one graph task."""

    def __init__(self) -> None:
        self._by_group: dict[Group, list[Merge]] = {}
        self._joins = joins()

    def __bool__(self) -> bool:
        return bool(self._by_group)

    def __iter__(self) -> Iterator[Merge]:
        return (merge for merges in self._by_group.values() for merge in merges)

    def of(self, group: Group) -> Sequence[Merge]:
        """Those for a group. More than one only if groups became one meanwhile."""
        if self._joins != joins():
            self._joins = joins()
            merges, self._by_group = list(self), {}
            for merge in merges:
                self._by_group.setdefault(merge.group.whole, []).append(merge)
        return self._by_group.get(group.whole, ())

    def expecting(self, received: ReceivedTensors, group: Group) -> Merge:
        """The one that gathers the gradients of a result."""
        others = self.of(group)
        for merge in others:
            if received in merge.members:
                return merge
        merge = Merge(group, {member for other in others for member in other.members})
        self._by_group.setdefault(group.whole, []).append(merge)
        return merge

    def clear(self) -> None:
        self._by_group.clear()


class Merge:
    """The gradients of one graph task for the results of one group."""

    def __init__(self, group: Group, others: Set[ReceivedTensors]) -> None:
        self.group = group
        self.members = frozenset(r for r in group.members if r not in others and _will_fire(r))
        self._to_fire = set(self.members)
        self._gathered: list[tuple[ReceivedTensors, Gradients]] = []
        self._held: HeldElsewhere | None = None
        self._last: Propagation | None = None
        """What went to the run that is held open, last."""

    def add(self, received: ReceivedTensors, gradients: Gradients, task: GraphTaskState) -> None:
        """The recv node of a result ran."""
        self._to_fire.discard(received)
        self._gathered.append((received, gradients))
        if not self._to_fire:
            self.flush(task, may_wait=False)

    def pass_by(self, received: ReceivedTensors, task: GraphTaskState) -> None:
        """It ran without a gradient."""
        if self._held is not None and received in self._held.to_come:
            # Contributions to what it depends on wait for this.
            self.add(received, [None] * received.arity, task)
        else:
            self._to_fire.discard(received)
            if not self._to_fire:
                self.flush(task, may_wait=False)

    def flush(self, task: GraphTaskState, *, may_wait: bool) -> None:
        """Sends what was gathered."""
        if not self._gathered:
            return
        if self._last is not None and self._held is not None:
            # One after the other, or they could overtake one another.
            if not (self._last.is_settled or may_wait):
                return
            self._last.wait()
            if not self._held.is_open:
                self._held = None  # the worker went through to the end at once
        gathered, self._gathered = self._gathered, []
        if self._held is None:
            self._start(gathered, task)
            return
        expected = [item for item in gathered if item[0] in self._held.to_come]
        others = [item for item in gathered if item[0] not in self._held.to_come]
        if expected:
            self._go_on(expected, self._held, task)
        for item in others:
            task.send(Batch([item], like=item[0]))

    def _start(self, gathered: list[tuple[ReceivedTensors, Gradients]], task: GraphTaskState) -> None:
        like = gathered[0][0]
        first = min(received.source.number for received, _ in gathered)
        # Only earlier results, since the worker takes them in descending order: nothing that was sent may
        # wait for what was not.
        to_come = [
            received
            for received in self._to_fire
            if received.source.number < first and received.context == like.context
        ]
        if not to_come:
            task.send(Batch(gathered, like=like))
            return
        self._held = HeldElsewhere(like.engine.new_id(), like, set(to_come))
        self._last = task.send(Batch(gathered, like=like, held=self._held, announced=to_come))

    def _go_on(
        self, expected: list[tuple[ReceivedTensors, Gradients]], held: HeldElsewhere, task: GraphTaskState
    ) -> None:
        first = min(received.source.number for received, _ in expected)
        later = [received for received in held.to_come if received.source.number >= first]
        held.to_come.difference_update(later)
        self._last = task.send(Batch(expected, like=expected[0][0], held=held, not_awaited=later))
        if not held.to_come:
            self._held = None

    def finish(self, task: GraphTaskState) -> None:
        """At the end of the graph task: nothing more comes."""
        self.flush(task, may_wait=True)
        held, self._held = self._held, None
        if held is None or self._last is None:
            return
        self._last.wait()
        if held.is_open:
            # For results that were asked for themselves: the engine captures such, and does not run them.
            later, held.to_come = list(held.to_come), set()
            task.send(Batch([], like=held.like, held=held, not_awaited=later))

    def abandon(self) -> None:
        """The graph task failed."""
        held, self._held = self._held, None
        self._gathered.clear()
        if held is not None:
            held.like.engine.give_up(held.like, held.id)


def _will_fire(received: ReceivedTensors) -> bool:
    """Whether a gradient may come for a result in this graph task."""
    if received.is_spent:
        return False  # its recv node may run, but without a gradient, and the worker has let go of it
    node = None if received.node is None else received.node()
    return node is not None and torch._C._will_engine_execute_node(node)
