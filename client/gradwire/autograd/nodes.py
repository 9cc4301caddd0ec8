"""The two nodes that gradwire adds to PyTorch's graph.

The counterparts of PyTorch's SendRpcBackward and RecvRpcBackward. The native engine runs them: the graph
itself says what depends on what, so there is no other bookkeeping of dependencies.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import get_gradient_edge

from gradwire.autograd import graph_tasks
from gradwire.autograd.records import ReceivedTensors, SentArguments

if TYPE_CHECKING:
    from gradwire.autograd.groups import Reach

__all__ = ["ANCHOR", "add_recv", "add_send", "is_leaf_node", "is_token_node", "received_of"]

# Not memory of torch's own allocator, which reads its settings when it is first asked for some:
# `tune_malloc` would come too late.
ANCHOR = torch.frombuffer(bytearray(4), dtype=torch.float32)[0].requires_grad_()
"""A private leaf below every recv node, so that what arrives can require grad even if nothing that was
sent did. No gradient ever flows into it."""

_TOKEN = torch.frombuffer(bytearray(4), dtype=torch.float32)[0]
"""What tokens and their gradients look at: nobody reads or writes it. On the CPU, so that the wait happens on
the thread that called backward and never on a GPU's thread, which all passes share."""

_ANCHOR_NODE = get_gradient_edge(ANCHOR).node  # kept: a leaf holds its node only weakly


def _all_leaves_wanted() -> bool:
    """Whether this is a plain backward(), and not torch.autograd.grad or backward(inputs=...)."""
    return torch._C._will_engine_execute_node(_ANCHOR_NODE)


class SendRpc(torch.autograd.Function):
    """forward: tensors -> token. backward: wait for the responses, return the summed contributions."""

    @staticmethod
    def forward(ctx: Any, record: SentArguments, *tensors: torch.Tensor) -> torch.Tensor:
        # Weakly, or the record and this node would keep each other, and so the graph, alive for ever. When
        # the node runs, the recv node that made it run holds the record.
        ctx.record = weakref.ref(record)
        ctx.arity = len(tensors)
        ctx.set_materialize_grads(False)
        return _TOKEN.data

    @staticmethod
    def backward(ctx: Any, *token_gradient: Any) -> Any:
        record: SentArguments | None = ctx.record()
        if record is None or token_gradient[0] is None:
            return None, *[None] * ctx.arity
        return None, *graph_tasks.collect(record)


class RecvRpc(torch.autograd.Function):
    """forward: tokens + received data -> tensors. backward: propagate the gradients, don't wait."""

    @staticmethod
    def forward(
        ctx: Any, received: ReceivedTensors, data: Sequence[torch.Tensor], *tokens: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.received = received
        # The garbage collector sees the owner of a node only if that is one tensor, and may look while torch,
        # without the interpreter's lock, makes another node own it. It would call the record's destructor,
        # which releases the message, and only then notice that the node lives. What is in the metadata
        # belongs to the node itself, out of the collector's sight.
        ctx.metadata["gradwire.received"] = received
        received.node = weakref.ref(ctx)
        ctx.tokens = len(tokens) - 1
        ctx.set_materialize_grads(False)
        return tuple(data)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        received: ReceivedTensors = ctx.received
        has_gradient = any(gradient is not None for gradient in gradients)
        awaits_mail = False
        run = graph_tasks.current_run()
        if run is not None and run.answers(received):
            if has_gradient:
                run.contribute(received, gradients)
        elif has_gradient or received.group is not None:
            task = graph_tasks.current_task(_all_leaves_wanted)
            with task:
                if has_gradient:
                    # Contributions may come back for what this node sent.
                    awaits_mail = True
                    task.dispatch(received, gradients)
                else:
                    task.pass_by(received)
        if not awaits_mail:
            return None, None, *[None] * (ctx.tokens + 1)
        # A defined gradient for every token makes the send nodes wait for their mail; none for the anchor.
        return None, None, *[_TOKEN] * ctx.tokens, None


class Reaches(torch.autograd.Function):
    """forward: tokens -> one token that stands for them all. backward: a gradient for each."""

    @staticmethod
    def forward(ctx: Any, *tokens: torch.Tensor) -> torch.Tensor:
        ctx.tokens = len(tokens) - 1
        ctx.set_materialize_grads(False)
        return _TOKEN.data

    @staticmethod
    def backward(ctx: Any, *token_gradient: Any) -> Any:
        return *[token_gradient[0]] * ctx.tokens, None


def _apply(function: type[torch.autograd.Function], *args: object) -> Any:
    """What `function.apply` comes down to for tensors that torch.func has not wrapped. No others travel."""
    apply: Any = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    return apply(*args)


def add_send(record: SentArguments, tensors: Sequence[torch.Tensor]) -> None:
    """Puts a send node below tensors that go out (PyTorch: addSendRpcBackward)."""
    token = _apply(SendRpc, record, *tensors)
    # The engine prefers high numbers: a send node waits, so everything else that can run, runs first. All but
    # what `holding` puts below, with 0.
    token.grad_fn._set_sequence_nr(1)
    record.token = token


def add_recv(received: ReceivedTensors, data: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Puts a recv node above tensors that came in (PyTorch: addRecvRpcBackward)."""
    tokens = [sent.token for sent in received.depends_on]
    tokens += [_token_of(reach) for reach in received.builds_on]
    tensors: tuple[torch.Tensor, ...] = _apply(RecvRpc, received, data, *tokens, ANCHOR)
    return tensors


def _token_of(reach: Reach) -> torch.Tensor:
    """A token for all that earlier results reach: else each of many results would need one for every send."""
    if reach.token is None:
        tokens = [sent.token for sent in reach.arguments]
        tokens += [_token_of(below) for below in reach.builds_on]
        reach.token = _apply(Reaches, *tokens, ANCHOR)
    token: torch.Tensor = reach.token
    return token


def is_leaf_node(node: object) -> bool:
    """Whether a node is the end of the graph at a leaf tensor, its `variable`."""
    return isinstance(node, _LEAF_NODE)


def is_token_node(node: object) -> bool:
    """Whether a node gives a token: an edge to it is a dependency, not data."""
    return isinstance(node, _TOKEN_NODES)


def received_of(node: object) -> ReceivedTensors | None:
    """The record of a recv node; None for any other node."""
    return getattr(node, "received", None) if isinstance(node, _RECV_NODE) else None


_LEAF_NODE = type(_ANCHOR_NODE)
_RECV_NODE: type = RecvRpc._backward_cls
_TOKEN_NODES: tuple[type, ...] = (SendRpc._backward_cls, Reaches._backward_cls)
