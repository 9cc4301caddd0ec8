"""Holding a run open for gradients that are still to come.

The run has one root: a chain of `Turn` nodes, one for each result, latest first. A turn waits for the
gradient of its result and opens the result's `Gate`, which lets it into the graph. The engine does the rest:
where the graph of two results meets, it goes on when both have had their turn. Turns have the lowest number
of all nodes, so when one begins to wait, everything is done that follows from the gradients so far, and the
requests that brought them are answered.
"""

from __future__ import annotations

import contextvars
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from gradwire.autograd.graph_tasks import BackwardRun, current_run, find_task
from gradwire.autograd.local import nodes_from
from gradwire.autograd.records import Gradients, SentResults
from gradwire.errors import Cancelled
from gradwire.proto.v1 import link_pb2
from gradwire.runtime.scope import waiting
from gradwire.system.threads import computing
from gradwire.transport.base import Link, Payload, Sendable, ServerCall
from gradwire.wire.ids import AutogradMessageId

if TYPE_CHECKING:
    from gradwire.autograd.engine import DistEngine

__all__ = ["HeldRun", "Items", "SuspendedCall", "add_gate", "chain_turns"]

Items = Sequence[tuple[SentResults, Gradients]]

_CHECK_SECONDS = 1.0
"""How often a run that waits looks whether anybody will come."""


class Gate(torch.autograd.Function):
    """forward: results -> token. backward: the gradients that came for them."""

    @staticmethod
    def forward(ctx: Any, id: AutogradMessageId, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.id = id
        ctx.arity = len(tensors)
        ctx.set_materialize_grads(False)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_token_gradient: Any) -> Any:
        run = current_run()
        gradients = None if run is None or run.held is None else run.held.take(ctx.id)
        return None, *(gradients or [None] * ctx.arity)


class Turn(torch.autograd.Function):
    """forward: the token of a gate and that of the next turn -> token. backward: waits."""

    @staticmethod
    def forward(ctx: Any, id: AutogradMessageId, *tokens: torch.Tensor) -> torch.Tensor:
        ctx.id = id
        ctx.tokens = len(tokens)
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_token_gradient: Any) -> Any:
        run = current_run()
        if run is not None and run.held is not None:
            run.held.wait_for(ctx.id)
        return None, *[torch.zeros(()) for _ in range(ctx.tokens)]


def add_gate(sent: SentResults, tensors: Sequence[torch.Tensor]) -> None:
    """Makes it possible to hold a run open for results."""
    sent.gate = Gate.apply(sent.id, *tensors)  # type: ignore[no-untyped-call]


def chain_turns(results: Sequence[SentResults]) -> torch.Tensor | None:
    """The root of a run with a turn for each result, latest first; None if it cannot be held open."""
    tokens: list[torch.Tensor] = []
    with torch.enable_grad():
        for sent in sorted(results, key=lambda sent: sent.id.number):
            if sent.gate is None:
                return None
            turn = Turn.apply(sent.id, sent.gate, *tokens)  # type: ignore[no-untyped-call]
            turn.grad_fn._set_sequence_nr(0)
            tokens = [turn]
    (root,) = tokens
    return root if _runs_on_one_thread(root) else None


def _runs_on_one_thread(root: torch.Tensor) -> bool:
    """Whether the engine runs all nodes on one thread, and turns last of all.

    A device has a thread of its own, which may have work for this one while a turn keeps it waiting.
    """
    accelerated = torch.accelerator.is_available()
    for node in nodes_from([root]):
        # The first node that a thread makes has number 0, too.
        if node._sequence_nr() == 0 and not isinstance(node, Turn._backward_cls):
            node._set_sequence_nr(1)  # type: ignore[attr-defined]
        if accelerated and any(made.device.type != "cpu" for made in node._input_metadata):
            return False
    return True


@dataclass(slots=True)
class _Asked:
    """One request to a run."""

    items: Items
    answered: threading.Event = field(default_factory=threading.Event)
    contributions: Sequence[tuple[AutogradMessageId, Gradients]] = ()
    failure: BaseException | None = None
    is_held: bool = False


class SuspendedCall(ServerCall):
    """The requests to a run as one question, for what the run asks of others."""

    def __init__(self, first: ServerCall) -> None:
        super().__init__()
        self.method = first.method
        self.request = Payload(b"")
        self.deadline = first.deadline
        self.link = first.link

    def respond(self, body: bytes, attachments: Sequence[Sendable] = ()) -> bool:
        """The requests are answered one by one."""
        return False

    def fail(self, error: link_pb2.Error) -> None:
        """The requests are answered one by one."""


class HeldRun:
    """A run whose gradients come in several requests."""

    def __init__(
        self, id: AutogradMessageId, engine: DistEngine, run: BackwardRun, server_call: SuspendedCall
    ) -> None:
        self.id = id
        self.server_call = server_call
        self._participant = weakref.proxy(engine)
        self._run = run
        self._changed = threading.Condition()
        self._gradients: dict[AutogradMessageId, Gradients] = {}
        self._lowest: int | None = None
        """The number of the earliest result whose gradient came. Later ones do not come any more."""
        self._asked: list[_Asked] = []
        self._given_up: str | None = None
        self._is_over = False

    def start(self, work: Callable[[], None]) -> None:
        """Does the work of the run on a thread of its own, in the surroundings of the caller."""
        self._participant.held[self.id] = self
        thread = threading.Thread(
            target=contextvars.copy_context().run, args=(self._do, work), name="gradwire-held", daemon=True
        )
        thread.start()

    def _do(self, work: Callable[[], None]) -> None:
        failure: BaseException | None = None
        try:
            with computing():
                work()
        except BaseException as error:  # whatever it is, those who asked are told
            failure = error
        del work  # and the graph with it, before anybody is answered
        self._run.held = None
        self._participant.held.pop(self.id, None)
        with self._changed:
            self._is_over = True
            asked = self._take_asked()
        self._answer(asked, failure)

    def add(
        self, items: Items, server_call: ServerCall
    ) -> tuple[Sequence[tuple[AutogradMessageId, Gradients]], bool]:
        """Adds gradients. Returns when all that follows from them is done: the contributions, and whether
        the run is held open for more. Without gradients: no more come."""
        asked = _Asked(items)
        take_back = server_call.when_cancelled(self.give_up)
        with self._changed:
            if self._is_over or self._given_up:
                raise Cancelled(f"the run was given up: {self._given_up or 'it has failed'}")
            self._gradients.update((sent.id, gradients) for sent, gradients in items)
            self._run.checks += (sent.check_fresh for sent, _ in items if sent.check_fresh is not None)
            self._lowest = min((sent.id.number for sent, _ in items), default=-1)
            self._asked.append(asked)
            self._changed.notify_all()
        asked.answered.wait()
        take_back()
        if asked.failure is not None:
            raise asked.failure
        return asked.contributions, asked.is_held

    def take(self, id: AutogradMessageId) -> Gradients | None:
        """What came for a result, for its gate."""
        with self._changed:
            return self._gradients.pop(id, None)

    def wait_for(self, id: AutogradMessageId) -> None:
        """A result has its turn: waits until its gradient is there, or does not come."""
        if self._has_come(id):
            return
        task = find_task(torch._C._current_graph_task_id())
        if task is not None:
            task.settle()
        self._run.check_fresh()
        with self._changed:
            # What came meanwhile has not run yet, so it is not answered.
            asked = [] if self._has_come(id) else self._take_asked()
        self._answer(asked, None)
        while not self._has_come(id):
            # Nothing is computed meanwhile, so others may change parameters.
            waiting(partial(self._wait_once, id))
            self._check_somebody_comes()
        self._run.check_fresh()

    def _wait_once(self, id: AutogradMessageId) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._has_come(id), _CHECK_SECONDS)

    def _has_come(self, id: AutogradMessageId) -> bool:
        with self._changed:
            if self._given_up:
                raise Cancelled(f"the run was given up: {self._given_up}")
            return id in self._gradients or (self._lowest is not None and id.number > self._lowest)

    def _check_somebody_comes(self) -> None:
        link: Link | None = self.server_call.link
        if link is None or link.ended is not None:
            self.give_up("whoever asked is gone")
        elif self._participant.is_over(self._run.pass_id):
            self.give_up("the backward is over")

    def give_up(self, why: str = "nobody waits for it any more") -> None:
        """Nobody wants the rest."""
        with self._changed:
            self._given_up = why
            self._changed.notify_all()
        self.server_call.cancel()

    def _take_asked(self) -> list[_Asked]:
        asked, self._asked = self._asked, []
        return asked

    def _answer(self, asked: Sequence[_Asked], failure: BaseException | None) -> None:
        """Answers requests: the first one gets all contributions so far."""
        if not asked:
            return
        asked[0].contributions, self._run.contributions = self._run.contributions, []
        for one in asked:
            one.failure = failure
            one.is_held = not self._is_over
            one.answered.set()
