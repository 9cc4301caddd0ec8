"""Serving PropagateGradients and CleanupContext."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from gradwire import wire
from gradwire.autograd.backward import backward_into_grad, backward_to_leaves
from gradwire.autograd.engine import DistEngine
from gradwire.autograd.feedback import GradientCodecs
from gradwire.autograd.gradients import (
    Gradients,
    add_gradients,
    decode_gradients,
    encode_gradients,
    gradient_limits,
)
from gradwire.autograd.graph import Root
from gradwire.autograd.graph_tasks import BackwardRun, find_task
from gradwire.autograd.hooks import run_waiting_hooks
from gradwire.autograd.kept_state.suspended import SuspendedBackward
from gradwire.autograd.messages import receive_call, send_results
from gradwire.autograd.metadata import AutogradMetadata
from gradwire.autograd.modes import detecting_anomaly
from gradwire.autograd.records import GradientsToReturn, ReceivedTensors, SentArguments, SentResults
from gradwire.autograd.responses import AWAITS_END, FullResponse, ShortResponse
from gradwire.autograd.short_gradients import GradientsWriter, ShortRequest
from gradwire.errors import NotFound
from gradwire.proto.v1 import autograd_pb2
from gradwire.runtime.scope import Scope, current_scope, entered
from gradwire.system.threads import computing
from gradwire.transport.base import NO_PAYLOAD, Link, ServerCall
from gradwire.wire.ids import AutogradMessageId, ContextId, message_ids

__all__ = ["serve_cleanup", "serve_propagate"]

_MAX_SUSPENDED = 1000
"""Each suspended backward has a thread. Beyond this number, gradients go through the graph one by one."""

Sent = SentResults | SentArguments


def serve_propagate(engine: DistEngine, server_call: ServerCall, scope: Scope) -> None:
    """Backpropagates through messages that this peer sent, and responds when all is done."""
    link = server_call.link
    if link is not None and wire.is_short(server_call.request.body):
        _serve_short(engine, server_call, link, scope)
        return
    request = wire.parse(autograd_pb2.PropagateGradientsRequest, server_call.request.body)
    context = ContextId.parse(request.context)
    pass_id = AutogradMessageId.parse(getattr(request, "pass"))
    _begin(engine, pass_id, context, message_ids(request.released))
    if request.pass_ended:
        with entered(scope):
            run_waiting_hooks(engine, pass_id)
        server_call.respond(autograd_pb2.PropagateGradientsResponse().SerializeToString())
        return
    messages = [request.gradients, *request.more_gradients] if request.HasField("gradients") else []
    all_sent = [_find(engine, AutogradMessageId.parse(message.message)) for message in messages]
    metadata = [tensor for sent in all_sent for tensor in sent.metadata]
    limits = gradient_limits(engine.limits if link is None else link.limits, metadata)
    decoder = wire.Decoder(request.tensors, server_call.request.attachments, limits=limits)
    compression = request.compression if request.HasField("compression") else None
    server_call.request = NO_PAYLOAD  # the gradients live in the decoder now
    run = BackwardRun(
        engine,
        pass_id,
        context,
        requester=link.peer.id if link is not None else context.peer,
        collect_leaves=not request.skip_leaves,
        collect_into=ContextId.parse(request.collect_into) if request.HasField("collect_into") else None,
        create_graph=request.create_graph,
    )
    what = _describe(all_sent)
    response = autograd_pb2.PropagateGradientsResponse()
    encoder = wire.Encoder(attach_from=None) if link is None else wire.Encoder(inline_bytes=link.inline_bytes)
    # The context of the forward: code that runs in backward, such as a checkpoint's, may make calls.
    scope = scope.for_request(context, request.detect_anomaly)
    in_use = engine.container.in_use(context, run.collect_into, requester=run.requester)
    with entered(scope), in_use, detecting_anomaly(request.detect_anomaly):
        if request.create_graph:
            with torch.enable_grad():
                came = AutogradMetadata.parse(request.autograd)
                receive_call(engine, came, decoder, link, f"the gradients for {what}", compression)
        items = [
            (sent, decode_gradients(message, decoder, sent.metadata))
            for sent, message in zip(all_sent, messages, strict=True)
        ]
        contributions, response.is_suspended = _run_or_suspend(
            engine, run, context, items, request, server_call
        )
        response.awaits_end = engine.passes.hooks.any_waiting(pass_id)
        _encode_contributions(contributions, run, response, encoder, compression)
        made = None
        if request.create_graph:
            with torch.enable_grad():
                made = send_results(engine, encoder.tensors, context, came.message, what)
    # The last references to the graph, so that what it held is released with this very response.
    del all_sent, items, contributions
    table, attachments = encoder.finish()
    saved = decoder.saved + encoder.saved
    response.tensors.CopyFrom(table)
    del encoder, decoder, run
    if link is not None and saved:
        link.count_saved(saved)
    engine.releases.respond(server_call, FullResponse(response, attachments, made))


def _serve_short(engine: DistEngine, server_call: ServerCall, link: Link, scope: Scope) -> None:
    """`serve_propagate` for a request in short."""
    request = ShortRequest(server_call.request.body)
    _begin(engine, request.pass_id, request.context, request.released)
    sent = _find(engine, request.message)
    gradients = request.gradients(sent.metadata, server_call.request.attachments)
    server_call.request = NO_PAYLOAD
    run = BackwardRun(
        engine,
        request.pass_id,
        request.context,
        link.peer.id,
        collect_leaves=not request.skip_leaves,
        collect_into=request.collect_into,
    )
    context = request.context
    scope = scope.for_request(context, detect_anomaly=False)
    with entered(scope), engine.container.in_use(context, requester=run.requester):
        _run_or_suspend(engine, run, context, [(sent, gradients)], request, server_call)
        awaits_end = engine.passes.hooks.any_waiting(request.pass_id)
        response = _short_contributions(run, awaits_end) or _full_contributions(run, awaits_end, link)
    del sent, gradients, run  # as in `serve_propagate`
    engine.releases.respond(server_call, response)


def _begin(
    engine: DistEngine,
    pass_id: AutogradMessageId,
    context: ContextId,
    released: Sequence[AutogradMessageId],
) -> None:
    """What comes first in each request: its releases, and whether its pass still goes on."""
    if released:
        engine.container.release(released)
    if engine.is_over(pass_id, context):
        raise NotFound(
            f"pass {pass_id} is over: its backward failed or was given up, so this no longer counts"
        )


def _find(engine: DistEngine, id: AutogradMessageId) -> Sent:
    sent = engine.container.results(id) or engine.container.arguments(id)
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


def _run_or_suspend(
    engine: DistEngine,
    run: BackwardRun,
    context: ContextId,
    items: Sequence[tuple[Sent, Gradients]],
    request: autograd_pb2.PropagateGradientsRequest | ShortRequest,
    server_call: ServerCall,
) -> tuple[list[GradientsToReturn], bool]:
    """Backpropagates, and lets go of the graph unless the requester wants it again. The contributions, and
    whether the backward is suspended until more gradients come."""
    results = [(sent, gradients) for sent, gradients in items if isinstance(sent, SentResults)]
    run.checks = [sent.check_fresh for sent, _ in results if sent.check_fresh is not None]
    try:
        if not isinstance(request, ShortRequest) and request.HasField("suspended_backward"):
            suspended = _suspended(engine, run, context, items, request, server_call)
            if suspended is not None:
                return suspended.add(results, server_call)
        _run(engine, run, context, items)
        return run.contributions, False
    finally:
        if not request.retain_graph:
            engine.container.release([sent.id for sent, _ in results])


def _suspended(
    engine: DistEngine,
    run: BackwardRun,
    context: ContextId,
    items: Sequence[tuple[Sent, Gradients]],
    request: autograd_pb2.PropagateGradientsRequest,
    server_call: ServerCall,
) -> SuspendedBackward | None:
    """The suspended backward that gradients are for, new if they are the first; None if it cannot be
    suspended."""
    id = AutogradMessageId.parse(request.suspended_backward)
    suspended = engine.suspended.get(id)
    if suspended is None and not request.gradients_to_come:
        raise NotFound(f"no backward {id} is suspended here, or no longer: it failed or was given up")
    if suspended is None:
        to_come = [_find(engine, id) for id in message_ids(request.gradients_to_come)]
        all_results = [sent for sent in (*to_come, *dict(items)) if isinstance(sent, SentResults)]
        suspended = SuspendedBackward(run, server_call)
        root = suspended.root(all_results) if len(engine.suspended) < _MAX_SUSPENDED else None
        if root is None:
            return None
        suspended.start(id, partial(_run_suspended, engine, run, context, [root], request.detect_anomaly))
    return suspended


def _run_suspended(
    engine: DistEngine, run: BackwardRun, context: ContextId, roots: list[torch.Tensor], detect_anomaly: bool
) -> None:
    """What a suspended backward runs, on its own thread."""
    in_use = engine.container.in_use(context, run.collect_into, requester=run.requester)
    with computing(), entered(current_scope()), in_use, detecting_anomaly(detect_anomaly):
        _backward(engine, run, context, roots, [torch.zeros(())])
    roots.clear()  # and the graph with them, before there is a response


def _run(
    engine: DistEngine, run: BackwardRun, context: ContextId, items: Sequence[tuple[Sent, Gradients]]
) -> None:
    """Backpropagates from tensors that this peer sent."""
    wanted = [
        (edge, gradient)
        for sent, gradients in items
        if (awaited := engine.container.arguments(sent.id)) is None
        or not _deliver_if_awaited(awaited, gradients, run)
        for edge, gradient in zip(sent.edges, gradients, strict=True)
        if edge is not None and gradient is not None
    ]
    if wanted:
        _backward(engine, run, context, [edge for edge, _ in wanted], [gradient for _, gradient in wanted])


def _backward(
    engine: DistEngine,
    run: BackwardRun,
    context: ContextId,
    roots: Sequence[Root],
    gradients: Sequence[torch.Tensor],
) -> None:
    into = run.collect_into or context
    is_plain = run.collect_into is None and run.pass_id.peer == engine.peer
    if run.collect_leaves and (is_plain or into == engine.ambient):
        # A plain backward() of this peer started the pass, or the context is its own ambient one: gradients
        # belong in `.grad`.
        backward_into_grad(roots, gradients, run)
    else:
        backward_to_leaves(roots, gradients, run, partial(engine.accumulate, run, into))


def _deliver_if_awaited(sent: SentArguments, gradients: Gradients, run: BackwardRun) -> bool:
    """Hands gradients to a graph task of the same pass that waits for them here. Returns whether there is
    one.

    If there is none, they start a backward of their own.
    """
    for id in sent.awaiting_tasks():
        task = find_task(id)
        if task is not None and task.is_in_pass(run.pass_id) and sent.put(id, gradients):
            return True
    return False


def _encode_contributions(
    contributions: Sequence[GradientsToReturn],
    run: BackwardRun,
    response: autograd_pb2.PropagateGradientsResponse,
    encoder: wire.Encoder,
    compression: autograd_pb2.Compression | None,
) -> None:
    codecs = None
    if compression is not None:
        codecs = GradientCodecs(
            run.engine.feedback, run.requester or 0, compression, create_graph=run.create_graph
        )
    for position, (received, total) in enumerate(_totals(contributions)):
        message = response.contributions.add()
        encode_gradients(message, received.source, total, encoder, codecs, position)


def _short_contributions(run: BackwardRun, awaits_end: bool) -> ShortResponse | None:
    """The response to a request in short; None if it has to be in full."""
    short = GradientsWriter()
    for received, total in _totals(run.contributions):
        if not short.add(received.source, total, received.metadata):
            return None
    content, attachments = short.of_all()
    return ShortResponse(AWAITS_END if awaits_end else 0, len(short.messages), None, content, attachments)


def _full_contributions(run: BackwardRun, awaits_end: bool, link: Link) -> FullResponse:
    """The response in full to a request in short."""
    response = autograd_pb2.PropagateGradientsResponse(awaits_end=awaits_end)
    encoder = wire.Encoder(inline_bytes=link.inline_bytes)
    _encode_contributions(run.contributions, run, response, encoder, None)
    table, attachments = encoder.finish()
    response.tensors.CopyFrom(table)
    return FullResponse(response, attachments, None)


def _totals(contributions: Sequence[GradientsToReturn]) -> list[GradientsToReturn]:
    """The sum for each message: its recv node may run more than once."""
    if len(contributions) < 2:
        return list(contributions)
    totals: dict[AutogradMessageId, tuple[ReceivedTensors, list[torch.Tensor | None]]] = {}
    for received, gradients in contributions:
        _, total = totals.setdefault(received.source, (received, [None] * len(gradients)))
        add_gradients(total, gradients)
    return list(totals.values())


def serve_cleanup(engine: DistEngine, server_call: ServerCall) -> None:
    """Serves CleanupContext on the thread that reads: it is quick, and done before any later request."""
    request = wire.parse(autograd_pb2.CleanupContextRequest, server_call.request.body)
    context = ContextId.parse(request.context)
    if request.messages:  # releases name no context
        found = engine.container.release(message_ids(request.messages))
    elif request.owner_is_gone and server_call.link is not None:
        found = engine.leases.end_unless_linked(context, server_call.link.peer.id)
    else:
        found = engine.leases.end(engine.container.with_key(context))
    server_call.respond(autograd_pb2.CleanupContextResponse(found=found).SerializeToString())
