"""Sends gradients in one request if they meet in one graph on the worker.

A graph task gathers the gradients of a `ResultGroup`, and sends them in one request when the last of
them is there: the worker runs its graph once.

A send node may need contributions before that: where the arguments of a call were computed from the result of
the call before. Then the gradients that are there go, with the names of the results whose gradients are still
to come, and the worker suspends its backward until those come (`suspended`). A response never waits for
gradients that were not sent yet, so no two peers can wait for one another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from gradwire.autograd.gradients import Gradients
from gradwire.autograd.kept_state.remote_segments import RemoteSuspendedBackward, ResultGroup
from gradwire.autograd.propagating import GradientsToSend, Propagation, ResultGradients
from gradwire.autograd.records import ReceivedTensors
from gradwire.torch_internals import will_engine_execute_node

if TYPE_CHECKING:
    from gradwire.autograd.graph_tasks import GraphTaskState

__all__ = ["Gathering", "Gatherings"]


class Gatherings:
    """The gatherings of one graph task."""

    def __init__(self) -> None:
        self._by_result: dict[ReceivedTensors, Gathering] = {}
        self._all: list[Gathering] = []

    def __bool__(self) -> bool:
        return bool(self._all)

    def __iter__(self) -> Iterator[Gathering]:
        return iter(self._all)

    def of(self, received: ReceivedTensors, group: ResultGroup) -> Gathering:
        """The gathering that takes the gradients of a result."""
        gathering = self._by_result.get(received)
        if gathering is None:
            # A second gathering of a group, if results joined it since the first was made.
            awaited = [r for r in group.members if r not in self._by_result and _will_run(r)]
            gathering = Gathering(group, awaited)
            self._all.append(gathering)
            self._by_result.update(dict.fromkeys([*awaited, received], gathering))
        return gathering

    def clear(self) -> None:
        self._by_result.clear()
        self._all.clear()


class Gathering:
    """The gradients of one graph task for the results of one group."""

    def __init__(self, group: ResultGroup, awaited: Iterable[ReceivedTensors]) -> None:
        self.group = group
        self._awaited = set(awaited)
        """Results whose recv nodes have not run yet."""
        self._gathered: list[ResultGradients] = []
        self._suspension: RemoteSuspendedBackward | None = None
        self._last: Propagation | None = None
        """The last request to the suspended backward."""

    def add(self, received: ReceivedTensors, gradients: Gradients | None, task: GraphTaskState) -> None:
        """The recv node of a result ran; None if it got no gradients."""
        self._awaited.discard(received)
        if gradients is None and self._suspension is not None and received in self._suspension.to_come:
            gradients = [None] * received.arity  # the suspended backward waits for them
        if gradients is not None:
            self._gathered.append((received, gradients))
        if not self._awaited:
            self.flush(task, may_wait=False)

    def flush(self, task: GraphTaskState, *, may_wait: bool) -> None:
        """Sends what was gathered."""
        if not self._gathered:
            return
        if self._last is not None and self._suspension is not None:
            # The requests to a suspended backward go one after the other, or they could overtake one another.
            if not (self._last.is_settled or may_wait):
                return
            self._last.wait()
            if not self._suspension.is_open:
                self._suspension = None  # the worker went through to the end at once
        gathered, self._gathered = self._gathered, []
        if self._suspension is None:
            self._start(gathered, task)
            return
        expected = [item for item in gathered if item[0] in self._suspension.to_come]
        alone = [item for item in gathered if item[0] not in self._suspension.to_come]
        if expected:
            self._resume(expected, self._suspension, task)
        for item in alone:
            task.send(GradientsToSend([item]))

    def _start(self, gathered: list[ResultGradients], task: GraphTaskState) -> None:
        # Only earlier results are announced: the worker goes from latest to earliest, so gradients that were
        # sent never wait for missing ones.
        first = min(received.source.number for received, _ in gathered)
        to_come = {received for received in self._awaited if received.source.number < first}
        if to_come:
            representative = gathered[0][0]
            self._suspension = RemoteSuspendedBackward(
                representative.engine.new_id(), representative, to_come
            )
        self._last = task.send(GradientsToSend(gathered, self._suspension, awaited_later=list(to_come)))

    def _resume(
        self, items: list[ResultGradients], suspension: RemoteSuspendedBackward, task: GraphTaskState
    ) -> None:
        """Sends gradients to the suspended backward; without any, it goes on to the end."""
        first = min((received.source.number for received, _ in items), default=0)
        no_longer_awaited = [received for received in suspension.to_come if received.source.number >= first]
        suspension.to_come.difference_update(no_longer_awaited)
        self._last = task.send(GradientsToSend(items, suspension, no_longer_awaited=no_longer_awaited))
        if not suspension.to_come:
            self._suspension = None

    def finish(self, task: GraphTaskState) -> None:
        """At the end of the graph task: nothing more comes."""
        self.flush(task, may_wait=True)
        if self._suspension is not None and self._last is not None:
            self._last.wait()
            if self._suspension.is_open:
                # Some results are inputs of torch.autograd.grad: the engine captures their gradients without
                # running their nodes.
                self._resume([], self._suspension, task)

    def abandon(self) -> None:
        """The graph task failed."""
        suspension, self._suspension = self._suspension, None
        self._gathered.clear()
        if suspension is not None:
            suspension.give_up()


def _will_run(received: ReceivedTensors) -> bool:
    """Whether a gradient may come for a result in this graph task."""
    if received.is_freed:
        return False  # its recv node may run, but without a gradient, and the worker has let go of it
    node = None if received.node is None else received.node()
    return node is not None and will_engine_execute_node(node)
