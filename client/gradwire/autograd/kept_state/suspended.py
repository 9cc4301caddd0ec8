"""A backward on a worker that is suspended until the gradients of earlier results come.

The backward has one root: a chain of barriers, one for each result, latest first. A barrier waits for the
gradient of its result, and then lets the result's `GradientInjector` bring it into the graph. PyTorch's
engine does the rest: where the graphs of two results meet, it goes on when both gradients are in. Barriers
have the lowest priority of all nodes, so when a barrier begins to wait, everything that follows from the
gradients so far is done, and the request that brought them gets its response.
"""

from __future__ import annotations

import contextvars
import math
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from functools import partial
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

import torch

from gradwire.autograd.gradients import Contributions, Gradients
from gradwire.autograd.graph import TOKEN, nodes_from
from gradwire.autograd.graph_tasks import BackwardRun, current_run, find_task
from gradwire.autograd.records import SentResults
from gradwire.errors import Cancelled
from gradwire.runtime.scope import waiting
from gradwire.system.threads import DaemonThreads, computing
from gradwire.torch_internals import current_graph_task_id, input_metadata, set_sequence_number
from gradwire.transport.base import ServerCall
from gradwire.wire.ids import AutogradMessageId

if TYPE_CHECKING:
    from gradwire.autograd.engine import DistEngine

__all__ = ["SuspendedBackward", "add_injector"]

Items = Sequence[tuple[SentResults, Gradients]]
Outcome = tuple[Contributions, bool]
"""What has been contributed, and whether the backward is suspended until more gradients come."""

_LIVENESS_SECONDS = 1.0
"""How often a backward that waits checks that its requester is still there."""


class GradientInjector(torch.autograd.Function):
    """forward: results -> token. backward: the gradients that came for them."""

    @staticmethod
    def forward(ctx: Any, id: AutogradMessageId, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.id = id
        ctx.arity = len(tensors)
        return TOKEN.data

    @staticmethod
    def backward(ctx: Any, *_token_gradient: Any) -> Any:
        run = current_run()
        gradients = None if run is None else run.to_inject.pop(ctx.id, None)
        return None, *(gradients or [None] * ctx.arity)


def add_injector(sent: SentResults, tensors: Sequence[torch.Tensor]) -> None:
    """Makes it possible to suspend a backward until the gradients of these results come."""
    sent.injector = GradientInjector.apply(sent.id, *tensors)  # type: ignore[no-untyped-call]


class SuspendedBackward:
    """A backward whose gradients come in several requests. It runs on a thread of its own."""

    def __init__(
        self, id: AutogradMessageId, engine: DistEngine, run: BackwardRun, first_call: ServerCall
    ) -> None:
        self.id = id
        self._engine = weakref.proxy(engine)
        self._run = run
        self._first_call = first_call
        """Cancelling it cancels what the backward requests of others."""
        self._requests: SimpleQueue[tuple[Items, Future[Outcome]] | None] = SimpleQueue()
        """Those that the backward has not taken yet. None only wakes it up."""
        self._taken: Future[Outcome] | None = None
        """The outcome of the last one that it took, until that is settled."""
        self._lowest: float = math.inf
        """The number of the earliest result in that one. No gradients come any more for results after it."""
        self._given_up: str | None = None

    def root(self, results: Sequence[SentResults]) -> torch.Tensor | None:
        """The root of a backward with a barrier for each result, latest first; None if it cannot be
        suspended."""
        root: Any = torch.zeros(())
        with torch.enable_grad():
            for sent in sorted(results, key=lambda sent: sent.id.number):
                if sent.injector is None:
                    return None
                root = root + sent.injector
                root.grad_fn.register_prehook(partial(self._wait_for, sent.id))
                set_sequence_number(root.grad_fn, 0)
        return root if _runs_on_one_thread(root) else None

    # -- for the threads that bring requests

    def start(self, backward: Callable[[], None]) -> None:
        """Runs the backward on a thread of its own, with the context variables of the caller."""
        self._engine.suspended[self.id] = self
        thread = DaemonThreads("gradwire-suspended")
        self._end = thread.submit(contextvars.copy_context().run, self._run_to_end, backward)

    def add(self, items: Items, server_call: ServerCall) -> Outcome:
        """Adds gradients, and returns when all that follows from them is done. Without gradients: no more
        come."""
        outcome: Future[Outcome] = Future()
        self._requests.put((items, outcome))
        take_back = server_call.when_cancelled(self.give_up)
        try:
            wait([outcome, self._end], return_when=FIRST_COMPLETED)
        finally:
            take_back()
        return outcome.result() if outcome.done() else self._end.result()

    def give_up(self, why: str = "its requester cancelled it") -> None:
        """The requester does not want the rest: the backward is cancelled at its next barrier."""
        self._given_up = self._given_up or why
        self._requests.put(None)
        self._first_call.cancel()

    # -- for the thread of the backward

    def _run_to_end(self, backward: Callable[[], None]) -> Outcome:
        try:
            with computing():
                backward()
        finally:
            self._engine.suspended.pop(self.id, None)
        return self._run.contributions, False

    def _wait_for(self, id: AutogradMessageId, _: object) -> None:
        """Waits until the gradient of a result has come, or does not come any more."""
        while not self._has_come(id):
            if self._taken is not None:
                self._settle(self._taken)
            # Nothing is computed meanwhile, so others may change parameters.
            waiting(self._take_request)
            self._run.check_fresh()

    def _has_come(self, id: AutogradMessageId) -> bool:
        if self._given_up is not None:
            raise Cancelled(f"the suspended backward has ended: {self._given_up}")
        return id in self._run.to_inject or id.number > self._lowest

    def _settle(self, outcome: Future[Outcome]) -> None:
        """All that follows from the gradients of a request is done: it is responded to."""
        task = find_task(current_graph_task_id())
        if task is not None:
            task.wait_for_requests()
        self._run.check_fresh()
        contributions, self._run.contributions = self._run.contributions, []
        self._taken = None
        outcome.set_result((contributions, True))

    def _take_request(self) -> None:
        try:
            request = self._requests.get(timeout=_LIVENESS_SECONDS)
        except Empty:
            link = self._first_call.link
            if link is None or link.ended is not None:
                self.give_up("its requester is gone")
            elif self._engine.passes.is_over(self._run.pass_id):
                self.give_up("the backward that it is part of is over")
            return
        if request is not None:
            items, self._taken = request
            self._run.to_inject.update((sent.id, gradients) for sent, gradients in items)
            self._run.checks += (sent.check_fresh for sent, _ in items if sent.check_fresh is not None)
            self._lowest = min((sent.id.number for sent, _ in items), default=-1)


def _runs_on_one_thread(root: torch.Tensor) -> bool:
    """Whether the engine runs all nodes on one thread, and barriers last of all.

    Each device has its own engine thread, which may hand work to this one; a waiting barrier would block that
    work.
    """
    return not torch.accelerator.is_available() or all(
        made.device.type == "cpu" for node in nodes_from([root]) for made in input_metadata(node)
    )
