"""What a call says of autograd: the arguments and results that require grad, and the messages that they
depend on.

The counterparts of PyTorch's sendMessageWithAutograd (`send_call`, `send_results`) and getMessageWithAutograd
(`receive_call`, `receive_response`). The form of a message, in full or by a plan, is not decided here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gradwire import wire
from gradwire.autograd.engine import DistEngine
from gradwire.autograd.metadata import AutogradMetadata
from gradwire.autograd.records import SentArguments, SentResults
from gradwire.autograd.send_recv import add_send, receive, send
from gradwire.proto.v1 import autograd_pb2
from gradwire.runtime.scope import current_scope
from gradwire.transport.base import Link, ResponseFuture
from gradwire.wire.ids import AutogradMessageId, ContextId

__all__ = ["receive_call", "receive_response", "send_call", "send_results"]


def send_call(
    engine: DistEngine,
    tensors: Sequence[torch.Tensor],
    context: ContextId,
    link: Link,
    future: ResponseFuture,
) -> tuple[AutogradMetadata, Sequence[AutogradMessageId]]:
    """Records the arguments of a call whose response settles `future`. What its request says of them, and
    the releases that ride on it."""
    metadata = AutogradMetadata(context, oldest_pass=engine.oldest_pass(context))
    sent: SentArguments | None = None
    releases = engine.releases.to(link)
    if torch.is_grad_enabled():
        # A peer's own ambient context ends with the peer, and others notice that by themselves.
        if context != engine.ambient:
            engine.container.get(context).known_workers.add(link)
        sent = send(engine, metadata, tensors, link)
    # Last, so that nothing which was taken can get lost before the undoing is arranged.
    released = releases.take()
    if released or sent is not None:
        engine.releases.undo_if_failed(future, link, None if sent is None else sent.id, released)
    return metadata, released


def receive_call(
    engine: DistEngine,
    metadata: AutogradMetadata | None,
    values: wire.Decoder | wire.PlannedValues,
    link: Link | None,
    what: str,
    compression: autograd_pb2.Compression | None = None,
) -> None:
    """Makes the arguments of a call part of the graph here. `compression` says how their gradients are sent
    back."""
    if metadata is not None:
        engine.learn_oldest_pass(metadata.context, metadata.oldest_pass)
    if metadata is None or metadata.message is None or not torch.is_grad_enabled():
        if values.slots:
            values.keep_requires_grad()
        return
    receive(engine, metadata, metadata.message, values, link, what, compression, are_arguments=True)


def send_results(
    engine: DistEngine,
    tensors: Sequence[torch.Tensor],
    context: ContextId,
    own_call: AutogradMessageId | None,
    function: str,
    check_fresh: Callable[[], None] | None = None,
) -> AutogradMetadata | None:
    """Records the results of a call; None if none of them requires grad."""
    differentiable = [tensor for tensor in tensors if tensor.requires_grad]
    if not differentiable or not torch.is_grad_enabled():
        return None
    server_call = current_scope().server_call
    link = None if server_call is None else server_call.link
    requester = context.peer if link is None else link.peer.id
    sent = SentResults(engine.new_id(), context, differentiable, function, requester, check_fresh)
    metadata = AutogradMetadata(context, sent.id)
    depends_on_own = own_call is not None and own_call in engine.live
    if context.peer == engine.peer != requester:  # a peer that calls itself has the graph of both ends
        _record_own_results(engine, sent, differentiable, metadata)
    elif len(engine.live) > depends_on_own or engine.container.get(context).results:
        _describe_dependencies(engine, sent, differentiable, own_call, link, metadata)
    elif own_call is not None and depends_on_own:
        # There is no other message to depend on, so the graph need not be walked.
        metadata.depends_on = [own_call]
    engine.container.keep_results(sent)
    return metadata


def _record_own_results(
    engine: DistEngine,
    sent: SentResults,
    tensors: Sequence[torch.Tensor],
    metadata: AutogradMetadata,
) -> None:
    """For a call that another peer makes here, in a context that this peer opened.

    The results lie behind this peer's own call, so they are recorded as sent arguments and named in
    depends_on. A backward then passes them in one graph task, and torch.autograd.grad sees their leaves.
    """
    as_arguments = SentArguments(sent.id, sent.context, tensors, sent.peer, sent.check_fresh)
    metadata.depends_on = [sent.id, *engine.graph_segments.reached_by(tensors, sent.peer)]
    add_send(as_arguments, tensors)
    engine.container.keep_arguments(as_arguments)


def _describe_dependencies(
    engine: DistEngine,
    sent: SentResults,
    tensors: Sequence[torch.Tensor],
    own_call: AutogradMessageId | None,
    link: Link | None,
    metadata: AutogradMetadata,
) -> None:
    """Says what results depend on, where that may be more than the arguments of their own call."""
    segments = engine.graph_segments
    if link is None:
        metadata.depends_on = segments.reached_by(tensors, sent.peer)
        return
    metadata.depends_on, metadata.builds_on, handle = segments.dependencies_of_results(
        sent, tensors, own_call
    )
    if handle is not None:
        engine.releases.to(link).offer(handle)
        sent.as_arguments = SentArguments(sent.id, sent.context, tensors, sent.peer)
        add_send(sent.as_arguments, tensors)
        metadata.segment_handle = handle.id


def receive_response(
    engine: DistEngine,
    metadata: AutogradMetadata | None,
    released: Sequence[AutogradMessageId],
    values: wire.Decoder | wire.PlannedValues,
    link: Link,
    what: str,
    compression: autograd_pb2.Compression | None = None,
) -> None:
    """Makes the results of a call part of the graph here. `compression` says how their gradients are sent
    back."""
    if released:
        engine.container.leave_out(released)  # not even these results lead there
    try:
        if metadata is not None and metadata.message is not None:
            receive(engine, metadata, metadata.message, values, link, what, compression, are_arguments=False)
        elif values.slots:
            values.keep_requires_grad()
    finally:
        # Only now: what the results depend on is still referred to, the rest may go.
        if released:
            engine.container.release(released)
