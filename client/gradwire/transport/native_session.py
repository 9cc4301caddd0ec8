"""A Link whose state is a native session: `native.Session` decides, this module calls back.

It is to replace `gradwire.transport.session`; LinkSettings.protocol says which of the two a link uses.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue

import numpy as np

from gradwire.errors import (
    Cancelled,
    ConnectFailed,
    DeadlineExceeded,
    GradwireError,
    InternalError,
    LinkClosed,
    ProtocolError,
    ResourceExhausted,
)
from gradwire.proto.v1 import link_pb2
from gradwire.system.callbacks import call_each
from gradwire.system.randomness import new_id
from gradwire.system.timers import Timer, call_later
from gradwire.transport import faults, native
from gradwire.transport.base import (
    Buffer,
    Handler,
    Link,
    LinkSettings,
    Payload,
    PeerIdentity,
    ResponseFuture,
    Sendable,
    ServerCall,
    Traffic,
)
from gradwire.wire import Limits

__all__ = ["Budget", "NativeSession", "NativeStream"]

log = logging.getLogger("gradwire.link")

Budget = native.Budget

_RETRY_AFTER_SECONDS = 0.1
_KEPT_SECONDS = 30.0
"""How long memory that attachments arrived in is kept, to be used again."""


class NativeStream:
    """What a session writes to a gRPC stream: an iterator over the writes.

    It ends when it is closed, or when the session has ended and everything is written.
    """

    def __init__(self, session: NativeSession) -> None:
        self._session = session
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._first: list[bytes] = []
        self.is_asleep = False
        """Whether the writing thread waits for `wake`. The session's lock guards it."""
        self.was_attached = False
        """Whether the session has been attached to it. Until then only what was put is written."""
        self.closed = False

    def put(self, data: bytes) -> None:
        """Adds something that is written before anything of the session."""
        self._first.append(data)

    def wake(self) -> None:
        """There is something to write."""
        self._wakes.put(None)

    def close(self, *, discard: bool = False) -> None:
        """`discard` is for streams that write what waits; here that is the session's."""
        self.closed = True
        self.wake()

    def __iter__(self) -> NativeStream:
        return self

    def __next__(self) -> bytes:
        if self._first:
            return self._first.pop(0)
        while not self.closed:
            data = self._session.take_output(self)
            if data:
                return data
            if data is None:
                break
            self._wakes.get()  # `close` wakes, too, and ending a stream always closes it
        raise StopIteration


class _Call:
    """A request that was sent: the cookie of its native call."""

    __slots__ = ("attachments", "future", "timeout")

    def __init__(
        self, future: ResponseFuture, timeout: float | None, attachments: Sequence[Sendable]
    ) -> None:
        self.future = future
        self.timeout = timeout
        self.attachments = attachments

    def let_go(self) -> None:
        """There is an outcome, or none is wanted: frees the memory of the attachments. The native session may
        keep the cookie for as long as the other peer takes to respond, and the future refers to the call."""
        self.attachments = ()
        self.future.abandon = None

    def settle(self, outcome: Payload | GradwireError) -> None:
        self.let_go()
        self.future.settle(outcome)


class NativeServerCall(ServerCall):
    """A request from the other peer."""

    link: NativeSession

    def __init__(self, session: NativeSession, event: native.Event) -> None:
        super().__init__()
        self._session = session
        self.link = session
        self.id = event.id
        self.method = event.method
        self.deadline = event.deadline
        self.request = Payload(event.body, _buffers(event.attachments))

    def begin(self) -> None:
        self._session.begin(self)

    def respond(self, body: bytes, attachments: Sequence[Sendable] = ()) -> bool:
        try:
            self._session.check_size(body, attachments)
        except ResourceExhausted as error:
            self.fail(faults.describe(error, self._session.local.name))
            return False
        return self._done(self._session.respond(self, body, attachments))

    def fail(self, error: link_pb2.Error) -> None:
        self._done(self._session.fail(self, error))

    def _done(self, is_sent: bool) -> bool:
        self.request = Payload(b"")  # sending the response again does not need the request's memory
        self._when_cancelled.clear()
        return is_sent


class NativeSession(Link):
    """A Link over streams that come and go.

    One lock guards the native session. No callback or handler is called while it is held.
    """

    inline_bytes = 512 * 1024

    def __init__(
        self,
        local: PeerIdentity,
        peer: PeerIdentity,
        handler: Handler,
        settings: LinkSettings,
        budget: native.Budget | None = None,
    ) -> None:
        self.local = local
        self.peer = peer
        self.settings = settings
        self.limits = Limits(max_tensor_elements=settings.max_tensor_elements)
        self.peer_max_message_bytes = settings.max_message_bytes
        self._handler = handler
        self._lock = threading.RLock()  # a destructor may end a call within any line
        self._delivered = threading.Condition(self._lock)
        self._delivery_is_awaited = False
        self._native = native.Session(
            refusal=_error(_refusal(), local),
            cancelled=_error(Cancelled("the call was cancelled"), local),
            no_memory=_error(ResourceExhausted("no memory for the attachments of a request"), local),
            seed=new_id(),
            budget=budget or native.Budget(1 << 62),
            max_body_bytes=settings.max_body_bytes,
            max_message_bytes=settings.max_message_bytes,
            max_quota_bytes=settings.max_bytes_in_flight,
            max_window_bytes=settings.max_bytes_in_flight,
            chunk_bytes=settings.chunk_bytes,
        )
        self._stream: NativeStream | None = None
        self._inbound: dict[int, NativeServerCall] = {}
        """Requests that are being served."""
        self._timer: Timer | None = None
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
        self.check_size(body, attachments)
        call = _Call(future, timeout, attachments)
        views = [attachment.view for attachment in attachments]
        with self._lock:
            if self._ended is not None:
                raise self._ended.again()
            waits = self.settings.wait_for_ready or future.waits_for_link
            if self._stream is None and not waits:
                raise self._unreachable()
            now = time.monotonic()
            handle = self._native.call(
                now, method, body, views, timeout, future.is_nested, bool(views), call, waits
            )
            if timeout is not None:
                self._set_timer(now)
            future.abandon = partial(self._withdraw, handle, call)
            self._wake()
        if future.cancelled():
            self._withdraw(handle, call)  # it was cancelled before `abandon` was set
        return future

    def _withdraw(self, handle: int, call: _Call) -> None:
        with self._lock:
            self._native.withdraw(time.monotonic(), handle)
            events = self._after_change()
        call.let_go()
        self._handle_events(events)

    def read_for(self, future: ResponseFuture) -> None:
        """A thread of its own reads the stream."""

    def read_in_background(self, future: ResponseFuture) -> None:
        """A thread of its own reads the stream."""

    def limit_bytes_in_flight(self, max_bytes: int) -> None:
        """Sets how many bytes of large requests the other peer accepts at a time; 0 means any number."""
        with self._lock:
            self._native.limit_window(time.monotonic(), max_bytes)
            self._wake()

    def check_size(self, body: bytes, attachments: Sequence[Sendable]) -> None:
        if len(body) > self.settings.max_body_bytes:
            raise ResourceExhausted(
                f"a message body of {len(body)} bytes exceeds the limit of {self.settings.max_body_bytes} "
                "bytes; pass large data as tensors, which travel beside it in chunks"
            )
        if len(attachments) > native.MOST_ATTACHMENTS:
            raise ResourceExhausted(
                f"a message has {len(attachments)} large tensors, more than the {native.MOST_ATTACHMENTS} "
                "that a message may have"
            )
        size = len(body) + sum(len(attachment.view) for attachment in attachments)
        if size > self.peer_max_message_bytes:
            raise ResourceExhausted(
                f"a message of {size} bytes exceeds the limit of {self.peer_max_message_bytes} bytes "
                f"that {self.peer} takes",
                worker=str(self.peer),
            )

    # -- responding

    def begin(self, call: NativeServerCall) -> None:
        with self._lock:
            self._native.begin(call.id)

    def respond(self, call: NativeServerCall, body: bytes, attachments: Sequence[Sendable]) -> bool:
        views = [attachment.view for attachment in attachments]
        with self._lock:
            is_sent = self._native.respond(call.id, body, views, bool(views), attachments)
            self._wake()
        return is_sent

    def fail(self, call: NativeServerCall, error: link_pb2.Error) -> bool:
        with self._lock:
            is_sent = self._native.fail(call.id, error.SerializeToString())
            self._wake()
        return is_sent

    # -- the stream

    def attach(self, stream: NativeStream) -> None:
        """Continues over a new stream."""
        with self._lock:
            previous, self._stream = self._stream, stream
            stream.was_attached = True
            if self._ended is not None:
                stream.close()
            else:
                self._native.attach(time.monotonic())
                self._wake()
        if previous is not None:
            previous.close()

    def detach(self, stream: NativeStream) -> bool:
        """Detaches a stream that broke. Returns whether it was in use."""
        stream.close()
        with self._lock:
            if self._stream is not stream:
                return False
            self._stream = None
            self._native.detach()
            self._delivered.notify_all()
            return self._ended is None

    def take_output(self, stream: NativeStream) -> bytes | None:
        """What a stream is to write next; empty if there is nothing now, and None if nothing more comes."""
        while True:
            with self._lock:
                if self._stream is not stream:
                    stream.is_asleep = not stream.was_attached
                    return b"" if stream.is_asleep else None
                data = self._native.take_output()
                events = self._native.take_events()
                if not data and not events:
                    stream.is_asleep = self._ended is None
                    return b"" if stream.is_asleep else None
            self._handle_events(events)
            if data:
                return data

    def _wake(self) -> None:
        """Wakes the writing thread if there is something to write. The lock is held."""
        stream = self._stream
        if stream is not None and stream.is_asleep and self._native.has_output:
            # In this order: if Ctrl-C interrupts between the lines, the stream is woken once more.
            stream.wake()
            stream.is_asleep = False

    def receive(self, data: bytes, stream: NativeStream) -> None:
        """Handles data that was read from a stream. Raises if it breaks the protocol."""
        broken: native.ProtocolError | None = None
        with self._lock:
            if self._stream is not stream:
                return  # it was replaced; the other peer sends what matters again
            try:
                self._native.receive(time.monotonic(), data)
            except native.ProtocolError as error:
                broken = error
            events = self._after_change()
        self._handle_events(events)  # of what came before the protocol was broken, too
        if broken is not None:
            raise ProtocolError(f"{self.peer}: {broken}", worker=str(self.peer)) from broken

    def receive_or_refuse(self, data: bytes, stream: NativeStream) -> None:
        """Like `receive`, for threads that read a stream: an error ends the session, not the thread."""
        try:
            self.receive(data, stream)
        except GradwireError as error:
            log.warning("%s broke the protocol: %s", self.peer, error)
            self.refuse(error)
        except Exception as error:
            log.exception("a frame from %s could not be handled", self.peer)
            self.refuse(InternalError(f"a frame could not be handled: {error!r}"))

    def wait_until_delivered(self, timeout: float) -> bool:
        """Waits for the other peer to acknowledge all large responses, or to be unreachable. Returns
        whether that happened in time."""
        with self._delivered:
            self._delivery_is_awaited = True
            return self._delivered.wait_for(
                lambda: self._stream is None or self._native.all_delivered, timeout
            )

    # -- events

    def _after_change(self) -> list[native.Event]:
        """To be called after each change of the native session, with the lock held. Returns what has
        happened, for `_handle_events`."""
        self._wake()
        self._set_timer(time.monotonic())
        events = self._native.take_events()
        for event in events:
            if event.kind == native.REQUEST:
                # Here, so that no other thread can come with a cancellation before.
                self._inbound[event.id] = NativeServerCall(self, event)
        if self._delivery_is_awaited:
            self._delivered.notify_all()
        return events

    def _set_timer(self, now: float) -> None:
        due, before = self._native.next_tick, self._timer
        if due is None or (before is not None and before.due <= due):
            return
        self._timer = call_later(max(due - now, 0.0), self._tick)
        if before is not None:
            before.cancel()

    def _tick(self) -> None:
        with self._lock:
            self._timer = None
            if self._ended is not None:
                return
            now = time.monotonic()
            self._native.tick(now)
            events = self._after_change()
        self._handle_events(events)

    def _handle_events(self, events: list[native.Event]) -> None:
        for event in events:
            try:
                _HANDLERS[event.kind](self, event)
            except Exception as error:
                log.exception("an event of the session with %s could not be handled", self.peer)
                failure = InternalError(f"an event could not be handled: {error!r}")
                if isinstance(event.cookie, _Call):
                    event.cookie.settle(failure)
                self.refuse(failure)

    def _on_request(self, event: native.Event) -> None:
        call = self._inbound.get(event.id)
        if call is None:
            return  # the session has ended meanwhile
        try:
            self._handler(call)
        except Exception as error:
            if not isinstance(error, GradwireError):
                log.exception("the handler of requests from %s failed", self.peer)
            call.fail(faults.describe(error, self.local.name))

    def _on_cancelled(self, event: native.Event) -> None:
        call = self._inbound.get(event.id)
        if call is not None:
            call.cancel()

    def _on_acknowledged(self, event: native.Event) -> None:
        # Kept until here: if the session ends before, what was done for the requester is undone.
        self._inbound.pop(event.id, None)

    def _on_response(self, event: native.Event) -> None:
        event.cookie.settle(Payload(event.body, _buffers(event.attachments)))

    def _on_error(self, event: native.Event) -> None:
        error = link_pb2.Error.FromString(event.body)
        if not error.worker:
            error.worker = str(self.peer)
        event.cookie.settle(faults.rebuild(error))

    def _on_expired(self, event: native.Event) -> None:
        timeout = round(event.cookie.timeout or 0.0, 3)
        message = f"{self.peer} did not respond within {timeout:g} s"
        event.cookie.settle(DeadlineExceeded(message, worker=str(self.peer)))

    def _on_no_memory(self, event: native.Event) -> None:
        message = f"no memory for the attachments of a response of {self.peer}"
        event.cookie.settle(ResourceExhausted(message, worker=str(self.peer)))

    def _on_unreachable(self, event: native.Event) -> None:
        event.cookie.settle(self._unreachable())

    def _unreachable(self) -> ConnectFailed:
        return ConnectFailed(f"{self.peer} is unreachable right now", worker=str(self.peer))

    def _on_discarded(self, event: native.Event) -> None:
        if event.cookie.future.on_discarded is not None:
            event.cookie.future.on_discarded(Payload(event.body))

    def _on_check(self, event: native.Event) -> None:
        attachments: Sequence[Sendable] = event.cookie if event.flag else event.cookie.attachments
        try:
            for attachment in attachments:
                attachment.check_unmodified()
        except Exception as raised:
            error = raised
            if not isinstance(raised, GradwireError):
                log.exception("an attachment could not be checked")
                error = InternalError(f"an attachment could not be checked: {raised!r}")
            assert isinstance(error, GradwireError)
            if not event.flag:
                event.cookie.settle(error)
            with self._lock:
                self._native.reject(time.monotonic(), event.id, _error(error, self.local))
                events = self._after_change()
            self._handle_events(events)
            return
        with self._lock:
            self._native.confirm(event.id)
            self._wake()

    def _on_goodbye(self, event: native.Event) -> None:
        if event.body:
            self.abort(faults.rebuild(link_pb2.Error.FromString(event.body)))
        else:
            error = LinkClosed(f"{self.peer} ended the link", worker=str(self.peer))
            error.leaving = event.flag
            self.abort(error)

    # -- ending

    def close(self, *, leaving: bool = False) -> None:
        error = LinkClosed(f"the link to {self.peer} was closed", worker=str(self.peer))
        self._end(error, lambda: self._native.close(None, leaving))

    def abort(self, error: GradwireError) -> None:
        self._end(error, self._native.end)

    def refuse(self, error: GradwireError) -> None:
        """Ends the session because the other peer broke the protocol, and tells it so."""
        self._end(error, lambda: self._native.close(_error(error, self.local)))

    def _end(self, error: GradwireError, end: Callable[[], None]) -> None:
        with self._lock:
            if self._ended is not None:
                return
            # What came before goes first, and calls of which there is an outcome are not open any more.
            events = self._after_change()
            calls: list[_Call] = self._native.open_calls()
            end()
            self._ended = error
            inbound, self._inbound = self._inbound, {}
            callbacks, self._end_callbacks = self._end_callbacks, []
            if self._timer is not None:
                self._timer.cancel()
            self._delivered.notify_all()
            if self._stream is not None:
                # Whatever is left to write: the goodbye, or nothing.
                self._stream.wake()
                self._stream.is_asleep = False
        self._handle_events(events)
        for call in calls:
            call.settle(error.again())
        call_each(call.cancel for call in inbound.values())
        call_each(partial(callback, self) for callback in callbacks)

    @property
    def connected(self) -> bool:
        return self._stream is not None and self._ended is None

    @property
    def traffic(self) -> Traffic:
        with self._lock:
            counts = self._native.statistics()
            return Traffic(counts["sent_bytes"], counts["received_bytes"], self._saved_bytes)

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


_HANDLERS = {
    native.REQUEST: NativeSession._on_request,
    native.RESPONSE: NativeSession._on_response,
    native.ERROR: NativeSession._on_error,
    native.EXPIRED: NativeSession._on_expired,
    native.NO_MEMORY: NativeSession._on_no_memory,
    native.UNREACHABLE: NativeSession._on_unreachable,
    native.DISCARDED: NativeSession._on_discarded,
    native.CANCELLED: NativeSession._on_cancelled,
    native.ACKNOWLEDGED: NativeSession._on_acknowledged,
    native.CHECK: NativeSession._on_check,
    native.GOODBYE: NativeSession._on_goodbye,
}


def _buffers(blocks: Sequence[native.Block]) -> tuple[Buffer, ...]:
    if blocks:
        _trim_later()
    return tuple(np.frombuffer(memoryview(block), dtype=np.uint8) for block in blocks)


_trimming = False


def _trim_later() -> None:
    """Has memory given back that was not used again for a while."""
    global _trimming
    if not _trimming:
        _trimming = True
        call_later(_KEPT_SECONDS, _trim)


def _trim() -> None:
    global _trimming
    _trimming = False
    if native.trim_pool(_KEPT_SECONDS):
        _trim_later()


def _error(error: GradwireError, local: PeerIdentity) -> bytes:
    return faults.describe(error, local.name).SerializeToString()


def _refusal() -> ResourceExhausted:
    error = ResourceExhausted("too many bytes of large requests are arriving, or wait to be served")
    error.retry_after = _RETRY_AFTER_SECONDS
    error.not_started = True
    return error
