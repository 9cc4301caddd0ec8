"""Sending gradients to the nodes that the tensors came from, and taking in what comes back."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from gradwire import wire
from gradwire.autograd.feedback import GradientCodecs
from gradwire.autograd.modes import anomaly_is_wanted
from gradwire.autograd.records import Gradients, ReceivedTensors, SentArguments, SentResults
from gradwire.errors import Cancelled, GradwireError, MalformedMessage, NotFound
from gradwire.proto.v1 import autograd_pb2, link_pb2
from gradwire.runtime.scope import cancel_with_caller, time_left, waiting
from gradwire.transport.base import Link, Payload, ResponseFuture
from gradwire.wire.ids import AutogradMessageId, ContextId, message_ids, message_protos

if TYPE_CHECKING:
    from gradwire.autograd.engine import DistEngine
    from gradwire.autograd.graph_tasks import GraphTaskState

__all__ = [
    "Batch",
    "HeldElsewhere",
    "Propagation",
    "decode_gradients",
    "encode_gradients",
    "gradient_limits",
    "propagate",
    "tell_pass_ended",
]


@dataclass(slots=True)
class HeldElsewhere:
    """A run on another node that is held open for gradients which are still to come."""

    id: AutogradMessageId
    like: ReceivedTensors
    """One of the results that it started with: where it runs."""
    to_come: set[ReceivedTensors]
    is_open: bool = True


@dataclass(slots=True)
class Batch:
    """Gradients for results of one node, to be backpropagated in one run."""

    items: Sequence[tuple[ReceivedTensors, Gradients]]
    like: ReceivedTensors
    """One of the results, or one like them: where they came from, and in which context."""
    held: HeldElsewhere | None = None
    """The run that they are part of, if it is held open."""
    announced: Sequence[ReceivedTensors] = ()
    """What will come later in that run, if it starts with these."""
    not_awaited: Sequence[ReceivedTensors] = ()
    """Results that the run waited for and, from these on, waits for no longer: what earlier gradients have in
    common with them goes on now."""


class Propagation:
    """Gradients on their way to the node that sent the tensors, and what comes back."""

    def __init__(
        self,
        future: ResponseFuture,
        deliver: Callable[[Any], None],
        read_for: Callable[[ResponseFuture], None],
        what: str,
    ) -> None:
        self._read_for = read_for
        self._future = future
        self._deliver: Callable[[Any], None] | None = deliver
        self._is_delivered = False
        self._lock = threading.Lock()
        self.what = what

    @property
    def is_settled(self) -> bool:
        """Whether there is an answer, so that waiting takes no time."""
        return self._future.done()

    def wait(self) -> None:
        """Returns when everything that it set off is done and its contributions are in the mailboxes."""
        if self._is_delivered:
            return
        failure = self._wait_for_failure()
        if failure is not None:
            # A copy. The traceback of the one that the future keeps would lead back to the future, and
            # such a cycle keeps the activations of all frames on the way until the collector comes.
            raise _with_note(failure, f"while propagating gradients to {self.what}")
        with self._lock:
            if self._deliver is not None:
                deliver, self._deliver = self._deliver, None
                deliver(self._future.result())
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
        if self._future.cancel():
            return
        with self._lock:
            deliver, self._deliver = self._deliver, None
        if deliver is not None and self._future.exception() is None and self._future.on_discarded is not None:
            # The answer came, but nobody will look into it.
            self._future.on_discarded(self._future.result())


def _with_note(error: BaseException, note: str) -> BaseException:
    if isinstance(error, GradwireError):
        notes = getattr(error, "__notes__", ())
        error = error.again()
        error.__notes__ = [*notes, note]
    return error


def propagate(
    engine: DistEngine, batch: Batch, task: GraphTaskState, expect: Callable[[Propagation], None]
) -> None:
    """Sends gradients to where the tensors came from.

    `expect` is told before they leave: mail from a third node may be back before this returns.
    """
    link = engine.link_to(batch.like)
    run = task.run
    releases = engine.releases_to(link)
    request = autograd_pb2.PropagateGradientsRequest(
        retain_graph=task.retain_graph or not all(received.is_spent for received, _ in batch.items),
        create_graph=task.create_graph,
        skip_leaves=not task.collect_leaves,
        detect_anomaly=anomaly_is_wanted(),
    )
    batch.like.context.write(request.context)
    task.pass_id(engine).write(getattr(request, "pass"))
    if run is not None and run.collect_into is not None:
        run.collect_into.write(request.collect_into)
    if batch.held is not None:
        batch.held.id.write(request.held_run)
        request.to_come.extend(message_protos(received.source for received in batch.announced))
    if batch.like.compression is not None:
        request.compression.CopyFrom(batch.like.compression)
    encoder = wire.Encoder(inline_bytes=link.inline_bytes)
    for index, (received, gradients) in enumerate(batch.items):
        message = request.also.add() if index else request.gradients
        codecs = None
        if received.compression is not None and received.compression.backward in link.peer_codecs:
            codecs = GradientCodecs(
                engine.feedback, link.peer.id, received.compression, create_graph=task.create_graph
            )
        encode_gradients(message, received.source, gradients, encoder, codecs)
    sent = None
    if task.create_graph:
        batch.like.context.write(request.autograd.context)
        sent = engine.send(request.autograd, encoder.tensors, batch.like.context, link)
    future = ResponseFuture()
    future.on_discarded = releases.on_discarded(autograd_pb2.PropagateGradientsResponse)
    # The flag tells the other end to let go after this, if it comes to that.
    lets_go = [] if request.retain_graph else [item for item, _ in batch.items if not item.are_arguments]
    # Last, so that nothing which was taken can get lost before the undoing is arranged.
    released = releases.take()
    if released:
        request.released.extend(message_protos(released))
    undone = [*released, *(received.source for received in lets_go)]
    if undone or sent is not None:
        engine.undo_if_failed(future, link, sent, undone)
    what = f"{batch.like.what} on {link.peer}"
    deliver = partial(
        _deliver,
        engine,
        task.id,
        task.awaited,
        task.awaiting_end,
        batch.held,
        link,
        what,
        batch.like.compression,
    )
    try:
        table, attachments = encoder.finish()
        request.tensors.CopyFrom(table)
        if encoder.saved:
            link.count_saved(encoder.saved)
        cancel_with_caller(future)
        expect(Propagation(future, deliver, link.read_for, what))
        link.send_request(
            link_pb2.METHOD_PROPAGATE_GRADIENTS,
            request.SerializeToString(),
            attachments,
            timeout=time_left(None),
            future=future,
        )
    except BaseException:
        future.cancel()
        raise
    for received in lets_go:
        received.released()


def _deliver(
    engine: DistEngine,
    task: int,
    awaited: dict[AutogradMessageId, SentArguments],
    awaiting_end: set[Link],
    held: HeldElsewhere | None,
    link: Link,
    what: str,
    compression: autograd_pb2.Compression | None,
    message: Payload,
) -> None:
    """Puts the contributions of a response into the mailboxes."""
    response = wire.parse(autograd_pb2.PropagateGradientsResponse, message.body)
    expected = (awaited.get(id) or engine.container.arguments(id) for id in _ids_of(response.contributions))
    limits = gradient_limits(link.limits, [sent for sent in expected if sent is not None])
    decoder = wire.Decoder(response.tensors, message.attachments, limits=limits)
    if decoder.saved:
        link.count_saved(decoder.saved)
    try:
        if held is not None:
            held.is_open = response.is_held
        if response.awaits_end:
            awaiting_end.add(link)
        if response.HasField("autograd"):
            what = f"the backward of {what}"
            engine.receive(response.autograd, decoder, link, what, compression, are_arguments=False)
        for contribution in response.contributions:
            id = AutogradMessageId.parse(contribution.message)
            # First of all those that were awaited: another response may have overtaken this one,
            # and released them from the container.
            sent = awaited.get(id)
            if sent is None and held is not None and (sent := engine.container.arguments(id)) is not None:
                # The other end would not hold the run open, so this is mail for which it is early.
                awaited[id] = sent
                sent.await_response(task)
            if sent is None:
                raise NotFound(
                    f"{link.peer} sent gradients for arguments that this node no longer keeps: they were "
                    "sent in a context that has ended, or in a call that failed; detach what is kept on "
                    "a worker between contexts"
                )
            if not sent.put(task, decode_gradients(contribution, decoder, sent.like)):
                raise MalformedMessage(f"{link.peer} sent gradients that nothing here awaits: {id}")
    finally:
        if response.released:
            engine.container.release(message_ids(response.released))


def tell_pass_ended(context: ContextId, pass_id: AutogradMessageId, link: Link) -> Propagation:
    """Tells a peer that a pass is over everywhere. The peer answers when its waiting hooks have run."""
    request = autograd_pb2.PropagateGradientsRequest(pass_ended=True)
    context.write(request.context)
    pass_id.write(getattr(request, "pass"))
    future = ResponseFuture()
    propagation = Propagation(future, lambda _: None, link.read_for, f"the hooks on {link.peer}")
    cancel_with_caller(future)
    link.send_request(
        link_pb2.METHOD_PROPAGATE_GRADIENTS,
        request.SerializeToString(),
        timeout=time_left(None),
        future=future,
    )
    return propagation


def encode_gradients(
    message: autograd_pb2.Gradients,
    id: AutogradMessageId,
    gradients: Gradients,
    encoder: wire.Encoder,
    codecs: GradientCodecs | None = None,
    position: int = 0,
) -> None:
    id.write(message.message)
    for slot, gradient in enumerate(gradients):
        if gradient is not None:
            message.slots.append(slot)
            codec = None if codecs is None else codecs.find(gradient, slot, position)
            message.tensors.append(encoder.tensor(gradient, f"gradient {slot}", codec))


def _ids_of(messages: Iterable[autograd_pb2.Gradients]) -> list[AutogradMessageId]:
    return [AutogradMessageId.parse(message.message) for message in messages]


def gradient_limits(limits: wire.Limits, all_sent: Sequence[SentArguments | SentResults]) -> wire.Limits:
    """The limits on gradients for tensors that this node sent.

    They have the shapes of those tensors and are often expanded, as that of a sum is. What was not too much
    to be sent is not too much for its gradient.
    """
    largest = max((shape.numel() for sent in all_sent for shape, _, _ in sent.like), default=0)
    return replace(limits, max_tensor_elements=max(limits.max_tensor_elements, largest))


def decode_gradients(
    message: autograd_pb2.Gradients,
    decoder: wire.Decoder,
    like: Sequence[tuple[torch.Size, torch.device, bool]],
) -> list[torch.Tensor | None]:
    """The gradients for the tensors of a message, on the devices of those tensors."""
    gradients: list[torch.Tensor | None] = [None] * len(like)
    if len(message.slots) != len(message.tensors):
        raise MalformedMessage(f"{len(message.slots)} slots but {len(message.tensors)} gradients")
    for slot, index in zip(message.slots, message.tensors, strict=True):
        if slot >= len(like) or index >= len(decoder.tensors):
            raise MalformedMessage(f"slot {slot} with tensor {index} does not exist: there are {len(like)}")
        gradient = decoder.tensors[index]
        shape, device, is_complex = like[slot]
        if gradient.shape != shape or gradient.is_complex() != is_complex:
            kind = "complex" if is_complex else "real"
            raise MalformedMessage(
                f"a gradient of shape {tuple(gradient.shape)} and {gradient.dtype} for a {kind} tensor of "
                f"shape {tuple(shape)}"
            )
        gradients[slot] = gradient.to(device)
    return gradients
