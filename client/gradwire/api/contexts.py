"""Explicit contexts: gradients of a pass kept apart, here and on every worker that it reaches."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextvars import ContextVar
from functools import partial
from types import TracebackType
from typing import Self

import torch

from gradwire.autograd import BackwardRun, ContextId, backward_to_leaves, run_waiting_hooks
from gradwire.errors import StepRefused
from gradwire.peers.current import current_context_id, current_peer
from gradwire.peers.local import LocalPeer
from gradwire.runtime.scope import Token, current_scope, enter, leave

__all__ = ["Context", "context", "current_context", "is_explicit"]

_entered: ContextVar[tuple[Token, ...]] = ContextVar("gradwire_entered", default=())
"""What the blocks that this thread or task is in were before, the innermost last. Not kept by the contexts:
several threads and tasks may be in the same one."""


class Context:
    """Gradients of one pass, apart from all others and from `.grad`.

    ``with gw.context() as ctx:`` opens one; calls made inside belong to it, on every worker. Leaving it
    lets go of everything that it holds, everywhere. One that `gw.current_context` gave is somebody else's:
    calls made in a ``with`` block of it belong to it, and leaving the block ends nothing.
    """

    def __init__(self, peer: LocalPeer, id: ContextId, *, is_own: bool) -> None:
        """`is_own`: it ends when the last block that is in it is left."""
        self._peer = peer
        self._id = id
        self._is_own = is_own
        self._lock = threading.Lock()
        self._blocks = 0
        """How many blocks are in it, in all threads."""

    @property
    def id(self) -> ContextId:
        """Its name, the same on every worker."""
        return self._id

    def backward(
        self,
        roots: torch.Tensor | Sequence[torch.Tensor],
        grad_tensors: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
        retain_graph: bool = False,
    ) -> None:
        """Backpropagates, and collects the gradients in this context here and on every worker.

        `.grad` is left alone everywhere. `grad_tensors` are needed for roots that are no scalars, as with
        `torch.autograd.backward`. Returns when all workers are done.
        """
        root_list = [roots] if isinstance(roots, torch.Tensor) else list(roots)
        if grad_tensors is None:
            gradients: list[torch.Tensor | None] = [None] * len(root_list)
        elif isinstance(grad_tensors, torch.Tensor):
            gradients = [grad_tensors]
        else:
            gradients = list(grad_tensors)
        engine = self._peer.engine
        engine.container.get(self._id)  # if it has ended, says so before anything of the graph is freed
        pass_id = engine.passes.start()
        run = BackwardRun(
            engine,
            pass_id,
            requester=None,
            collect_leaves=True,
            collect_into=self._id,
            retain_graph=retain_graph,
        )
        try:
            backward_to_leaves(root_list, gradients, run, partial(engine.accumulate, run, self._id))
            run_waiting_hooks(engine, pass_id)
        finally:
            engine.passes.end(pass_id)

    def gradients(self) -> dict[torch.Tensor, torch.Tensor]:
        """The gradients that this process holds in the context, for each of its leaf tensors.

        In a served function: those of the worker's own tensors, for the caller's context. They stay until
        `step` or `zero_grad` forgets them, or the context ends. Raises `StepRefused` if they are the sum
        of such that were handed out before the tensor was last changed, and of later ones.
        """
        state = self._peer.engine.container.find(self._id)
        return {} if state is None else state.hand_out()

    def peek(self) -> dict[torch.Tensor, torch.Tensor]:
        """The same for gradwire's own optimizers, for which `zero_grad` is for the trainer to call."""
        state = self._peer.engine.container.find(self._id)
        return {} if state is None else state.gradients()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Steps an optimizer of torch with the gradients that this process holds in the context, and forgets
        them. `.grad` is left alone.

        It is for served functions that step the worker's own parameters. Raises `StepRefused` if there is no
        gradient for any parameter of the optimizer.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if any(hasattr(p, "ref") for p in parameters):
            raise TypeError("this optimizer has parameters on workers: use its own step, with the context")
        state = self._peer.engine.container.find(self._id)
        with self._peer.engine.stepping(parameters):
            taken = {} if state is None else state.take_gradients(parameters)
            if state is None or not taken:
                refused = StepRefused("there are no gradients for any parameter; was backward run?")
                refused.reason = "missing"
                raise refused
            try:
                for parameter, gradient in taken.items():
                    parameter.grad = gradient
                optimizer.step()
            except BaseException:
                for parameter, gradient in taken.items():
                    state.accumulate(parameter, gradient)
                raise

    def zero_grad(self, tensors: Iterable[torch.Tensor] | None = None) -> None:
        """Forgets the gradients that this process holds in the context: those of some tensors, or all."""
        state = self._peer.engine.container.find(self._id)
        if state is not None:
            state.clear_gradients(tensors)

    def scale_gradients(self, tensors: Iterable[torch.Tensor], factor: float) -> None:
        """Multiplies the gradients that this process holds for some tensors."""
        self.change_gradients(tensors, lambda gradient: gradient * factor)

    def change_gradients(
        self, tensors: Iterable[torch.Tensor], change: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Puts what a function returns for them in the place of gradients that this process holds."""
        state = self._peer.engine.container.find(self._id)
        if state is not None:
            state.change_gradients(tensors, change)

    def __enter__(self) -> Self:
        scope = current_scope()
        _entered.set((*_entered.get(), enter(scope.in_context(self._id, scope.detect_anomaly))))
        with self._lock:
            self._blocks += 1
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        *outer, innermost = _entered.get()
        _entered.set(tuple(outer))
        leave(innermost)
        with self._lock:
            self._blocks -= 1
            ends = self._is_own and not self._blocks
        if ends:
            self._peer.engine.leases.end(self._id)

    def __repr__(self) -> str:
        return f"<gradwire context {self._id}>"


def context() -> Context:
    """A new context, to be entered with ``with``.

    >>> import gradwire as gw, torch
    >>> w = torch.ones(2, requires_grad=True)
    >>> with gw.context() as ctx:
    ...     ctx.backward((3 * w).sum())
    ...     print(ctx.gradients()[w], w.grad)
    tensor([3., 3.]) None
    """
    peer = current_peer()
    return Context(peer, ContextId(peer.identity.id, peer.engine.new_id().number), is_own=True)


def is_explicit(id: ContextId) -> bool:
    """Whether a context is one that this process opened with `context`, and not an ambient one."""
    return id.peer == current_peer().identity.id and id.number != 0


def current_context() -> Context:
    """The context that calls are made in: that of the caller in a served function, else the one that was
    entered last, else the ambient one of this process."""
    return Context(current_peer(), current_context_id(), is_own=False)
