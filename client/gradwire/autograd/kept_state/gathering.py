"""Sends gradients in one request if they meet in one graph on the worker.

A graph task gathers the gradients of a `ResultGroup`, and sends them in one request when the last of
them is there: the worker runs its graph once.

A send node may need contributions before that: where the arguments of a call were computed from the result of
the call before. Then the gradients that are there go, with the names of the results whose gradients are still
to come, and the worker suspends its backward until those come (`suspended`). A response never waits for
gradients that were not sent yet, so no two peers can wait for one another.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from gradwire.autograd.gradients import Gradients
from gradwire.autograd.kept_state.remote_segments import RemoteGraphSegment, ResultGroup, arguments_behind
from gradwire.autograd.propagating import GradientsToSend, Propagation
from gradwire.autograd.records import GradientsToReturn, ReceivedTensors
from gradwire.torch_internals import will_engine_execute_node
from gradwire.wire.ids import AutogradMessageId

if TYPE_CHECKING:
    from gradwire.autograd.graph_tasks import GraphTaskState

__all__ = ["Gathering"]


class Gathering:
    """The gradients of one graph task for the results of one group."""

    def __init__(self, task: GraphTaskState, group: ResultGroup, representative: ReceivedTensors) -> None:
        self._task = weakref.proxy(task)
        self._representative = representative
        results = (reference() for reference in group.results.valuerefs())
        self._awaited = {result for result in results if result is not None and _will_run(result)}
        """Results whose recv nodes have not run yet."""
        self._gathered: list[GradientsToReturn] = []
        self._passed: set[RemoteGraphSegment] = set()
        """What lies behind the results whose gradients were gathered."""
        self._last: Propagation | None = None
        """The last request."""
        self._lowest = 0
        """The number of the earliest result in it. A suspended backward waits for results before that one."""

    def add(self, received: ReceivedTensors, gradients: Gradients | None) -> None:
        """The recv node of a result ran; None if it got no gradients."""
        if gradients is None and received not in self._awaited:
            return  # freed before, so that the worker has let go of it: nobody waits for it
        self._awaited.discard(received)
        suspended = self._suspended
        if suspended is not None and received.source.number >= self._lowest:
            if gradients is not None:  # it comes too late for the suspended backward
                self._task.send_alone(received, gradients)
        elif gradients is not None or suspended is not None:  # which need not wait for a result without
            self._task.await_contributions(arguments_behind(received, self._passed), self)
            self._gathered.append((received, gradients or [None] * len(received.metadata)))
        if not self._awaited:
            self.flush()

    @property
    def _suspended(self) -> AutogradMessageId | None:
        """The worker's suspended backward, as far as is known."""
        return None if self._last is None else self._last.suspended

    def flush(self) -> None:
        """Sends what was gathered, after the response to the request before: one could overtake another."""
        if not self._gathered:
            return
        if self._last is not None:
            self._last.wait()
        items, self._gathered = self._gathered, []
        suspended = self._suspended
        to_come: list[AutogradMessageId] = []
        self._lowest = min(received.source.number for received, _ in items)
        if suspended is None:
            # Only earlier results are announced: the worker goes from latest to earliest, so gradients that
            # were sent never wait for missing ones.
            to_come = [one.source for one in self._awaited if one.source.number < self._lowest]
            suspended = self._representative.engine.new_id() if to_come else None
        self._last = self._task.send(GradientsToSend(items, suspended, to_come))

    @property
    def is_settled(self) -> bool:
        """Whether waiting takes no time."""
        return not self._gathered and (self._last is None or self._last.is_settled)

    def wait(self) -> None:
        """Returns when the contributions of all that was gathered are with the sent arguments."""
        self.flush()
        if self._last is not None:
            self._last.wait()

    def finish(self) -> None:
        """At the end of the graph task: no gradients come for what is still awaited.

        Those are inputs of torch.autograd.grad: the engine captures their gradients without running their
        nodes.
        """
        for received in tuple(self._awaited):
            self.add(received, None)

    def abandon(self) -> None:
        """The graph task failed: tells the worker to give up the suspended backward."""
        received = self._representative
        if self._suspended is not None and received.link is not None:
            received.engine.releases.to(received.link).append(self._suspended)


def _will_run(received: ReceivedTensors) -> bool:
    """Whether a gradient may come for a result in this graph task. If it is freed, its recv node may run, but
    without a gradient, and the worker has let go of it."""
    node = None if received.node is None else received.node()
    return node is not None and not received.is_freed and will_engine_execute_node(node)
