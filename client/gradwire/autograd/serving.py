"""Answering PropagateGradients and CleanupContext."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import torch

from gradwire import wire
from gradwire._scope import current_scope, entered
from gradwire.autograd.feedback import GradientCodecs
from gradwire.autograd.holding import HeldExchange, HeldRun, chain_turns
from gradwire.autograd.hooks import run_waiting_hooks
from gradwire.autograd.ids import ContextId, MessageId, message_ids
from gradwire.autograd.local import Root, backward_into_grad, backward_to_leaves
from gradwire.autograd.modes import detecting_anomaly
from gradwire.autograd.participant import Participant
from gradwire.autograd.passes import Run, find_task
from gradwire.autograd.propagating import decode_gradients, encode_gradients, gradient_limits
from gradwire.autograd.records import Gradients, SentArguments, SentResults, add_gradients
from gradwire.errors import NotFound
from gradwire.proto.v1 import autograd_pb2
from gradwire.transport.base import Exchange

__all__ = ["serve_cleanup", "serve_propagate"]

_MOST_HELD = 1000
"""Each run that is held open has a thread. Beyond this, gradients go through the graph one by one."""

Sent = SentResults | SentArguments
Contributions = Sequence[tuple[MessageId, Gradients]]


def serve_propagate(participant: Participant, exchange: Exchange) -> None:
    """Backpropagates through messages that this node sent, and answers when all is done."""
    request = wire.parse(autograd_pb2.PropagateGradientsRequest, exchange.request.body)
    link = exchange.link
    if request.released:
        participant.store.release(message_ids(request.released))
    context = ContextId.parse(request.context)
    pass_id = MessageId.parse(getattr(request, "pass"))
    if participant.is_over(pass_id):
        raise NotFound(
            f"pass {pass_id} is over: its backward failed or was given up, so this no longer counts"
        )
    if request.pass_ended:
        run_waiting_hooks(participant, pass_id)
        exchange.reply(autograd_pb2.PropagateGradientsReply().SerializeToString())
        return
    messages = [request.gradients, *request.also] if request.HasField("gradients") else []
    all_sent = [_find(participant, MessageId.parse(message.message)) for message in messages]
    limits = gradient_limits(participant.limits if link is None else link.limits, all_sent)
    decoder = wire.Decoder(request.tensors, exchange.request.attachments, limits=limits)
    compression = request.compression if request.HasField("compression") else None
    exchange.request = type(exchange.request)(b"")  # the gradients live in the decoder now
    run = Run(
        participant,
        pass_id,
        asker=link.peer.node if link is not None else context.node,
        collect_leaves=not request.skip_leaves,
        collect_into=ContextId.parse(request.collect_into) if request.HasField("collect_into") else None,
        create_graph=request.create_graph,
    )
    what = _describe(all_sent)
    reply = autograd_pb2.PropagateGradientsReply()
    encoder = wire.Encoder(attach_from=None) if link is None else wire.Encoder(inline_bytes=link.inline_bytes)
    # The context of the forward: code that runs in backward, such as a checkpoint's, may make calls.
    scope = current_scope().in_context(context, request.detect_anomaly)
    with entered(scope), participant.store.in_use(context), detecting_anomaly(request.detect_anomaly):
        if request.create_graph:
            with torch.enable_grad():
                participant.receive_call(
                    request.autograd, decoder, link, f"the gradients for {what}", compression
                )
        items = [
            (sent, decode_gradients(message, decoder, sent.like))
            for sent, message in zip(all_sent, messages, strict=True)
        ]
        try:
            contributions, reply.is_held = _run(participant, run, context, items, request, exchange)
        finally:
            if not request.retain_graph:
                participant.store.release([sent.id for sent in all_sent if isinstance(sent, SentResults)])
        reply.awaits_end = participant.hooks.wait_for(pass_id)
        _encode_contributions(contributions, run, reply, encoder, compression)
        if request.create_graph:
            own = MessageId.parse(request.autograd.message) if request.autograd.HasField("message") else None
            with torch.enable_grad():
                autograd = participant.send_results(encoder.tensors, context, own, what)
            if autograd is not None:
                reply.autograd.CopyFrom(autograd)
    # The last references to the graph, so that what it held is released with this very reply.
    del all_sent, items, contributions
    table, attachments = encoder.finish()
    saved = decoder.saved + encoder.saved
    reply.tensors.CopyFrom(table)
    del encoder, decoder, run
    if link is not None and saved:
        link.count_saved(saved)
    participant.reply(exchange, reply, attachments)


def _find(participant: Participant, id: MessageId) -> Sent:
    sent = participant.store.results(id) or participant.store.arguments(id)
    if sent is None:
        raise NotFound(
            f"message {id} is not kept here, or no longer: its graph was freed by a backward without "
            "retain_graph, its context has ended, or its lease ran out"
        )
    return sent


def _describe(all_sent: Sequence[Sent]) -> str:
    """For people: what runs."""
    functions = dict.fromkeys(sent.function for sent in all_sent if isinstance(sent, SentResults))
    return f"the backward of {', '.join(functions)}" if functions else "a backward"


def _run(
    participant: Participant,
    run: Run,
    context: ContextId,
    items: Sequence[tuple[Sent, Gradients]],
    request: autograd_pb2.PropagateGradientsRequest,
    exchange: Exchange,
) -> tuple[Contributions, bool]:
    """Backpropagates. The contributions, and whether the run is held open for more gradients."""
    run.checks = [
        sent.check_fresh
        for sent, _ in items
        if isinstance(sent, SentResults) and sent.check_fresh is not None
    ]
    if not request.HasField("held_run"):
        _propagate(participant, run, context, items)
        return run.contributions, False
    results = [(sent, gradients) for sent, gradients in items if isinstance(sent, SentResults)]
    id = MessageId.parse(request.held_run)
    held = participant.held.get(id)
    if held is None and not request.to_come:
        raise NotFound(f"run {id} is not held open here, or no longer: its backward failed or was given up")
    if held is None:
        to_come = [_find(participant, id) for id in message_ids(request.to_come)]
        all_results = [sent for sent in (*to_come, *dict(items)) if isinstance(sent, SentResults)]
        root = chain_turns(all_results) if len(participant.held) < _MOST_HELD else None
        if root is None:
            _propagate(participant, run, context, items)
            return run.contributions, False
        held = run.held = HeldRun(id, participant, run, HeldExchange(exchange))
        held.start(partial(_hold_open, participant, run, context, root, request.detect_anomaly))
    return held.ask(results, exchange)


def _hold_open(
    participant: Participant, run: Run, context: ContextId, root: torch.Tensor, detect_anomaly: bool
) -> None:
    """What a run does that is held open, on its own thread."""
    assert run.held is not None
    with (
        participant.store.in_use(context),
        entered(replace(current_scope(), exchange=run.held.exchange)),
        detecting_anomaly(detect_anomaly),
    ):
        _backward(participant, run, context, [root], [torch.zeros(())])


def _propagate(
    participant: Participant, run: Run, context: ContextId, items: Sequence[tuple[Sent, Gradients]]
) -> None:
    """Backpropagates from tensors that this node sent."""
    wanted = [
        (edge, gradient)
        for sent, gradients in items
        if not _is_awaited(participant.store.arguments(sent.id), gradients, run)
        for edge, gradient in zip(sent.edges, gradients, strict=True)
        if edge is not None and gradient is not None
    ]
    if wanted:
        _backward(
            participant, run, context, [edge for edge, _ in wanted], [gradient for _, gradient in wanted]
        )


def _backward(
    participant: Participant,
    run: Run,
    context: ContextId,
    roots: Sequence[Root],
    gradients: Sequence[torch.Tensor],
) -> None:
    into = run.collect_into or context
    is_plain = run.collect_into is None and run.pass_id.node == participant.node
    if run.collect_leaves and (is_plain or into == participant.ambient):
        # Part of a plain backward() here that comes back from elsewhere, or what would be one if it had
        # started here.
        backward_into_grad(roots, gradients, run)
    else:
        backward_to_leaves(roots, gradients, run, partial(participant.collect, run, into))


def _is_awaited(sent: SentArguments | None, gradients: Gradients, run: Run) -> bool:
    """Gradients for arguments that this node sent, from a node that it did not ask, or for its own results.

    If a backward of the same pass waits for them here, they are its mail. Else they start a run of their own.
    """
    if sent is None:
        return False
    for id in sent.awaiting_tasks():
        task = find_task(id)
        if task is not None and task.is_in_pass(run.pass_id) and sent.put(id, gradients):
            return True
    return False


def _encode_contributions(
    contributions: Contributions,
    run: Run,
    reply: autograd_pb2.PropagateGradientsReply,
    encoder: wire.Encoder,
    compression: autograd_pb2.Compression | None,
) -> None:
    """One entry a message, even if its recv node ran more than once."""
    codecs = None
    if compression is not None:
        codecs = GradientCodecs(
            run.participant.feedback, run.asker or 0, compression, create_graph=run.create_graph
        )
    totals: dict[MessageId, list[torch.Tensor | None]] = {}
    for id, gradients in contributions:
        add_gradients(totals.setdefault(id, [None] * len(gradients)), gradients)
    for position, (id, total) in enumerate(totals.items()):
        encode_gradients(reply.contributions.add(), id, total, encoder, codecs, position)


def serve_cleanup(participant: Participant, exchange: Exchange) -> None:
    """Lets go. Quick, so it is answered where it is read, before anything that was asked later."""
    request = wire.parse(autograd_pb2.CleanupContextRequest, exchange.request.body)
    context = ContextId.parse(request.context)
    if request.held_runs:
        runs = [participant.held.get(id) for id in message_ids(request.held_runs)]
        for held in runs:
            if held is not None:
                held.give_up()
        found = any(runs)
    elif request.messages:
        found = participant.store.release(message_ids(request.messages))
    elif request.owner_is_gone and exchange.link is not None:
        found = participant.end_context_unless_linked(context, exchange.link.peer.node)
    else:
        found = participant.end_context(context)
    exchange.reply(autograd_pb2.CleanupContextReply(found=found).SerializeToString())
