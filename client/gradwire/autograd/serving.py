"""Answering PropagateGradients and CleanupContext."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from gradwire import wire
from gradwire._scope import current_scope, entered
from gradwire.autograd.ids import ContextId, MessageId, message_ids, message_protos
from gradwire.autograd.local import backward_into_grad, backward_to_leaves
from gradwire.autograd.modes import detecting_anomaly
from gradwire.autograd.participant import Participant, decode_gradients, encode_gradients
from gradwire.autograd.passes import Run, find_task
from gradwire.autograd.records import Gradients, SentArguments, SentResults, add_gradients
from gradwire.errors import NotFound
from gradwire.proto.v1 import autograd_pb2
from gradwire.transport.base import Exchange

__all__ = ["serve_cleanup", "serve_propagate"]


def serve_propagate(participant: Participant, exchange: Exchange) -> None:
    """Backpropagates through a message that this node sent, and answers when all is done."""
    request = wire.parse(autograd_pb2.PropagateGradientsRequest, exchange.request.body)
    link = exchange.link
    participant.store.release(message_ids(request.released))
    context = ContextId.parse(request.context)
    pass_id = MessageId.parse(getattr(request, "pass"))
    if participant.is_over(pass_id):
        raise NotFound(
            f"pass {pass_id} is over: its backward failed or was given up, so this no longer counts"
        )
    decoder = wire.Decoder(request.tensors, exchange.request.attachments)
    exchange.request = type(exchange.request)(b"")  # the gradients live in the decoder now
    run = Run(
        participant,
        pass_id,
        asker=link.peer.node if link is not None else context.node,
        collect_leaves=not request.skip_leaves,
        collect_into=ContextId.parse(request.collect_into) if request.HasField("collect_into") else None,
        create_graph=request.create_graph,
    )
    id = MessageId.parse(request.gradients.message)
    sent = participant.store.results(id) or participant.store.arguments(id)
    if sent is None:
        raise NotFound(
            f"message {id} is not kept here, or no longer: its graph was freed by a backward without "
            "retain_graph, its context has ended, or its lease ran out"
        )
    what = f"the backward of {sent.function}" if isinstance(sent, SentResults) else "a backward"
    reply = autograd_pb2.PropagateGradientsReply()
    encoder = wire.Encoder(attach_from=wire.ATTACH_FROM if link is not None else None)
    # In the context of the forward: code that runs in backward, such as a checkpoint's, may make calls.
    with (
        participant.store.in_use(context),
        entered(replace(current_scope(), context=context)),
        detecting_anomaly(request.detect_anomaly),
    ):
        with torch.set_grad_enabled(request.create_graph):
            participant.receive_call(request.autograd, decoder, link, f"the gradients for {what}")
        gradients = decode_gradients(request.gradients, decoder, sent.like)
        try:
            if isinstance(sent, SentResults) and sent.check_fresh is not None:
                sent.check_fresh()
            _propagate(participant, run, context, sent, gradients)
        finally:
            if not request.retain_graph and isinstance(sent, SentResults):
                participant.store.release([id])
        _encode_contributions(run, reply, encoder)
        if request.create_graph:
            own = MessageId.parse(request.autograd.message) if request.autograd.HasField("message") else None
            with torch.enable_grad():
                autograd = participant.send_results(encoder.tensors, context, own, what)
            if autograd is not None:
                reply.autograd.CopyFrom(autograd)
    # The last references to the graph, so that what it held is released with this very reply.
    del sent, gradients
    run.contributions.clear()
    table, attachments = encoder.finish()
    reply.tensors.CopyFrom(table)
    del encoder, decoder
    if link is not None:
        reply.released.extend(message_protos(participant.releases_to(link).take()))
    exchange.reply(reply.SerializeToString(), attachments)
    participant.undo_if_unread(reply, exchange)


def _propagate(
    participant: Participant,
    run: Run,
    context: ContextId,
    sent: SentResults | SentArguments,
    gradients: Gradients,
) -> None:
    """Backpropagates from tensors that this node sent."""
    if isinstance(sent, SentArguments) and _is_awaited(sent, gradients, run):
        return
    wanted = [
        (edge, gradient)
        for edge, gradient in zip(sent.edges, gradients, strict=True)
        if edge is not None and gradient is not None
    ]
    if not wanted:
        return
    roots, root_gradients = [edge for edge, _ in wanted], [gradient for _, gradient in wanted]
    into = run.collect_into or context
    if run.collect_leaves and into == ContextId(participant.node, 0):
        # This node's own ambient context: what a plain backward() here would do, started elsewhere.
        backward_into_grad(roots, root_gradients, run)
    else:
        backward_to_leaves(roots, root_gradients, run, partial(_collect, participant, into, run.asker))


def _collect(
    participant: Participant, into: ContextId, asker: int | None, leaf: torch.Tensor, gradient: torch.Tensor
) -> None:
    context = participant.store.get(into)
    if asker is not None:
        context.peers.add(asker)
    context.accumulate(leaf, gradient)


def _is_awaited(sent: SentArguments, gradients: Gradients, run: Run) -> bool:
    """Gradients for arguments that this node sent, from a node that it did not ask.

    If a backward of the same pass waits for them here, they are its mail. Else they start a run of their own.
    """
    for id in sent.awaiting_tasks():
        task = find_task(id)
        if task is not None and task.is_in_pass(run.pass_id) and sent.put(id, gradients):
            return True
    return False


def _encode_contributions(
    run: Run, reply: autograd_pb2.PropagateGradientsReply, encoder: wire.Encoder
) -> None:
    """One entry a message, even if its recv node ran more than once."""
    totals: dict[MessageId, list[torch.Tensor | None]] = {}
    for id, gradients in run.contributions:
        add_gradients(totals.setdefault(id, [None] * len(gradients)), gradients)
    for id, total in totals.items():
        encode_gradients(reply.contributions.add(), id, total, encoder)


def serve_cleanup(participant: Participant, exchange: Exchange) -> None:
    """Lets go. Quick, so it is answered where it is read, before anything that was asked later."""
    request = wire.parse(autograd_pb2.CleanupContextRequest, exchange.request.body)
    context = ContextId.parse(request.context)
    if request.messages:
        found = participant.store.release(message_ids(request.messages))
    elif request.owner_is_gone and exchange.link is not None:
        found = participant.end_context_unless_linked(context, exchange.link.peer.node)
    else:
        found = participant.end_context(context)
    exchange.reply(autograd_pb2.CleanupContextReply(found=found).SerializeToString())
