"""A backward on a worker that is suspended until the gradients of earlier results come.

The backward has one root: a chain of barriers, one for each result, latest first. A barrier waits for the
gradient of its result, and then lets a send node of the result bring it into the graph. PyTorch's engine does
the rest: where the graphs of two results meet, it goes on when both gradients are in. Barriers have the
lowest priority of all nodes, so when a barrier begins to wait, everything that follows from the gradients so
far is done, and the request that brought them gets its response.
"""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any

import torch

from gradwire.autograd.gradients import Gradients
from gradwire.autograd.graph import TOKEN, nodes_from
from gradwire.autograd.graph_tasks import BackwardRun, current_task
from gradwire.autograd.records import GradientsToReturn, SentResults
from gradwire.errors import Cancelled
from gradwire.runtime.scope import waiting
from gradwire.system.threads import DaemonThreads
from gradwire.torch_internals import input_metadata, set_sequence_number
from gradwire.transport.base import ServerCall
from gradwire.wire.ids import AutogradMessageId

__all__ = ["SuspendedBackward"]

Items = Sequence[tuple[SentResults, Gradients]]

_LIVENESS_SECONDS = 1.0
"""How often a backward that waits checks that its requester is still there."""


class SuspendedBackward:
    """A backward whose gradients come in several requests. It runs on a thread of its own."""

    def __init__(self, run: BackwardRun, first_call: ServerCall) -> None:
        self._run = run
        self._first_call = first_call
        """Cancelling it cancels what the backward requests of others."""
        self._requests: SimpleQueue[tuple[Items, Future[None]] | Cancelled] = SimpleQueue()
        """Gradients that the backward has not taken yet, or why it is given up."""
        self._done: Future[None] = Future()
        """To be settled when all is done that follows from the gradients that it took last."""
        self._lowest = float("inf")
        """The number of the earliest result among those that it took last. Of this one and those after it,
        all gradients have come that will."""

    def root(self, results: Sequence[SentResults]) -> torch.Tensor | None:
        """The root of a backward with a barrier for each result, latest first; None if it cannot be
        suspended."""
        root: Any = TOKEN
        with torch.enable_grad():
            for sent in sorted(results, key=lambda sent: sent.id.number):
                if sent.as_arguments is None:
                    return None
                root = root + sent.as_arguments.token
                root.grad_fn.register_prehook(partial(self._wait_for, sent.id.number))
                set_sequence_number(root.grad_fn, 0)
        return root if _runs_on_one_thread(root) else None

    # -- for the threads that bring requests

    def start(self, id: AutogradMessageId, backward: Callable[[], None]) -> None:
        """Runs the backward on a thread of its own, with the context variables of the caller."""
        self._end = DaemonThreads("gradwire-suspended").submit(contextvars.copy_context().run, backward)
        self._run.engine.suspended[id] = self
        self._end.add_done_callback(partial(self._run.engine.suspended.pop, id))

    def add(self, items: Items, server_call: ServerCall) -> tuple[list[GradientsToReturn], bool]:
        """Adds gradients, and returns when all that follows from them is done; without gradients, no more
        come. The contributions, and whether the backward is suspended until more gradients come."""
        done: Future[None] = Future()
        self._requests.put((items, done))
        server_call.when_cancelled(self.give_up)
        wait([done, self._end], return_when=FIRST_COMPLETED)
        if not done.done():
            self._end.result()
        contributions, self._run.contributions = self._run.contributions, []
        return contributions, done.done()

    def give_up(self, why: str = "its requester cancelled it") -> None:
        """The requester does not want the rest: the backward is cancelled when it waits next."""
        self._requests.put(Cancelled(f"the suspended backward has ended: {why}"))
        self._first_call.cancel()

    # -- for the thread of the backward

    def _wait_for(self, number: int, _: object) -> None:
        """What the barrier of a result does: waits until the gradient has come, or does not come any more."""
        while number < self._lowest:
            current_task().wait_for_requests()
            self._run.check_fresh()
            if not self._done.done():
                self._done.set_result(None)
            # Nothing is computed meanwhile, so others may change parameters.
            waiting(self._take_request)
            self._run.check_fresh()

    def _take_request(self) -> None:
        try:
            request = self._requests.get(timeout=_LIVENESS_SECONDS)
        except Empty:
            link = self._first_call.link
            if link is None or link.ended is not None or self._run.is_over():
                self.give_up("its requester is gone, or the backward that it is part of is over")
            return
        if isinstance(request, Cancelled):
            raise request
        items, self._done = request
        self._lowest = min(sent.id.number for sent, _ in items)
        task = current_task()
        for sent, gradients in items:
            if sent.check_fresh is not None:
                self._run.checks.append(sent.check_fresh)
            if sent.as_arguments is not None:
                task.await_contributions([sent.as_arguments])
                sent.as_arguments.put(task.id, gradients)


def _runs_on_one_thread(root: torch.Tensor) -> bool:
    """Whether the engine runs all nodes on one thread, and barriers last of all.

    Each device has its own engine thread, which may hand work to this one; a waiting barrier would block that
    work.
    """
    return not torch.accelerator.is_available() or all(
        made.device.type == "cpu" for node in nodes_from([root]) for made in input_metadata(node)
    )
