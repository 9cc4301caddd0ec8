"""Sending gradients to the peers that tensors came from, and taking in the contributions that come back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from gradwire import wire
from gradwire.autograd.feedback import GradientCodecs
from gradwire.autograd.gradients import Gradients, decode_gradients, encode_gradients, gradient_limits
from gradwire.autograd.metadata import AutogradMetadata
from gradwire.autograd.modes import anomaly_is_wanted
from gradwire.autograd.records import GradientsToReturn, SentArguments
from gradwire.autograd.responses import AWAITS_END, read_short
from gradwire.autograd.short_gradients import GradientsReader, GradientsWriter, short_request
from gradwire.errors import Cancelled, GradwireError, MalformedMessage, NotFound
from gradwire.proto.v1 import autograd_pb2, link_pb2
from gradwire.runtime.scope import Scope, current_scope, waiting
from gradwire.transport.base import Link, Payload, ResponseFuture
from gradwire.wire.ids import AutogradMessageId, ContextId, message_ids, message_protos

if TYPE_CHECKING:
    from gradwire.autograd.engine import DistEngine
    from gradwire.autograd.graph_tasks import GraphTaskState

__all__ = ["GradientsToSend", "Propagation", "send_gradients", "tell_pass_ended"]


@dataclass(slots=True)
class GradientsToSend:
    """Gradients for tensors of one peer and one context, to be backpropagated in one run. In the plain case:
    one item."""

    items: Sequence[GradientsToReturn]
    suspended: AutogradMessageId | None = None
    """Kept state: the suspended backward that they are part of."""
    to_come: Sequence[AutogradMessageId] = ()
    """Kept state: results whose gradients will come later, if the suspended backward starts with these."""


class Propagation:
    """Gradients on their way to the peer that sent the tensors, and the contributions that come back."""

    def __init__(
        self,
        future: ResponseFuture,
        deliver: Callable[[Any], bool],
        read_for: Callable[[ResponseFuture], None],
        what: str,
        suspended: AutogradMessageId | None = None,
    ) -> None:
        self._read_for = read_for
        self._future = future
        self._deliver: Callable[[Any], bool] | None = deliver
        self._is_delivered = False
        self._lock = threading.Lock()
        self.what = what
        self.suspended = suspended
        """Kept state: the peer's suspended backward; None once the peer has said that it went to its end."""

    @property
    def is_settled(self) -> bool:
        """Whether there is a response, so that waiting takes no time."""
        return self._future.done()

    def wait(self) -> None:
        """Returns when everything that the gradients set off is done, and the contributions are with the sent
        arguments."""
        if self._is_delivered:
            return
        failure = self._wait_for_failure()
        if failure is not None:
            # Raises a copy: the future keeps the original, whose traceback would refer back to the future.
            # That cycle would keep the tensors of all frames until the garbage collector runs.
            raise _with_note(failure, f"while propagating gradients to {self.what}")
        with self._lock:
            if self._deliver is not None:
                deliver, self._deliver = self._deliver, None
                if not deliver(self._future.result()):
                    self.suspended = None
                self._is_delivered = True

    def _wait_for_failure(self) -> BaseException | None:
        try:
            return waiting(self._wait_for_outcome)
        except CancelledError:
            return Cancelled("the backward that it was part of was given up")
        except BaseException:  # the user interrupts
            self._future.cancel()
            raise

    def _wait_for_outcome(self) -> BaseException | None:
        self._read_for(self._future)
        return self._future.exception()

    def cancel(self) -> None:
        future = self._future
        if future.cancel():
            return
        with self._lock:
            deliver, self._deliver = self._deliver, None
        if deliver is not None and future.exception() is None and future.on_discarded is not None:
            # The response came, but will not be decoded.
            future.on_discarded(future.result())


def _with_note(error: BaseException, note: str) -> BaseException:
    if isinstance(error, GradwireError):
        notes = getattr(error, "__notes__", ())
        error = error.again()
        error.__notes__ = [*notes, note]
    return error


def send_gradients(
    to_send: GradientsToSend, task: GraphTaskState, expect: Callable[[Propagation], None]
) -> Propagation:
    """Sends gradients to where the tensors came from.

    `expect` is told before they leave: contributions from a third peer may be back before this returns.
    """
    to, _ = to_send.items[0]
    engine = to.engine
    link = engine.link_to(to)
    releases = engine.releases.to(link)
    retain_graph = task.retain_graph or not all(received.is_freed for received, _ in to_send.items)
    scope = current_scope()
    short = _in_short(to_send, task, link, scope)
    sent = None
    if short is None:
        encoder = wire.Encoder(inline_bytes=link.inline_bytes)
        request = _request_of(to_send, task, link, encoder, scope)
        request.retain_graph = retain_graph
        if task.create_graph:
            # Propagating is then itself a call that is recorded. (Imported here, because `send_recv` imports
            # this module.)
            from gradwire.autograd.send_recv import send

            metadata = AutogradMetadata(to.context)
            sent = send(engine, metadata, encoder.tensors, link)
            metadata.write(request.autograd)
    future = ResponseFuture()
    future.on_discarded = releases.on_discarded(autograd_pb2.PropagateGradientsResponse)
    # Without retain_graph the other peer releases these results after serving the request, if that reaches
    # it.
    lets_go = [] if retain_graph else [item for item, _ in to_send.items if not item.are_arguments]
    # Last, so that nothing which was taken can get lost before the undoing is arranged.
    released = releases.take()
    undone = [*released, *(received.source for received in lets_go)]
    if undone or sent is not None:
        engine.releases.undo_if_failed(future, link, None if sent is None else sent.id, undone)
    what = f"{to.what} on {link.peer}"
    # Not the task itself: its destructor, which ends it when the engine drops it, must not wait for a
    # response.
    awaited, awaiting_end = task.awaited, task.awaiting_end
    deliver = partial(_deliver, engine, task.id, awaited, awaiting_end, link, what, to.compression)
    try:
        if short is None:
            request.released.extend(message_protos(released))
            table, attachments = encoder.finish()
            request.tensors.CopyFrom(table)
            link.count_saved(encoder.saved)
            body = request.SerializeToString()
        else:
            body, attachments = short_request(
                task.pass_id(engine),
                to.context,
                short,
                released,
                retain_graph=retain_graph,
                skip_leaves=not task.collect_leaves,
                collect=task.run is not None and task.run.collect_into is not None,
            )
        scope.cancel_with_caller(future)
        propagation = Propagation(future, deliver, link.read_for, what, to_send.suspended)
        expect(propagation)
        link.send_request(
            link_pb2.METHOD_PROPAGATE_GRADIENTS,
            body,
            attachments,
            timeout=scope.time_left(),
            future=future,
        )
    except BaseException:
        future.cancel()
        raise
    for received in lets_go:
        received.mark_released()
    return propagation


def _in_short(
    to_send: GradientsToSend, task: GraphTaskState, link: Link, scope: Scope
) -> GradientsWriter | None:
    """The gradients in short; None if the request has to be in full."""
    ((to, gradients), *others), run = to_send.items, task.run
    if (
        others
        or not link.plans.are_understood
        or task.create_graph
        or to_send.suspended is not None
        or to.compression is not None
        or (run is not None and run.collect_into not in (None, to.context))
        or anomaly_is_wanted(scope)
    ):
        return None
    short = GradientsWriter()
    return short if short.add(to.source, gradients, to.metadata) else None


def _request_of(
    to_send: GradientsToSend, task: GraphTaskState, link: Link, encoder: wire.Encoder, scope: Scope
) -> autograd_pb2.PropagateGradientsRequest:
    (to, _), run = to_send.items[0], task.run
    request = autograd_pb2.PropagateGradientsRequest(
        create_graph=task.create_graph,
        skip_leaves=not task.collect_leaves,
        detect_anomaly=anomaly_is_wanted(scope),
    )
    to.context.write(request.context)
    task.pass_id(to.engine).write(getattr(request, "pass"))
    if run is not None and run.collect_into is not None:
        run.collect_into.write(request.collect_into)
    if to_send.suspended is not None:
        to_send.suspended.write(request.suspended_backward)
        request.gradients_to_come.extend(message_protos(to_send.to_come))
    if to.compression is not None:
        request.compression.CopyFrom(to.compression)
    for index, (received, gradients) in enumerate(to_send.items):
        message = request.more_gradients.add() if index else request.gradients
        codecs = None
        if received.compression is not None and received.compression.backward in link.peer_codecs:
            codecs = GradientCodecs(
                to.engine.feedback, link.peer.id, received.compression, create_graph=task.create_graph
            )
        encode_gradients(message, received.source, gradients, encoder, codecs)
    return request


def _deliver(
    engine: DistEngine,
    task: int,
    awaited: dict[AutogradMessageId, SentArguments],
    awaiting_end: set[Link],
    link: Link,
    what: str,
    compression: autograd_pb2.Compression | None,
    payload: Payload,
) -> bool:
    """Puts the contributions of a response to the arguments that they are for. Whether the backward that made
    them is suspended."""
    if wire.is_short(payload.body):
        flags, count, _, released, at = read_short(payload.body, AWAITS_END)
        awaits_end, is_suspended = bool(flags & AWAITS_END), False
        contributions = _contributions_in_short(payload, at, count, awaited, link)
    else:
        response = wire.parse(autograd_pb2.PropagateGradientsResponse, payload.body)
        released = message_ids(response.released)
        awaits_end, is_suspended = response.awaits_end, response.is_suspended
        contributions = _contributions_in_full(payload, response, engine, awaited, link, what, compression)
    try:
        if awaits_end:
            awaiting_end.add(link)
        for sent, gradients in contributions:
            if not sent.put(task, gradients):
                raise MalformedMessage(f"{link.peer} sent gradients that nothing here awaits: {sent.id}")
        return is_suspended
    finally:
        if released:
            engine.container.release(released)


def _contributions_in_short(
    payload: Payload, at: int, count: int, awaited: dict[AutogradMessageId, SentArguments], link: Link
) -> Iterator[tuple[SentArguments, Gradients]]:
    """The contributions to `count` messages, which begin at `at`."""
    reader = GradientsReader(payload.body, at)
    all_sent = []
    for _ in range(count):
        all_sent.append(_awaited(awaited, reader.read_message(), link))
        reader.expect(all_sent[-1].metadata)
    yield from zip(all_sent, reader.read(payload.attachments), strict=True)


def _contributions_in_full(
    payload: Payload,
    response: autograd_pb2.PropagateGradientsResponse,
    engine: DistEngine,
    awaited: dict[AutogradMessageId, SentArguments],
    link: Link,
    what: str,
    compression: autograd_pb2.Compression | None,
) -> Iterator[tuple[SentArguments, Gradients]]:
    ids = [AutogradMessageId.parse(contribution.message) for contribution in response.contributions]
    expected = (awaited.get(id) or engine.container.arguments(id) for id in ids)
    metadata = [tensor for sent in expected if sent is not None for tensor in sent.metadata]
    limits = gradient_limits(link.limits, metadata)
    decoder = wire.Decoder(response.tensors, payload.attachments, limits=limits)
    link.count_saved(decoder.saved)
    if response.HasField("autograd"):
        from gradwire.autograd.send_recv import receive

        what = f"the backward of {what}"
        came = AutogradMetadata.parse(response.autograd)
        if came.message is not None:
            receive(engine, came, came.message, decoder, link, what, compression, are_arguments=False)
    for id, contribution in zip(ids, response.contributions, strict=True):
        sent = _awaited(awaited, id, link)
        yield sent, decode_gradients(contribution, decoder, sent.metadata)


def _awaited(
    awaited: dict[AutogradMessageId, SentArguments], id: AutogradMessageId, link: Link
) -> SentArguments:
    # Not those of the container: another response may have overtaken this one, and released them from it.
    sent = awaited.get(id)
    if sent is None:
        raise NotFound(
            f"{link.peer} sent gradients for arguments that this peer no longer keeps: they were sent in a "
            "context that has ended, or in a call that failed; detach what is kept on a worker between "
            "contexts"
        )
    return sent


def tell_pass_ended(context: ContextId, pass_id: AutogradMessageId, link: Link) -> Propagation:
    """Tells a peer that a pass is over everywhere. The peer responds when its waiting hooks have run."""
    request = autograd_pb2.PropagateGradientsRequest(pass_ended=True)
    context.write(request.context)
    pass_id.write(getattr(request, "pass"))
    future = ResponseFuture()
    propagation = Propagation(future, lambda _: False, link.read_for, f"the hooks on {link.peer}")
    scope = current_scope()
    scope.cancel_with_caller(future)
    link.send_request(
        link_pb2.METHOD_PROPAGATE_GRADIENTS,
        request.SerializeToString(),
        timeout=scope.time_left(),
        future=future,
    )
    return propagation
