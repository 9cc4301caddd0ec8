"""The heart: tensors cross to another peer, and their gradients come back.

One call and its backward, in the order of time::

    caller                                                  worker
    send(arguments)      --- ForwardWithAutograd -->        receive(arguments), run the function
    receive(results)     <-- response --------------        remember the results (messages.send_results)
    on_gradients(results) -- PropagateGradients --->        run the graph from results to leaves (serving)
    collect(sent)        <-- response --------------        contributions to the arguments

`send` puts a send node below the arguments, `receive` a recv node above the tensors that came. A recv node
has an edge to the token of every send node that its tensors depend on. So the caller's own graph says what
depends on what remotely, and PyTorch's engine orders everything; there is no other bookkeeping of
dependencies. In backward a recv node propagates its gradients without waiting (`on_gradients`), and a send
node waits for the contributions (`collect`). Send nodes run when nothing else can, so that remote work
overlaps with local work.

A worker's own calls to other workers are part of the same graph, so nesting follows by itself. Where a
process keeps state from call to call, more may lie behind a tensor than the arguments of its own call: then
`kept_state.graph_segments` finds what `depends_on` has to name, without which gradients would be missing. The
rest of `kept_state` makes backward through such a graph fast. It takes part in `receive` (`builds_on`,
`remote_segments`) and, by way of the graph task, in `on_gradients` and `collect`.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from gradwire import wire
from gradwire.autograd.aliases import share_history
from gradwire.autograd.gradients import Gradients, TensorMetadata
from gradwire.autograd.graph import ANCHOR, TOKEN, apply
from gradwire.autograd.graph_tasks import current_run, current_task, find_task
from gradwire.autograd.kept_state.remote_segments import RemoteGraphSegment
from gradwire.autograd.metadata import AutogradMetadata
from gradwire.autograd.records import ReceivedTensors, SentArguments
from gradwire.proto.v1 import autograd_pb2
from gradwire.torch_internals import current_graph_task_id, set_sequence_number
from gradwire.transport.base import Link
from gradwire.wire.ids import AutogradMessageId

if TYPE_CHECKING:
    from gradwire.autograd.engine import DistEngine

__all__ = ["add_send", "receive", "send"]


# -- forward


def send(
    engine: DistEngine, metadata: AutogradMetadata, tensors: Sequence[torch.Tensor], link: Link
) -> SentArguments | None:
    """Puts a send node below the arguments of a call; None if none of them requires grad."""
    differentiable = [tensor for tensor in tensors if tensor.requires_grad]
    if not differentiable:
        return None
    sent = SentArguments(engine.new_id(), metadata.context, differentiable, link.peer.id)
    metadata.message = sent.id
    if engine.live:
        metadata.depends_on = engine.graph_segments.reached_by(differentiable, link.peer.id)
    add_send(sent, differentiable)
    # Kept until the worker says that nothing there refers to them: it may keep state, so that later results
    # depend on these arguments.
    engine.container.keep_arguments(sent)
    return sent


def add_send(sent: SentArguments, tensors: Sequence[torch.Tensor]) -> None:
    """PyTorch: addSendRpcBackward."""
    token = apply(SendRpc, sent, *tensors)
    # The engine prefers high numbers: a send node waits, so everything else that can run, runs first. All but
    # the barriers of a suspended backward, which have 0.
    set_sequence_number(token.grad_fn, 1)
    sent.token = token


def receive(
    engine: DistEngine,
    metadata: AutogradMetadata,
    message: AutogradMessageId,
    values: wire.Decoder | wire.PlannedValues,
    link: Link | None,
    what: str,
    compression: autograd_pb2.Compression | None,
    *,
    are_arguments: bool,
) -> None:
    """Puts a recv node above the tensors of a message that came (PyTorch: addRecvRpcBackward)."""
    slots, tensors = values.slots, values.tensors
    depends_on = metadata.depends_on
    own = [engine.container.arguments(id) for id in depends_on if id.peer == engine.peer]
    received = ReceivedTensors(
        engine,
        message,
        metadata.context,
        link=link,
        releases=None if link is None else engine.releases.to(link),
        are_arguments=are_arguments,
        compression=compression,
        what=what,
        metadata=[TensorMetadata.of(tensors[slot]) for slot in slots],
        depends_on=[sent for sent in own if sent is not None and not sent.is_released],
        foreign=[id for id in depends_on if id.peer != engine.peer],
    )
    handle = metadata.segment_handle
    if handle is not None:  # kept state
        builds_on = engine.container.remote_segments(metadata.builds_on, received)
        received.segment = RemoteGraphSegment(handle, received, builds_on)
        engine.container.keep_remote_segment(received.segment)
        if link is not None:
            engine.releases.to(link).append(handle)  # so the worker may rely on it
    if not slots:
        return
    if are_arguments or received.foreign:
        received.is_live = True
        engine.live.add(received.source)
    if values.is_shared:
        share_history(tensors, slots)
    tokens = [sent.token for sent in received.depends_on]
    if received.segment is not None:
        tokens = [received.segment.token]
    # The call was made with gradients on, even if its result is fetched with gradients off.
    with torch.enable_grad():
        attached = apply(RecvRpc, received, [tensors[slot] for slot in slots], *tokens, ANCHOR)
    for slot, tensor in zip(slots, attached, strict=True):
        tensors[slot] = tensor


# -- backward


def on_gradients(received: ReceivedTensors, gradients: Gradients) -> bool:
    """Takes the gradients of tensors that came: into the response, if they are arguments of the requester,
    else on their way to the peer that sent them. Returns whether contributions may come back."""
    has_gradient = any(gradient is not None for gradient in gradients)
    run = current_run()
    if run is not None and run.responds_with(received):
        if has_gradient:
            run.contribute(received, gradients)  # the requester goes on from there
        return False
    if has_gradient or received.segment is not None:
        with current_task() as task:
            task.send_or_gather(received, gradients if has_gradient else None)
    return has_gradient


def collect(sent: SentArguments, task_id: int) -> Gradients:
    """Waits for all contributions to arguments in the graph task that runs now, and takes their sum."""
    task = find_task(task_id)
    if task is None:
        return sent.collect(task_id)
    with task:
        task.before_collecting(sent)
        return sent.collect(task_id)


class SendRpc(torch.autograd.Function):
    """forward: arguments -> token. backward: the contributions to the arguments. In the graph it is called
    SendRpcBackward, as PyTorch's is."""

    @staticmethod
    def forward(ctx: Any, sent: SentArguments, *tensors: torch.Tensor) -> torch.Tensor:
        # Weakly, or the record and this node would keep each other, and so the graph, alive for ever. When
        # the node runs, the recv node that made it run holds the record.
        ctx.sent = weakref.ref(sent)
        ctx.arity = len(tensors)
        ctx.set_materialize_grads(False)
        return TOKEN.data

    @staticmethod
    def backward(ctx: Any, *token_gradient: Any) -> Any:
        sent: SentArguments | None = ctx.sent()
        if sent is None or token_gradient[0] is None:
            return None, *[None] * ctx.arity
        return None, *collect(sent, current_graph_task_id())


class RecvRpc(torch.autograd.Function):
    """forward: data that came, tokens -> tensors. backward: propagates their gradients. In the graph it is
    called RecvRpcBackward, as PyTorch's is."""

    @staticmethod
    def forward(
        ctx: Any, received: ReceivedTensors, data: Sequence[torch.Tensor], *tokens: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.received = received
        # The record is kept in the node's metadata, which the garbage collector cannot see. In an attribute,
        # the collector might find the record just while torch, without the interpreter's lock, makes another
        # node the owner of this one: it would run the record's destructor, which releases the message,
        # although the node lives.
        ctx.metadata["gradwire.received"] = received
        received.node = weakref.ref(ctx)
        ctx.tokens = len(tokens) - 1
        ctx.set_materialize_grads(False)
        return tuple(data)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> Any:
        if not on_gradients(ctx.received, gradients):
            return None, None, *[None] * (ctx.tokens + 1)
        # A defined gradient for every token makes the send nodes wait for contributions; none for the anchor.
        return None, None, *[TOKEN] * ctx.tokens, None
