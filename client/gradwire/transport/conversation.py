"""Both directions of asking between two nodes, whatever carries the frames.

A conversation outlives the streams that carry it. It keeps every question until it is answered and
every answer until it is acknowledged, and sends both again over new streams. A question that comes
twice is served once. So a cut costs time, never an answer, and nothing runs twice.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from gradwire.errors import DeadlineExceeded, GradwireError, LinkClosed, ProtocolError, ResourceExhausted
from gradwire.proto.v1 import link_pb2
from gradwire.transport import faults, frames
from gradwire.transport.base import (
    Buffer,
    Exchange,
    Handler,
    Identity,
    Link,
    LinkSettings,
    Pending,
    Received,
    Sendable,
)
from gradwire.transport.inbound import Inbound
from gradwire.transport.outbox import Outbox, OutgoingTransfer
from gradwire.transport.timers import Timer, call_later

__all__ = ["Conversation", "Streams"]

log = logging.getLogger("gradwire.link")

_MAX_UNACKNOWLEDGED = 32
"""Acknowledgements ride on the next frame, unless this many wait."""


class Streams:
    """One attempt to carry a conversation: what waits to be written, and what has half arrived."""

    def __init__(self, settings: LinkSettings, *, separate_bulk: bool = True) -> None:
        self.control = Outbox()
        self.bulk = Outbox() if separate_bulk else self.control
        self.inbound = Inbound(settings.max_message_bytes)
        self.highest_request = 0
        """Questions come in the order of their ids, so a higher one is still to come."""

    def close(self, *, discard: bool = False) -> None:
        self.control.close(discard=discard)
        self.bulk.close(discard=discard)


class _Question:
    """A question that this end asked and that is not answered yet."""

    __slots__ = ("attachments", "body", "deadline", "method", "pending", "timer")

    def __init__(
        self,
        method: int,
        body: bytes,
        attachments: Sequence[Sendable],
        pending: Pending,
        deadline: float | None,
    ) -> None:
        self.method = method
        self.body = body
        self.attachments = attachments
        self.pending = pending
        self.deadline = deadline
        self.timer: Timer | None = None


class _Served(Exchange):
    """A question that the other end asked, kept until the answer is acknowledged."""

    def __init__(
        self, conversation: Conversation, id: int, method: int, request: Received, timeout: float
    ) -> None:
        self.id = id
        self.method = method
        self.request = request
        self.deadline = time.monotonic() + timeout if timeout > 0 else None
        self.link = conversation
        self.answer: tuple[bytes | link_pb2.Error, Sequence[Sendable]] | None = None
        self._conversation = conversation
        self._cancelled = False
        self._callbacks: list[Callable[[], None]] = []

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def when_cancelled(self, callback: Callable[[], None]) -> None:
        with self._conversation._lock:
            if not self._cancelled:
                self._callbacks.append(callback)
                return
        callback()

    def cancel(self) -> None:
        with self._conversation._lock:
            self._cancelled = True
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def reply(self, body: bytes, attachments: Sequence[Sendable] = ()) -> None:
        try:
            self._conversation._check_size(body, attachments)
        except ResourceExhausted as error:
            self.fail(faults.describe(error, self._conversation.local.name))
        else:
            self._answer(body, attachments)

    def fail(self, error: link_pb2.Error) -> None:
        self._answer(error, ())

    def _answer(self, outcome: bytes | link_pb2.Error, attachments: Sequence[Sendable]) -> None:
        with self._conversation._lock:
            if self.answer is None:
                self.answer = (outcome, attachments)
                self.request = Received(b"")  # its memory is not needed for answering again
                self._callbacks.clear()
                self._conversation._send_answer(self)


class Conversation(Link):
    """A Link over streams that come and go. Subclasses and owners bring the streams."""

    def __init__(self, local: Identity, peer: Identity, handler: Handler, settings: LinkSettings) -> None:
        self.local = local
        self.peer = peer
        self.settings = settings
        self.peer_max_message_bytes = settings.max_message_bytes
        self._handler = handler
        self._lock = threading.RLock()
        self._streams: Streams | None = None
        self._questions: dict[int, _Question] = {}
        self._served: dict[int, _Served] = {}
        self._to_acknowledge: list[int] = []
        self._question_ids = itertools.count(1)
        self._transfer_ids = itertools.count(1)
        self._ended: GradwireError | None = None
        self._end_callbacks: list[Callable[[Link], None]] = []

    # -- asking

    def ask(
        self,
        method: int,
        body: bytes,
        attachments: Sequence[Sendable] = (),
        *,
        timeout: float | None = None,
        pending: Pending | None = None,
    ) -> Pending:
        if pending is None:
            pending = Pending()
        self._check_size(body, attachments)
        deadline = None if timeout is None else time.monotonic() + timeout
        question = _Question(method, body, attachments, pending, deadline)
        with self._lock:
            if self._ended is not None:
                raise self._ended.again()
            id = next(self._question_ids)
            self._questions[id] = question
            pending.abandon = partial(self._abandon, id)
            if self._streams is not None:
                self._send_question(self._streams, id, question)
        if timeout is not None:
            question.timer = call_later(timeout, partial(self._time_out, id, timeout))
        return pending

    def _check_size(self, body: bytes, attachments: Sequence[Sendable]) -> None:
        if len(body) > self.settings.max_body_bytes:
            raise ResourceExhausted(
                f"a message body of {len(body)} bytes exceeds the limit of {self.settings.max_body_bytes} "
                "bytes; pass large data as tensors, which travel beside it in chunks"
            )
        if attachments:
            size = len(body) + sum(len(a.view) for a in attachments)
            if size > self.peer_max_message_bytes:
                raise ResourceExhausted(
                    f"a message of {size} bytes exceeds the limit of {self.peer_max_message_bytes} bytes "
                    f"that {self.peer} takes",
                    worker=str(self.peer),
                )

    def _time_out(self, id: int, timeout: float) -> None:
        error = DeadlineExceeded(
            f"{self.peer} did not answer within {timeout:g} s", worker=str(self.peer)
        )
        self._withdraw(id, error)

    def _abandon(self, id: int) -> None:
        self._withdraw(id, None)

    def _withdraw(self, id: int, error: GradwireError | None) -> None:
        """Stops waiting for an answer, and tells the other end."""
        with self._lock:
            question = self._questions.pop(id, None)
            if question is None:
                return
            if self._streams is not None:
                if question.attachments:
                    # Behind its chunks, so that none of them comes after it.
                    self._streams.bulk.drop_transfers((False, id))
                    self._streams.bulk.put(frames.cancel(id))
                else:
                    self._streams.control.put(frames.cancel(id))
        _stop_timer(question)
        if error is not None:
            question.pending.settle(error)

    # -- sending; all with the lock held

    def _send_question(self, streams: Streams, id: int, question: _Question) -> None:
        left = 0.0
        if question.deadline is not None:
            left = max(question.deadline - time.monotonic(), 1e-3)
        request = link_pb2.Request(
            id=id,
            method=question.method,  # type: ignore[arg-type]
            body=question.body,
            timeout_seconds=left,
            transfers=self._send_attachments(streams, question.attachments, (False, id)),
        )
        self._send(streams, link_pb2.Frame(request=request))

    def _send_answer(self, served: _Served) -> None:
        streams = self._streams
        if streams is None or served.answer is None:
            return
        outcome, attachments = served.answer
        reply = link_pb2.Reply(
            id=served.id, transfers=self._send_attachments(streams, attachments, (True, served.id))
        )
        if isinstance(outcome, bytes):
            reply.body = outcome
        else:
            reply.error.CopyFrom(outcome)
        self._send(streams, link_pb2.Frame(reply=reply))

    def _send(self, streams: Streams, frame: link_pb2.Frame) -> None:
        data = frames.envelope(frame)
        if self._to_acknowledge:
            data = frames.acknowledge(self._to_acknowledge) + data
            self._to_acknowledge.clear()
        streams.control.put(data)

    def _send_attachments(
        self, streams: Streams, attachments: Sequence[Sendable], owner: tuple[bool, int]
    ) -> list[int]:
        ids = []
        for attachment in attachments:
            id = next(self._transfer_ids)
            streams.bulk.put_transfer(
                OutgoingTransfer(id, attachment, owner, self.settings.chunk_bytes, self._on_modified)
            )
            ids.append(id)
        return ids

    def _on_modified(self, transfer: OutgoingTransfer, error: GradwireError) -> None:
        """An attachment was written to while it was being sent: the message must not be used."""
        is_reply, id = transfer.owner
        if not is_reply:
            self._withdraw(id, error)
            return
        with self._lock:
            served = self._served.get(id)
            if served is not None:
                if self._streams is not None:
                    self._streams.bulk.drop_transfers(transfer.owner)
                served.answer = (faults.describe(error, self.local.name), ())
                self._send_answer(served)

    # -- streams

    def attach(self, streams: Streams) -> None:
        """Carries on over new streams: what is not answered or acknowledged is sent again."""
        with self._lock:
            if self._ended is not None:
                streams.close(discard=True)
                return
            if self._streams is not None:
                self._streams.close(discard=True)
            self._streams = streams
            for id, question in self._questions.items():
                self._send_question(streams, id, question)
            for served in self._served.values():
                self._send_answer(served)

    def detach(self, streams: Streams) -> bool:
        """The streams broke. True if they were the ones in use."""
        streams.close(discard=True)
        with self._lock:
            if self._streams is not streams:
                return False
            self._streams = None
            return True

    # -- receiving

    def receive(self, data: bytes, streams: Streams) -> None:
        """Takes what was read from a stream. Raises if it breaks the protocol."""
        chunk = frames.parse_chunk(data)
        if chunk is not None:
            streams.inbound.chunk(chunk)
            return
        for frame in frames.parse(data):
            kind = frame.WhichOneof("kind")
            if kind == "request":
                request = frame.request
                streams.highest_request = request.id
                streams.inbound.message(
                    (False, request.id), request.transfers, partial(self._on_request, streams, request)
                )
            elif kind == "reply":
                self._on_reply_frame(streams, frame.reply)
            elif kind == "chunk":
                piece = frame.chunk
                streams.inbound.chunk(frames.Chunk(piece.transfer, piece.offset, piece.total, piece.data))
            elif kind == "cancel":
                self._on_cancel(streams, frame.cancel.id)
            elif kind == "acknowledge":
                with self._lock:
                    for id in frame.acknowledge.ids:
                        self._served.pop(id, None)
            elif kind == "goodbye":
                self._on_goodbye(frame.goodbye)
            else:
                raise ProtocolError(f"an unexpected frame: {kind or 'of an unknown kind'}")

    def _on_request(
        self, streams: Streams, request: link_pb2.Request, attachments: Sequence[Buffer]
    ) -> None:
        with self._lock:
            # Streams that were replaced may still deliver; what they bring was sent again on the new ones.
            if self._streams is not streams or request.id in self._served or self._ended is not None:
                return
            served = _Served(
                self, request.id, request.method, Received(request.body, attachments), request.timeout_seconds
            )
            self._served[request.id] = served
        try:
            self._handler(served)
        except Exception as error:
            log.exception("the handler of requests from %s failed", self.peer)
            served.fail(faults.describe(error, self.local.name))

    def _on_reply_frame(self, streams: Streams, reply: link_pb2.Reply) -> None:
        if reply.WhichOneof("outcome") == "error":
            streams.inbound.drop((True, reply.id), expected=False)
            self._on_reply(streams, reply, ())
        else:
            streams.inbound.message((True, reply.id), reply.transfers, partial(self._on_reply, streams, reply))

    def _on_reply(self, streams: Streams, reply: link_pb2.Reply, attachments: Sequence[Buffer]) -> None:
        with self._lock:
            question = self._questions.pop(reply.id, None)
            self._to_acknowledge.append(reply.id)
            # What a large answer holds is wanted back at once; small ones wait for the next frame.
            if attachments or len(self._to_acknowledge) >= _MAX_UNACKNOWLEDGED:
                streams.control.put(frames.acknowledge(self._to_acknowledge))
                self._to_acknowledge.clear()
        if question is None:
            return
        _stop_timer(question)
        if reply.WhichOneof("outcome") == "error":
            if not reply.error.worker:
                reply.error.worker = str(self.peer)
            question.pending.settle(faults.rebuild(reply.error))
        else:
            question.pending.settle(Received(reply.body, attachments))

    def _on_cancel(self, streams: Streams, id: int) -> None:
        with self._lock:
            served = self._served.get(id)
        if served is not None:
            served.cancel()
        else:
            streams.inbound.drop((False, id), expected=id > streams.highest_request)

    def _on_goodbye(self, goodbye: link_pb2.Goodbye) -> None:
        if goodbye.HasField("error"):
            self.abort(faults.rebuild(goodbye.error))
        else:
            self.abort(LinkClosed(f"{self.peer} ended the link", worker=str(self.peer)))

    # -- ending

    def close(self) -> None:
        self._end(LinkClosed(f"the link to {self.peer} was closed", worker=str(self.peer)), frames.goodbye())

    def abort(self, error: GradwireError) -> None:
        self._end(error, None)

    def refuse(self, error: GradwireError) -> None:
        """Ends because the other end broke the protocol, and tells it."""
        self._end(error, frames.goodbye(faults.describe(error, self.local.name)))

    def _end(self, error: GradwireError, farewell: bytes | None) -> None:
        with self._lock:
            if self._ended is not None:
                return
            self._ended = error
            questions, self._questions = self._questions, {}
            served, self._served = self._served, {}
            streams, self._streams = self._streams, None
            callbacks, self._end_callbacks = self._end_callbacks, []
        if streams is not None:
            if farewell is not None:
                streams.control.put(farewell)
            streams.bulk.close(discard=True)
            streams.control.close()
        for question in questions.values():
            _stop_timer(question)
            question.pending.settle(error.again())
        for exchange in served.values():
            exchange.cancel()
        for callback in callbacks:
            callback(self)

    @property
    def ended(self) -> GradwireError | None:
        return self._ended

    def when_ended(self, callback: Callable[[Link], None]) -> None:
        with self._lock:
            if self._ended is None:
                self._end_callbacks.append(callback)
                return
        callback(self)


def _stop_timer(question: _Question) -> None:
    if question.timer is not None:
        question.timer.cancel()
