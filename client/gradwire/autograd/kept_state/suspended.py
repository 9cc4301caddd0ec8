"""A backward on a worker that is suspended until the gradients of earlier results come.

The backward has one root: a chain of `Barrier` nodes, one for each result, latest first. A barrier waits for
the gradient of its result, and then lets the result's `GradientInjector` bring it into the graph. PyTorch's
engine does the rest: where the graphs of two results meet, it goes on when both gradients are in. Barriers
have the lowest priority of all nodes, so when a barrier begins to wait, everything that follows from the
gradients so far is done, and the requests that brought them get their responses.
"""

from __future__ import annotations

import contextvars
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from gradwire.autograd.gradients import Contributions, Gradients
from gradwire.autograd.graph import nodes_from
from gradwire.autograd.graph_tasks import BackwardRun, current_run, find_task
from gradwire.autograd.records import SentResults
from gradwire.errors import Cancelled
from gradwire.runtime.scope import waiting
from gradwire.system.threads import computing
from gradwire.torch_internals import (
    current_graph_task_id,
    input_metadata,
    node_class,
    sequence_number,
    set_sequence_number,
)
from gradwire.transport.base import ServerCall
from gradwire.wire.ids import AutogradMessageId

if TYPE_CHECKING:
    from gradwire.autograd.engine import DistEngine

__all__ = ["SuspendedBackward", "add_injector", "chain_barriers"]

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
        ctx.set_materialize_grads(False)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_token_gradient: Any) -> Any:
        return None, *(_running().take(ctx.id) or [None] * ctx.arity)


class Barrier(torch.autograd.Function):
    """forward: the token of an injector and that of the next barrier -> token. backward: waits."""

    @staticmethod
    def forward(ctx: Any, id: AutogradMessageId, *tokens: torch.Tensor) -> torch.Tensor:
        ctx.id = id
        ctx.tokens = len(tokens)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_token_gradient: Any) -> Any:
        _running().wait_for(ctx.id)
        return None, *[torch.zeros(())] * ctx.tokens


def _running() -> SuspendedBackward:
    """The suspended backward whose nodes run now."""
    run = current_run()
    assert run is not None
    assert run.suspended is not None
    return run.suspended


def add_injector(sent: SentResults, tensors: Sequence[torch.Tensor]) -> None:
    """Makes it possible to suspend a backward until the gradients of these results come."""
    sent.injector = GradientInjector.apply(sent.id, *tensors)  # type: ignore[no-untyped-call]


def chain_barriers(results: Sequence[SentResults]) -> torch.Tensor | None:
    """The root of a backward with a barrier for each result, latest first; None if it cannot be suspended."""
    tokens: list[torch.Tensor] = []
    with torch.enable_grad():
        for sent in sorted(results, key=lambda sent: sent.id.number):
            if sent.injector is None:
                return None
            barrier = Barrier.apply(sent.id, sent.injector, *tokens)  # type: ignore[no-untyped-call]
            set_sequence_number(barrier.grad_fn, 0)
            tokens = [barrier]
    (root,) = tokens
    return root if _runs_on_one_thread(root) else None


def _runs_on_one_thread(root: torch.Tensor) -> bool:
    """Whether the engine runs all nodes on one thread, and barriers last of all.

    Each device has its own engine thread, which may hand work to this one; a waiting barrier would block that
    work.
    """
    accelerated = torch.accelerator.is_available()
    for node in nodes_from([root]):
        # The first node that a thread makes has number 0, too.
        if sequence_number(node) == 0 and not isinstance(node, node_class(Barrier)):
            set_sequence_number(node, 1)
        if accelerated and any(made.device.type != "cpu" for made in input_metadata(node)):
            return False
    return True


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
        self._changed = threading.Condition()
        """Guards what follows."""
        self._ended: str | None = None
        """Why no more gradients are taken."""
        self._gradients: dict[AutogradMessageId, Gradients] = {}
        self._lowest: float = math.inf
        """The number of the earliest result in the last request. No gradients come any more for results after
        it."""
        self._without_response: list[Future[Outcome]] = []

    # -- for the threads that bring requests

    def start(self, backward: Callable[[], None]) -> None:
        """Runs the backward on a thread of its own, with the context variables of the caller."""
        target, args = contextvars.copy_context().run, (self._do, backward)
        threading.Thread(target=target, args=args, name="gradwire-suspended", daemon=True).start()

    def add(self, items: Items, server_call: ServerCall) -> Outcome:
        """Adds gradients, and returns when all that follows from them is done. Without gradients: no more
        come."""
        outcome: Future[Outcome] = Future()
        with self._changed:
            self._check_going_on()
            self._gradients.update((sent.id, gradients) for sent, gradients in items)
            self._lowest = min((sent.id.number for sent, _ in items), default=-1)
            self._run.checks += (sent.check_fresh for sent, _ in items if sent.check_fresh is not None)
            self._without_response.append(outcome)
            self._changed.notify()
        take_back = server_call.when_cancelled(self.give_up)
        try:
            return outcome.result()
        finally:
            take_back()

    def give_up(self, why: str = "its requester cancelled it") -> None:
        """The requester does not want the rest: the backward is cancelled at its next barrier."""
        with self._changed:
            self._ended = self._ended or why
            self._changed.notify()
        self._first_call.cancel()

    # -- for the thread of the backward

    def _do(self, backward: Callable[[], None]) -> None:
        failure: BaseException | None = None
        self._engine.suspended[self.id] = self
        try:
            with computing():
                backward()
        except BaseException as error:  # whatever it is, the requesters are told
            failure = error
        del backward  # and the graph with it, before the responses are sent
        self._run.suspended = None
        self._engine.suspended.pop(self.id, None)
        with self._changed:
            self._ended = self._ended or ("it has failed" if failure else "it is done")
            self._respond(failure, is_suspended=False)

    def take(self, id: AutogradMessageId) -> Gradients | None:
        """The gradients that came for a result."""
        return self._gradients.pop(id, None)

    def wait_for(self, id: AutogradMessageId) -> None:
        """Waits until the gradient of a result has come, or does not come any more."""
        if self._has_come(id):
            return
        task = find_task(current_graph_task_id())
        if task is not None:
            task.wait_for_requests()
        self._run.check_fresh()
        with self._changed:
            if not self._has_come(id):  # if it has, nothing of what that request brought has run yet
                self._respond(None, is_suspended=True)
        while not self._has_come(id):
            # Nothing is computed meanwhile, so others may change parameters.
            waiting(partial(self._wait_for_request, id))
            self._check_requester()
        self._run.check_fresh()

    def _has_come(self, id: AutogradMessageId) -> bool:
        self._check_going_on()
        return id in self._gradients or id.number > self._lowest

    def _wait_for_request(self, id: AutogradMessageId) -> None:
        with self._changed:
            self._changed.wait_for(partial(self._has_come, id), _LIVENESS_SECONDS)

    def _check_going_on(self) -> None:
        if self._ended is not None:
            raise Cancelled(f"the suspended backward has ended: {self._ended}")

    def _check_requester(self) -> None:
        link = self._first_call.link
        if link is None or link.ended is not None:
            self.give_up("its requester is gone")
        elif self._engine.passes.is_over(self._run.pass_id):
            self.give_up("the backward that it is part of is over")

    def _respond(self, failure: BaseException | None, *, is_suspended: bool) -> None:
        """Lets the requests so far be responded to: the first with all contributions."""
        without_response, self._without_response = self._without_response, []
        for outcome in without_response:
            if failure is not None:
                outcome.set_exception(failure)
            else:
                contributions, self._run.contributions = self._run.contributions, []
                outcome.set_result((contributions, is_suspended))
