"""Answering PropagateGradients and CleanupContext."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.autograd.graph import GradientEdge

from gradwire import wire
from gradwire.autograd.ids import ContextId, MessageId, message_ids, message_protos
from gradwire.autograd.local import Root, backward_to_leaves
from gradwire.autograd.participant import Participant, decode_gradients, encode_gradients
from gradwire.autograd.passes import Run, find_task
from gradwire.autograd.records import Gradients, SentArguments, add_gradients
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
    results = participant.store.results(id)
    reply = autograd_pb2.PropagateGradientsReply()
    encoder = wire.Encoder(attach_from=wire.ATTACH_FROM if link is not None else None)
    if results is not None:
        with torch.set_grad_enabled(request.create_graph):
            participant.receive_call(request.autograd, decoder, link, f"the gradients for {results.function}")
        gradients = decode_gradients(request.gradients, decoder, results.like)
        roots = [tensor for tensor, grad in zip(results.tensors, gradients, strict=True) if grad is not None]
        try:
            if results.check_fresh is not None:
                results.check_fresh()
            _run(participant, run, context, roots, [grad for grad in gradients if grad is not None])
        finally:
            if not request.retain_graph:
                participant.store.release([id])
        _encode_contributions(run, reply, encoder)
        if request.create_graph:
            own = MessageId.parse(request.autograd.message) if request.autograd.HasField("message") else None
            with torch.enable_grad():
                autograd = participant.send_results(
                    encoder.tensors, context, own, f"the backward of {results.function}"
                )
            if autograd is not None:
                reply.autograd.CopyFrom(autograd)
        # The last references to the graph, so that what it held is released with this very reply.
        del results, roots, gradients
        run.contributions.clear()
    else:
        arguments = participant.store.arguments(id)
        if arguments is None:
            raise NotFound(
                f"message {id} is not kept here, or no longer: its graph was freed by a backward without "
                "retain_graph, its context has ended, or its lease ran out"
            )
        gradients = decode_gradients(request.gradients, decoder, arguments.like)
        _to_arguments(participant, run, context, arguments, gradients)
        _encode_contributions(run, reply, encoder)
    table, attachments = encoder.finish()
    reply.tensors.CopyFrom(table)
    del encoder, decoder
    if link is not None:
        reply.released.extend(message_protos(participant.releases_to(link).take()))
    exchange.reply(reply.SerializeToString(), attachments)


def _run(
    participant: Participant,
    run: Run,
    context: ContextId,
    roots: Sequence[Root],
    gradients: Sequence[torch.Tensor],
) -> None:
    if not roots:
        return
    into = run.collect_into or context
    backward_to_leaves(
        roots,
        gradients,
        run,
        lambda leaf, gradient: participant.store.get(into).accumulate(leaf, gradient),
    )


def _to_arguments(
    participant: Participant, run: Run, context: ContextId, sent: SentArguments, gradients: Gradients
) -> None:
    """Gradients for arguments that this node sent, from a node that it did not ask.

    If a backward of the same pass waits for them here, they are its mail. Else they start a run of their own.
    """
    for id in sent.awaiting_tasks():
        task = find_task(id)
        if task is not None and task.is_in_pass(run.pass_id) and sent.put(id, gradients):
            return
    if sent.token is None or sent.token.grad_fn is None:
        return
    inputs = zip(sent.token.grad_fn.next_functions, gradients, strict=True)
    wanted = [
        (GradientEdge(node, slot), gradient)
        for (node, slot), gradient in inputs
        if node is not None and gradient is not None
    ]
    _run(participant, run, context, [edge for edge, _ in wanted], [gradient for _, gradient in wanted])


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
    if request.messages:
        found = participant.store.release(message_ids(request.messages))
    else:
        found = participant.end_context(ContextId.parse(request.context))
    exchange.reply(autograd_pb2.CleanupContextReply(found=found).SerializeToString())
