"""Explicit contexts: they keep the gradients of a pass apart, here and on every worker that the pass
reaches."""

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
"""For each ``with`` block that this thread or task is in, the token that restores the scope around the block;
the innermost block's token is the last. Not attributes of `Context`: several threads and tasks may be in
blocks of the same context."""


class Context:
    """Holds the gradients of a pass apart from those of other contexts and from `.grad`.

    ``with gw.context() as ctx:`` opens a context. Calls made in the block belong to it, on every worker, and
    leaving the block drops all that the context holds, on every worker. A context from `gw.current_context`
    belongs to other code: calls made in a ``with`` block of it belong to it, too, but leaving the block does
    not end it.
    """

    def __init__(self, peer: LocalPeer, id: ContextId, *, is_own: bool) -> None:
        """`is_own`: the context ends when its last ``with`` block is left."""
        self._peer = peer
        self._id = id
        self._is_own = is_own
        self._lock = threading.Lock()
        self._blocks = 0
        """How many ``with`` blocks of this context are entered, in all threads."""

    @property
    def id(self) -> ContextId:
        """The context's id, the same on every worker."""
        return self._id

    def backward(
        self,
        roots: torch.Tensor | Sequence[torch.Tensor],
        grad_tensors: torch.Tensor | Sequence[torch.Tensor | None] | None = None,
        retain_graph: bool = False,
    ) -> None:
        """Backpropagates, and accumulates the gradients in this context, here and on every worker.

        `.grad` is not changed, here or on workers. `grad_tensors` are needed for roots that are not scalars,
        as with `torch.autograd.backward`. Returns when all workers are done.
        """
        root_list = [roots] if isinstance(roots, torch.Tensor) else list(roots)
        if grad_tensors is None:
            gradients: list[torch.Tensor | None] = [None] * len(root_list)
        elif isinstance(grad_tensors, torch.Tensor):
            gradients = [grad_tensors]
        else:
            gradients = list(grad_tensors)
        engine = self._peer.engine
        engine.container.get(self._id)  # raises if the context has ended, before the backward frees the graph
        pass_id = engine.passes.start()
        run = BackwardRun(
            engine,
            pass_id,
            self._id,
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
        """The gradients that this process holds in the context, by leaf tensor.

        In a served function these are the gradients of the worker's own tensors, in the context of the
        request. The context keeps them until `step` or `zero_grad` drops them, or the context ends. Raises
        `StepRefused` if a gradient was returned by this method before, its tensor was changed since, and a
        later backward has added to it: the sum would be of gradients at two different values of the tensor.
        """
        state = self._peer.engine.container.find(self._id)
        return {} if state is None else state.hand_out()

    def peek(self) -> dict[torch.Tensor, torch.Tensor]:
        """The same gradients for gradwire's own optimizers, without the check: the trainer calls
        `zero_grad`."""
        state = self._peer.engine.container.find(self._id)
        return {} if state is None else state.gradients()

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """Steps an optimizer of torch with the gradients that this process holds in the context, and drops
        them.

        `.grad` is not changed. For served functions that step the worker's own parameters. Raises
        `StepRefused` if no parameter of the optimizer has a gradient in the context.
        """
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if any(hasattr(p, "ref") for p in parameters):
            raise TypeError("this optimizer has parameters on workers: use its own step, with the context")
        state = self._peer.engine.container.find(self._id)
        with self._peer.engine.hooks.guard_step(parameters):
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
        """Drops the gradients that this process holds in the context: those of the given tensors, or all."""
        state = self._peer.engine.container.find(self._id)
        if state is not None:
            state.clear_gradients(tensors)

    def scale_gradients(self, tensors: Iterable[torch.Tensor], factor: float) -> None:
        """Multiplies the gradients that this process holds in the context for the given tensors."""
        self.change_gradients(tensors, lambda gradient: gradient * factor)

    def change_gradients(
        self, tensors: Iterable[torch.Tensor], change: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        """Replaces each gradient of the given tensors that this process holds by `change(gradient)`."""
        state = self._peer.engine.container.find(self._id)
        if state is not None:
            state.change_gradients(tensors, change)

    def __enter__(self) -> Self:
        scope = current_scope()
        _entered.set((*_entered.get(), enter(scope._replace(context=self._id))))
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
    """Makes a new context, to be entered with ``with``.

    >>> import gradwire as gw, torch
    >>> w = torch.ones(2, requires_grad=True)
    >>> with gw.context() as ctx:
    ...     ctx.backward((3 * w).sum())
    ...     print(ctx.gradients()[w], w.grad)
    tensor([3., 3.]) None
    """
    peer = current_peer()
    return Context(peer, ContextId.new(peer.identity.id, peer.engine.new_id().number), is_own=True)


def is_explicit(id: ContextId) -> bool:
    """Whether this process opened the context with `context`; False for ambient contexts and for other
    processes' contexts."""
    return id.peer == current_peer().identity.id and id.number != 0


def current_context() -> Context:
    """The context that calls are made in.

    That of the innermost ``with`` block. Without one, in a served function, the context of the request, which
    in a chain of workers is that of the process at its start. Else the ambient context of this process.
    """
    return Context(current_peer(), current_context_id(), is_own=False)
