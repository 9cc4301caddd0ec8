"""What a call says of autograd: the arguments and results that require grad, and the messages that they
depend on.

The counterparts of PyTorch's sendMessageWithAutograd (`send_call`, `send_results`) and getMessageWithAutograd
(`receive_call`, `receive_response`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from gradwire import wire
from gradwire.autograd.engine import DistEngine
from gradwire.autograd.records import SentArguments, SentResults
from gradwire.autograd.send_recv import add_send, receive, send
from gradwire.proto.v1 import autograd_pb2
from gradwire.runtime.scope import current_scope
from gradwire.transport.base import Link, ResponseFuture
from gradwire.wire.ids import AutogradMessageId, ContextId, message_ids, message_protos

__all__ = ["receive_call", "receive_response", "send_call", "send_results"]


def send_call(
    engine: DistEngine,
    request: autograd_pb2.ForwardWithAutogradRequest,
    tensors: Sequence[torch.Tensor],
    context: ContextId,
    link: Link,
    future: ResponseFuture,
) -> None:
    """Records the arguments of a call whose response settles `future`."""
    context.write(request.autograd.context)
    request.autograd.oldest_pass = engine.passes.oldest_of(context.peer)
    sent: SentArguments | None = None
    releases = engine.releases.to(link)
    if torch.is_grad_enabled():
        # A peer's own ambient context ends with the peer, and others notice that by themselves.
        if context != engine.ambient:
            engine.container.get(context).known_workers.add(link)
        sent = send(engine, request.autograd, tensors, context, link)
    # Last, so that nothing which was taken can get lost before the undoing is arranged.
    released = releases.take()
    if released or sent is not None:
        engine.releases.undo_if_failed(future, link, None if sent is None else sent.id, released)
    if released:
        request.released.extend(message_protos(released))


def receive_call(
    engine: DistEngine,
    metadata: autograd_pb2.AutogradMetadata,
    decoder: wire.Decoder,
    link: Link | None,
    what: str,
    compression: autograd_pb2.Compression | None = None,
) -> None:
    """Makes the arguments of a call part of the graph here. `compression` says how their gradients are sent
    back."""
    engine.passes.learn_oldest(metadata.context.peer, metadata.oldest_pass)
    if not metadata.HasField("message") or not torch.is_grad_enabled():
        decoder.keep_requires_grad()
        return
    receive(engine, metadata, decoder, link, what, compression, are_arguments=True)


def send_results(
    engine: DistEngine,
    tensors: Sequence[torch.Tensor],
    context: ContextId,
    own_call: AutogradMessageId | None,
    function: str,
    check_fresh: Callable[[], None] | None = None,
) -> autograd_pb2.AutogradMetadata | None:
    """Records the results of a call; None if none of them requires grad."""
    differentiable = [tensor for tensor in tensors if tensor.requires_grad]
    if not differentiable or not torch.is_grad_enabled():
        return None
    server_call = current_scope().server_call
    link = None if server_call is None else server_call.link
    requester = context.peer if link is None else link.peer.id
    sent = SentResults(engine.new_id(), context, differentiable, function, requester, check_fresh)
    metadata = autograd_pb2.AutogradMetadata()
    context.write(metadata.context)
    sent.id.write(metadata.message)
    depends_on_own = own_call is not None and own_call in engine.live
    if context.peer == engine.peer != requester:  # a peer that calls itself has the graph of both ends
        _record_own_results(engine, sent, differentiable, metadata)
    elif len(engine.live) > depends_on_own or engine.container.get(context).results:
        _describe_dependencies(engine, sent, differentiable, own_call, link, metadata)
    elif own_call is not None and depends_on_own:
        # There is no other message to depend on, so the graph need not be walked.
        own_call.write(metadata.depends_on.add())
    engine.container.keep_results(sent)
    return metadata


def _record_own_results(
    engine: DistEngine,
    sent: SentResults,
    tensors: Sequence[torch.Tensor],
    metadata: autograd_pb2.AutogradMetadata,
) -> None:
    """For a call that another peer makes here, in a context that this peer opened.

    The results lie behind this peer's own call, so they are recorded as sent arguments and named in
    depends_on. A backward then passes them in one graph task, and torch.autograd.grad sees their leaves.
    """
    as_arguments = SentArguments(sent.id, sent.context, tensors, sent.peer, sent.check_fresh)
    reached = engine.graph_segments.reached_by(tensors, sent.peer)
    metadata.depends_on.extend(message_protos([sent.id, *reached]))
    add_send(as_arguments, tensors)
    engine.container.keep_arguments(as_arguments)


def _describe_dependencies(
    engine: DistEngine,
    sent: SentResults,
    tensors: Sequence[torch.Tensor],
    own_call: AutogradMessageId | None,
    link: Link | None,
    metadata: autograd_pb2.AutogradMetadata,
) -> None:
    """Says what results depend on, where that may be more than the arguments of their own call."""
    reached: Sequence[AutogradMessageId]
    builds_on: Sequence[AutogradMessageId] = ()
    if link is None:
        reached = engine.graph_segments.reached_by(tensors, sent.peer)
    else:
        reached, builds_on, handle = engine.graph_segments.dependencies_of_results(sent, tensors, own_call)
        if handle is not None:
            engine.releases.to(link).offer(handle)
            sent.as_arguments = SentArguments(sent.id, sent.context, tensors, sent.peer)
            add_send(sent.as_arguments, tensors)
            handle.id.write(metadata.segment_handle)
    metadata.depends_on.extend(message_protos(reached))
    metadata.builds_on.extend(message_protos(builds_on))


def receive_response(
    engine: DistEngine,
    response: autograd_pb2.ForwardWithAutogradResponse,
    decoder: wire.Decoder,
    link: Link,
    what: str,
    compression: autograd_pb2.Compression | None = None,
) -> None:
    """Makes the results of a call part of the graph here. `compression` says how their gradients are sent
    back."""
    released = message_ids(response.released)
    engine.container.leave_out(released)  # not even these results lead there
    try:
        if response.HasField("autograd"):
            receive(engine, response.autograd, decoder, link, what, compression, are_arguments=False)
        else:
            decoder.keep_requires_grad()
    finally:
        # Only now: what the results depend on is still referred to, the rest may go.
        if released:
            engine.container.release(released)
