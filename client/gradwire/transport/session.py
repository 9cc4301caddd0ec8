"""Requests in both directions between two peers, over any kind of streams.

A session outlives its streams. It keeps every outbound request until the response arrives, and every response
until it is acknowledged, and sends both again over new streams. A request that arrives twice is served once.
So a cut costs time, but it never loses a response, and nothing runs twice.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from gradwire.errors import (
    ConnectFailed,
    DeadlineExceeded,
    GradwireError,
    InternalError,
    LinkClosed,
    ResourceExhausted,
)
from gradwire.proto.v1 import link_pb2
from gradwire.system.callbacks import call_each
from gradwire.system.timers import call_later
from gradwire.transport import faults, frames
from gradwire.transport.base import (
    Handler,
    Link,
    LinkSettings,
    Payload,
    PeerIdentity,
    ResponseFuture,
    Sendable,
    Traffic,
    counted_size,
)
from gradwire.transport.calls import InboundCall, OutboundCall
from gradwire.transport.memory_budget import MemoryBudget, Quota
from gradwire.transport.outbox import OutgoingTransfer
from gradwire.transport.reassembly import CompleteMessage
from gradwire.transport.retry_queue import RetryQueue
from gradwire.transport.streams import Streams
from gradwire.transport.window import Window
from gradwire.wire import Limits

__all__ = ["Session"]

log = logging.getLogger("gradwire.link")

_MAX_UNACKNOWLEDGED = 32
"""Acknowledgements are sent with the next frame, unless this many are waiting."""
_MAX_WITHDRAWN = 1000
_SMALLEST_CHUNK_BYTES = 1024
"""A frame of at least this size is probably a chunk, for which there is a faster decoder."""


class Session(Link):
    """A Link over streams that come and go. Subclasses and owners attach the streams.

    One lock guards all of its state. The locks of outboxes and reassemblers are taken while it is held, never
    the other way round. No callback or handler is called while it is held.
    """

    def __init__(
        self,
        local: PeerIdentity,
        peer: PeerIdentity,
        handler: Handler,
        settings: LinkSettings,
        budget: MemoryBudget | None = None,
    ) -> None:
        self.quota = Quota(settings.max_bytes_in_flight, budget or MemoryBudget())
        """The memory quota for requests of the other peer."""
        self.local = local
        self.peer = peer
        self.settings = settings
        self.limits = Limits(max_tensor_elements=settings.max_tensor_elements)
        self.peer_max_message_bytes = settings.max_message_bytes
        self._max_frame_bytes = settings.max_frame_bytes
        self._handler = handler
        self._lock = threading.RLock()
        self._delivered = threading.Condition(self._lock)
        self._delivery_is_awaited = False
        self._streams: Streams | None = None
        self._outbound_calls: dict[int, OutboundCall] = {}
        self._retries = RetryQueue(self._start_call)
        self._window = Window(settings.max_bytes_in_flight)
        self._inbound_calls: dict[int, InboundCall] = {}
        self._withdrawn: dict[int, None] = {}
        """Requests that were withdrawn, and that the other peer may still be serving."""
        self._to_acknowledge: list[int] = []
        self._request_ids = itertools.count(1)
        self._transfer_ids = itertools.count(1)
        self._traffic_before = Traffic()
        """The traffic of streams that are no longer in use."""
        self._saved_bytes = 0
        self._ended: GradwireError | None = None
        self._end_callbacks: list[Callable[[Link], None]] = []

    # -- sending requests

    def send_request(
        self,
        method: int,
        body: bytes,
        attachments: Sequence[Sendable] = (),
        *,
        timeout: float | None = None,
        future: ResponseFuture | None = None,
    ) -> ResponseFuture:
        if future is None:
            future = ResponseFuture()
        self._check_size(body, attachments)
        self._start_call(OutboundCall(method, body, attachments, future, timeout))
        return future

    def read_for(self, future: ResponseFuture) -> None:
        streams = self._streams
        if streams is not None:
            streams.read_for(future)

    def read_in_background(self, future: ResponseFuture) -> None:
        streams = self._streams
        if streams is not None:
            streams.read_in_background(future)

    def limit_bytes_in_flight(self, max_bytes: int) -> None:
        """Sets how many bytes of large requests the other peer accepts at a time; 0 means any number."""
        self._window.max_bytes = max_bytes or (1 << 62)

    def _start_call(self, outbound_call: OutboundCall) -> None:
        with self._lock:
            if self._ended is not None:
                raise self._ended.again()
            waits = self.settings.wait_for_ready or outbound_call.future.waits_for_link
            if self._streams is None and not waits:
                raise ConnectFailed(f"{self.peer} is unreachable right now", worker=str(self.peer))
            if not self._window.admits(outbound_call):
                self._keep_back(outbound_call)
                return
            id = next(self._request_ids)
            self._outbound_calls[id] = outbound_call
            outbound_call.future.abandon = partial(self._withdraw, id, None)
            if outbound_call.deadline is not None:
                self._start_timer(outbound_call, outbound_call.deadline, partial(self._withdraw, id))
            if self._streams is not None:
                self._put_request(self._streams, id, outbound_call)
                self._streams.note_request_sent()
        self._flush()
        if outbound_call.future.cancelled():
            # The future was cancelled before `abandon` was set.
            self._withdraw(id, None)

    def _start_timer(
        self, outbound_call: OutboundCall, deadline: float, give_up: Callable[[GradwireError], None]
    ) -> None:
        outbound_call.stop_timer()
        left = max(deadline - time.monotonic(), 0.0)
        outbound_call.timer = call_later(left, partial(give_up, self._too_late(outbound_call)))

    def _too_late(self, outbound_call: OutboundCall) -> DeadlineExceeded:
        message = f"{self.peer} did not respond within {round(outbound_call.timeout or 0.0, 3):g} s"
        return DeadlineExceeded(message, worker=str(self.peer))

    def _keep_back(self, outbound_call: OutboundCall) -> None:
        """Prepares a request to wait in the window until fewer bytes are in flight."""
        outbound_call.future.abandon = partial(self._leave_window, outbound_call)
        if outbound_call.deadline is not None:
            self._start_timer(
                outbound_call, outbound_call.deadline, partial(self._give_up_kept_back, outbound_call)
            )

    def _give_up_kept_back(self, outbound_call: OutboundCall, error: GradwireError) -> None:
        self._leave_window(outbound_call)
        outbound_call.future.settle(error)

    def _leave_window(self, outbound_call: OutboundCall) -> None:
        """Removes a finished request from the window, and sends those that fit now."""
        ready = deque(self._window.leave(outbound_call))
        while ready:
            following = ready.popleft()
            try:
                self._start_call(following)
            except GradwireError as error:
                # This request frees its share of the window. Those behind it may be sent, or fail as well.
                following.stop_timer()
                ready.extend(self._window.leave(following))
                following.future.settle(error)

    def _check_size(self, body: bytes, attachments: Sequence[Sendable]) -> None:
        if len(body) > self.settings.max_body_bytes:
            raise ResourceExhausted(
                f"a message body of {len(body)} bytes exceeds the limit of {self.settings.max_body_bytes} "
                "bytes; pass large data as tensors, which travel beside it in chunks"
            )
        size = len(body)
        for attachment in attachments:
            size += len(attachment.view)
        if size > self.peer_max_message_bytes:
            raise ResourceExhausted(
                f"a message of {size} bytes exceeds the limit of {self.peer_max_message_bytes} bytes "
                f"that {self.peer} takes",
                worker=str(self.peer),
            )

    def _withdraw(self, id: int, error: GradwireError | None) -> None:
        """Stops waiting for a response, and tells the other peer."""
        with self._lock:
            outbound_call = self._outbound_calls.pop(id, None)
            if outbound_call is None:
                return
            self._remember_withdrawn(id)
            streams = self._streams
            if streams is not None:
                streams.reassembler.drop((True, id))
                if outbound_call.attachments:
                    # The cancellation follows the chunks, so that none of them arrives after it.
                    streams.bulk.drop_transfers((False, id))
                    streams.bulk.put(frames.cancel(id))
                else:
                    streams.control.put(frames.cancel(id))
        self._flush()
        outbound_call.stop_timer()
        if error is not None:
            outbound_call.future.settle(error)
        self._leave_window(outbound_call)

    def _flush(self) -> None:
        """Writes the frames that were put. The lock is not held: a write takes time,
        and other threads can go on."""
        streams = self._streams
        if streams is not None:
            streams.flush()

    def _flush_response(self) -> None:
        streams = self._streams
        if streams is not None:
            streams.flush_response()

    # -- putting frames into outboxes; the lock is held

    def _remember_withdrawn(self, id: int) -> None:
        # Kept in case a cut loses the cancellation. A request that was cancelled before it ran never gets a
        # response, so the oldest entries have to be dropped.
        self._withdrawn[id] = None
        if len(self._withdrawn) > _MAX_WITHDRAWN:
            del self._withdrawn[next(iter(self._withdrawn))]

    def _put_request(self, streams: Streams, id: int, outbound_call: OutboundCall) -> None:
        left = 0.0
        if outbound_call.deadline is not None:
            left = max(outbound_call.deadline - time.monotonic(), 1e-3)
        envelope = self._new_envelope()
        request = envelope.frames.add().request
        request.id = id
        request.method = outbound_call.method  # type: ignore[assignment]
        request.body = outbound_call.body
        if left:
            request.timeout_seconds = left
        if outbound_call.attachments:
            request.transfers.extend(self._send_attachments(streams, outbound_call.attachments, (False, id)))
        streams.control.put(envelope.SerializeToString())

    def _put_response(self, inbound_call: InboundCall) -> None:
        streams = self._streams
        if streams is None or inbound_call.response is None:
            return
        outcome, attachments = inbound_call.response
        envelope = self._new_envelope()
        response = envelope.frames.add().response
        response.id = inbound_call.id
        if attachments:
            response.transfers.extend(self._send_attachments(streams, attachments, (True, inbound_call.id)))
        if isinstance(outcome, bytes):
            response.body = outcome
        else:
            response.error.CopyFrom(outcome)
        streams.control.put(envelope.SerializeToString())

    def _new_envelope(self) -> link_pb2.Envelope:
        """An envelope with the acknowledgements that wait to be sent."""
        envelope = link_pb2.Envelope()
        if self._to_acknowledge:
            envelope.frames.add().acknowledge.ids.extend(self._to_acknowledge)
            self._to_acknowledge.clear()
        return envelope

    def _send_attachments(
        self, streams: Streams, attachments: Sequence[Sendable], owner: tuple[bool, int]
    ) -> list[int]:
        ids = []
        for attachment in attachments:
            id = next(self._transfer_ids)
            streams.bulk.put_transfer(
                OutgoingTransfer(id, attachment, owner, self.settings.chunk_bytes, self._on_failed_transfer)
            )
            ids.append(id)
        return ids

    def _on_failed_transfer(self, transfer: OutgoingTransfer, error: GradwireError) -> None:
        """Fails the message of an attachment that could not be sent, or was
        modified while it was being sent."""
        is_response, id = transfer.owner
        if not is_response:
            self._withdraw(id, error)
            return
        with self._lock:
            inbound_call = self._inbound_calls.get(id)
            if inbound_call is not None:
                if self._streams is not None:
                    self._streams.bulk.drop_transfers(transfer.owner)
                inbound_call.response = (faults.describe(error, self.local.name), ())
                self._put_response(inbound_call)
        self._flush()

    # -- streams

    def attach(self, streams: Streams) -> None:
        """Continues over new streams: sends again all requests without a response, and
        all unacknowledged responses."""
        with self._lock:
            previous = self._streams
            if self._ended is not None:
                streams.close(discard=True)
                return
            if previous is not None:
                self._traffic_before += previous.traffic
                previous.close(discard=True)
            self._streams = streams
            self.inline_bytes = streams.inline_bytes
            for id in self._withdrawn:
                streams.control.put(frames.cancel(id))
            # Sending these cancellations once more is enough: the other peer may never have received some of
            # the requests, and so may never respond to them.
            self._withdrawn.clear()
            for id, outbound_call in self._outbound_calls.items():
                self._put_request(streams, id, outbound_call)
            for inbound_call in self._inbound_calls.values():
                self._put_response(inbound_call)
        self._flush()

    def detach(self, streams: Streams) -> bool:
        """Detaches streams that broke. Returns whether they, or the local socket
        that they led to, were in use."""
        streams.close(discard=True)
        with self._lock:
            used = self._streams
            if used is None or streams not in (used, used.parent):
                return False
            used.close(discard=True)
            self._streams = None
            self._traffic_before += used.traffic
            self._delivered.notify_all()
            return True

    def wait_until_delivered(self, timeout: float) -> bool:
        """Waits for the other peer to acknowledge all large responses, or to be unreachable. Returns
        whether that happened in time."""
        with self._delivered:
            self._delivery_is_awaited = True
            return self._delivered.wait_for(
                lambda: (
                    self._streams is None
                    or not any(
                        inbound_call.response and inbound_call.response[1]
                        for inbound_call in self._inbound_calls.values()
                    )
                ),
                timeout,
            )

    # -- receiving
    #
    # Replaced streams may still deliver frames. These are ignored, since the other peer sends what
    # matters again over the new streams.

    def receive(self, data: bytes, streams: Streams) -> None:
        """Handles data that was read from a stream. Raises if it breaks the protocol."""
        if len(data) > self._max_frame_bytes:
            raise ResourceExhausted(
                f"a frame of {len(data)} bytes exceeds the limit of {self.settings.max_body_bytes} bytes"
            )
        with self._lock:
            streams.received += len(data)
        chunk = frames.parse_chunk(data) if len(data) >= _SMALLEST_CHUNK_BYTES else None
        if chunk is not None:
            self._on_complete_message(streams, streams.reassembler.chunk(chunk))
            return
        received = frames.parse(data)
        for index, frame in enumerate(received):
            streams.has_unhandled_frames = index + 1 < len(received)
            kind = frame.WhichOneof("kind")
            if kind == "request":
                self._on_request(streams, frames.request_frame(frame.request))
            elif kind == "response":
                self._on_response(streams, frame.response)
            elif kind == "transfer_chunk":
                piece = frame.transfer_chunk
                chunk = frames.Chunk(piece.transfer, piece.offset, piece.total, piece.data)
                self._on_complete_message(streams, streams.reassembler.chunk(chunk))
            elif kind == "cancel":
                self._on_cancel(streams, frame.cancel.id)
            elif kind == "acknowledge":
                self._on_acknowledge(frame.acknowledge.ids)
            elif kind == "goodbye":
                self._on_goodbye(frame.goodbye)
            else:
                self._on_complete_message(streams, streams.take(frame, kind))

    def receive_or_refuse(self, data: bytes, streams: Streams) -> None:
        """Like `receive`, for threads that read a stream: an error ends the session, not the thread."""
        try:
            self.receive(data, streams)
        except GradwireError as error:
            log.warning("%s broke the protocol: %s", self.peer, error)
            self.refuse(error)
        except Exception as error:
            log.exception("a frame from %s could not be handled", self.peer)
            self.refuse(InternalError(f"a frame could not be handled: {error!r}"))

    def _on_complete_message(self, streams: Streams, complete: CompleteMessage | None) -> None:
        """Handles a message whose last attachment has arrived, if there is one."""
        if complete is None:
            return
        if isinstance(complete[0], frames.RequestFrame):
            self._handle(self._accept(streams, complete))
        else:
            self._settle(streams, complete)

    def _on_request(self, streams: Streams, request: frames.RequestFrame) -> None:
        key = (False, request.id)
        # Whether to serve a request is decided when the request arrives, not when its last attachment does:
        # the acknowledgement that removes it from `_inbound_calls` may overtake its attachments.
        with self._lock:
            if self._streams is not streams:
                return
            if request.id in self._inbound_calls:
                streams.reassembler.skip(key, request.transfers)
                return
            complete = streams.reassembler.message(key, request.transfers, request)
            inbound_call = None if complete is None else self._accept(streams, complete)
        self._handle(inbound_call)

    def _accept(self, streams: Streams, complete: CompleteMessage) -> InboundCall | None:
        request, attachments = complete
        assert isinstance(request, frames.RequestFrame)
        with self._lock:
            if self._streams is not streams or request.id in self._inbound_calls:
                self.quota.give_back(request.id)
                return None
            inbound_call = self._inbound_calls[request.id] = InboundCall(
                self, streams, request, attachments or ()
            )
            if attachments is None:
                inbound_call.fail(faults.describe(self.quota.refusal(), self.local.name))
                return None
            return inbound_call

    def _handle(self, inbound_call: InboundCall | None) -> None:
        if inbound_call is None:
            return
        try:
            self._handler(inbound_call)
        except Exception as error:
            if not isinstance(error, GradwireError):
                log.exception("the handler of requests from %s failed", self.peer)
            inbound_call.fail(faults.describe(error, self.local.name))

    def _on_response(self, streams: Streams, response: link_pb2.Response) -> None:
        key = (True, response.id)
        with self._lock:
            if self._streams is not streams:
                return
            if response.WhichOneof("outcome") == "error":
                streams.reassembler.drop(key)
                complete: CompleteMessage | None = (response, ())
            elif response.id in self._outbound_calls:
                complete = streams.reassembler.message(key, response.transfers, response)
            else:
                streams.reassembler.skip(key, response.transfers)
                complete = (response, ())
        if complete is not None:
            self._settle(streams, complete)

    def _settle(self, streams: Streams, complete: CompleteMessage) -> None:
        response, attachments = complete
        assert isinstance(response, link_pb2.Response)
        body = response.body  # read once, since protobuf copies it each time
        with self._lock:
            if self._streams is not streams:
                return
            outbound_call = self._outbound_calls.pop(response.id, None)
            self._withdrawn.pop(response.id, None)
            self._to_acknowledge.append(response.id)
            is_large = bool(response.transfers or counted_size(body))
            acknowledges = is_large or len(self._to_acknowledge) >= _MAX_UNACKNOWLEDGED
            if acknowledges:
                streams.control.put(self._new_envelope().SerializeToString())
            if outbound_call is not None and outbound_call.attachments:
                # After a cut, the response may arrive before the request has been sent again.
                streams.bulk.drop_transfers((False, response.id))
        if acknowledges:
            self._flush()
        if outbound_call is None:
            return
        outbound_call.stop_timer()
        if outbound_call.is_large:
            self._leave_window(outbound_call)
        if outbound_call.deadline is not None and time.monotonic() >= outbound_call.deadline:
            # The timer was about to do the same. The response that follows goes to `on_discarded`.
            outbound_call.future.settle(self._too_late(outbound_call))
        if response.WhichOneof("outcome") == "error":
            if not response.error.worker:
                response.error.worker = str(self.peer)
            if not self._retries.schedule(outbound_call, response.error):
                outbound_call.future.settle(faults.rebuild(response.error))
        else:
            outbound_call.future.settle(Payload(body, attachments or ()))

    def _on_cancel(self, streams: Streams, id: int) -> None:
        with self._lock:
            inbound_call = self._inbound_calls.get(id)
            if inbound_call is None:
                streams.reassembler.drop((False, id))
        if inbound_call is not None:
            inbound_call.cancel()

    def _on_acknowledge(self, ids: Sequence[int]) -> None:
        with self._lock:
            for id in ids:
                inbound_call = self._inbound_calls.get(id)
                if inbound_call is None or inbound_call.response is None:
                    continue
                del self._inbound_calls[id]
                if inbound_call.response[1] and self._streams is not None:
                    # The requester acknowledged the response before all of it was
                    # sent: it no longer wants the rest.
                    self._streams.bulk.drop_transfers((True, id))
            if self._delivery_is_awaited:
                self._delivered.notify_all()

    def _on_goodbye(self, goodbye: link_pb2.Goodbye) -> None:
        if goodbye.HasField("error"):
            self.abort(faults.rebuild(goodbye.error))
        else:
            error = LinkClosed(f"{self.peer} ended the link", worker=str(self.peer))
            error.leaving = goodbye.leaving
            self.abort(error)

    # -- ending

    def close(self, *, leaving: bool = False) -> None:
        error = LinkClosed(f"the link to {self.peer} was closed", worker=str(self.peer))
        self._end(error, frames.goodbye(leaving=leaving))

    def abort(self, error: GradwireError) -> None:
        self._end(error, None)

    def refuse(self, error: GradwireError) -> None:
        """Ends the session because the other peer broke the protocol, and tells it so."""
        self._end(error, frames.goodbye(faults.describe(error, self.local.name)))

    def _end(self, error: GradwireError, goodbye: bytes | None) -> None:
        with self._lock:
            if self._ended is not None:
                return
            self._ended = error
            outbound_calls, self._outbound_calls = self._outbound_calls, {}
            inbound_calls, self._inbound_calls = self._inbound_calls, {}
            streams, self._streams = self._streams, None
            if streams is not None:
                self._traffic_before += streams.traffic
            callbacks, self._end_callbacks = self._end_callbacks, []
            self._delivered.notify_all()
        if streams is not None:
            streams.reassembler.close()
            if goodbye is None:
                streams.close(discard=True)
            else:
                # The bulk stream stays open until the control stream has ended:
                # whichever ends first ends both.
                streams.bulk.drop_transfers()
                streams.control.put(goodbye)
                streams.control.close()
        self.quota.give_back_all()
        self._retries.end(error)
        self._window.end(error)
        for outbound_call in outbound_calls.values():
            outbound_call.stop_timer()
            outbound_call.future.settle(error.again())
        call_each(inbound_call.cancel for inbound_call in inbound_calls.values())
        call_each(partial(callback, self) for callback in callbacks)

    @property
    def connected(self) -> bool:
        return self._streams is not None

    @property
    def traffic(self) -> Traffic:
        with self._lock:
            before = self._traffic_before + Traffic(saved=self._saved_bytes)
            return before if self._streams is None else before + self._streams.traffic

    def count_saved(self, size: int) -> None:
        if size:
            with self._lock:
                self._saved_bytes += size

    @property
    def ended(self) -> GradwireError | None:
        return self._ended

    def when_ended(self, callback: Callable[[Link], None]) -> None:
        with self._lock:
            if self._ended is None:
                self._end_callbacks.append(callback)
                return
        callback(self)
