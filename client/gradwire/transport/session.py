"""A Link over carriers that come and go. Its state is native: `native.Link` decides, this module calls
back."""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial

from gradwire.errors import (
    Cancelled,
    ConnectFailed,
    DeadlineExceeded,
    ForkedProcess,
    GradwireError,
    InternalError,
    LinkClosed,
    ProtocolError,
    ResourceExhausted,
)
from gradwire.proto.v1 import link_pb2
from gradwire.system.callbacks import call_each
from gradwire.system.interrupts import Uninterrupted
from gradwire.system.randomness import new_id
from gradwire.system.timers import Timer, call_later
from gradwire.transport import blocks, event_loop, faults, native
from gradwire.transport.base import (
    Handler,
    Link,
    LinkSettings,
    Payload,
    ResponseFuture,
    Sendable,
    Traffic,
)
from gradwire.transport.calls import InboundCall, OutboundCall, payload_of
from gradwire.transport.carriers import GrpcStream, SocketCarrier
from gradwire.transport.identity import PeerIdentity
from gradwire.wire import Limits, Plans

__all__ = ["Budget", "Session"]

log = logging.getLogger("gradwire.link")

Budget = native.Budget

_RETRY_AFTER_SECONDS = 0.1
_PATIENCE_SECONDS = 120.0
"""How long a request without a deadline is sent again and again if the other peer refuses it."""
_ALL = 1 << 32
_SMALL_BYTES = 64 * 1024
"""Small frames, up to about this many bytes, go into one message of a gRPC stream."""
_BULK_BYTES = 768 * 1024
"""So do chunks of attachments up to about this many bytes, if no small frames come between them: gRPC takes
as long for each message as for copying some 100 KB."""
_LOOK_SECONDS = 0.1
"""How long a thread waits in C++ before it looks whether Ctrl-C was pressed."""


class Session(Link):
    """A Link over carriers that come and go.

    One lock guards the native link. No callback or handler is called while it is held.
    """

    inline_bytes = 64 * 1024

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
        self.plans = Plans()
        self._handler = handler
        self._lock = threading.RLock()  # a destructor may end a call within any line
        self._delivered = threading.Condition(self._lock)
        self._delivery_is_awaited = False
        self._native = native.Link(
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
            patience=_PATIENCE_SECONDS,
        )
        self._carrier: GrpcStream | SocketCarrier | None = None
        self._is_moving = False
        """Whether a connection takes the place of another: then requests wait, whatever the settings say."""
        self._inbound: dict[int, InboundCall] = {}
        """Requests that are being served."""
        self._timer: Timer | None = None
        self._saved_bytes = 0
        self._ended: GradwireError | None = None
        self._end_callbacks: list[Callable[[Link], None]] = []
        _live.add(self)

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
        call = OutboundCall(future, timeout, attachments)
        views = _views(attachments) if attachments else ()
        with self._lock:
            if self._ended is not None:
                raise self._ended.again()
            waits = self.settings.wait_for_ready or future.waits_for_link or self._is_moving
            if self._carrier is None and not waits:
                raise self._unreachable()
            now = time.monotonic()
            handle = self._native.call(
                now, method, body, views, timeout, future.is_nested, bool(views), call, waits
            )
            if timeout is not None:
                self._set_timer(now)
            future.handle = handle
            future.abandon = partial(self._withdraw, handle, call)
        if future.cancelled():
            self._withdraw(handle, call)  # it was cancelled before `abandon` was set
        self._flush(is_large=bool(views))
        return future

    def _withdraw(self, handle: int, call: OutboundCall) -> None:
        with self._lock:
            if self._ended is None:
                self._native.withdraw(time.monotonic(), handle)
        call.let_go()
        if self._ended is not None:
            return
        self._flush()
        self.handle_events(most_requests=0)

    def read_for(self, future: ResponseFuture) -> None:
        # Over gRPC, others read, and wake this thread when the response is there.
        while self._carrier is not None and not future.done():
            waited = self._native.wait(future.handle, _LOOK_SECONDS)
            if waited == native.EVENTS:
                # Handling must not stop halfway: it cannot be repeated, and the response may be another
                # thread's.
                with Uninterrupted():
                    self.handle_events(future.handle)
            elif waited != native.INTERRUPTED:
                return

    def read_in_background(self, future: ResponseFuture) -> None:
        self._native.read_in_background(1)
        future.when_settled(partial(self._native.read_in_background, -1))

    def limit_bytes_in_flight(self, max_bytes: int) -> None:
        """Sets how many bytes of large requests the other peer accepts at a time; 0 means any number."""
        with self._lock:
            self._native.limit_window(time.monotonic(), max_bytes)
        self._flush()

    def check_size(self, body: bytes, attachments: Sequence[Sendable]) -> None:
        if len(body) > self.settings.max_body_bytes:
            raise ResourceExhausted(
                f"a message body of {len(body)} bytes exceeds the limit of {self.settings.max_body_bytes} "
                "bytes; pass large data as tensors, which travel beside it in chunks"
            )
        size = len(body)
        if attachments:
            if len(attachments) > native.MOST_ATTACHMENTS:
                raise ResourceExhausted(
                    f"a message has {len(attachments)} large tensors, more than the "
                    f"{native.MOST_ATTACHMENTS} that a message may have"
                )
            size += sum(len(attachment.view) for attachment in attachments)
        if size > self.peer_max_message_bytes:
            raise ResourceExhausted(
                f"a message of {size} bytes exceeds the limit of {self.peer_max_message_bytes} bytes "
                f"that {self.peer} takes",
                worker=str(self.peer),
            )

    # -- responding

    def begin(self, call: InboundCall) -> None:
        with self._lock:
            self._native.begin(call.id)

    def respond(self, call: InboundCall, body: bytes, attachments: Sequence[Sendable]) -> bool:
        views = _views(attachments) if attachments else ()
        with self._lock:
            is_sent = self._native.respond(call.id, body, views, bool(views), attachments)
        self._flush_soon(is_large=bool(views))
        return is_sent

    def fail(self, call: InboundCall, error: link_pb2.Error) -> bool:
        with self._lock:
            is_sent = self._native.fail(call.id, error.SerializeToString())
        self._flush_soon()
        return is_sent

    # -- the carrier

    def attach(self, carrier: GrpcStream | SocketCarrier) -> None:
        """Continues over another carrier. Raises OSError if the system has no descriptor left.

        After a socket `handle_events` must follow, while no lock is held: what has arrived meanwhile may end
        the session.
        """
        with self._lock:
            previous, self._carrier = self._carrier, None
            if self._ended is not None:
                carrier.close()
            elif isinstance(carrier, SocketCarrier):
                carrier.number = self._native.connect(
                    carrier.take_descriptor(),
                    carrier.is_accepted,
                    self,
                    self.settings.max_shared_bytes if carrier.is_local else 0,
                )
                self._carrier = carrier
            else:
                self._native.attach(time.monotonic(), self)
                self._carrier = carrier
                carrier.hand_over()
            event_loop.start()
        if previous is not None:
            previous.close()

    def detach(self, carrier: GrpcStream | SocketCarrier) -> bool:
        """Detaches a carrier that broke, or the socket to which a stream led. Returns whether it was in
        use."""
        carrier.close()
        with self._lock:
            used = self._carrier
            if used is not carrier and not (isinstance(used, SocketCarrier) and used.parent is carrier):
                return False
            self._carrier = None
            self._native.disconnect()
            self._delivered.notify_all()
            return self._ended is None

    def begin_output(self, stream: GrpcStream) -> bool:
        """Gives the calling thread the right to write if nobody has it, and there is something to write."""
        with self._lock:
            if self._carrier is not stream or stream.writer != "nobody" or not self._native.has_output:
                return False
            stream.writer = "caller"
            return True

    def take_output(self, stream: GrpcStream) -> bytes | None:
        """What a stream is to write next. Empty if there is nothing now: then nobody has the right to write.
        None if nothing more comes."""
        data = b""
        while True:
            with self._lock:
                if self._carrier is not stream:
                    return None
                if not self._native.has_output:
                    if data:
                        return data
                    if self._ended is not None:
                        return None
                    stream.rest()
                    return b""
                data = self._native.take_output(_SMALL_BYTES, _BULK_BYTES, data)
                # The thread may be gRPC's, which reads all streams: all else is left to the event loop.
                checks = self._native.take_checks()
            self._handle(checks)
            # After a check there is more to write, which had better go in the same message.
            if len(data) > _SMALL_BYTES or (data and not checks):
                return data

    def _flush(self, *, is_large: bool = False) -> None:
        """Writes what there is to write. The lock is not held."""
        carrier = self._carrier
        if isinstance(carrier, GrpcStream):
            carrier.flush()
        elif carrier is not None and self._native.flush(is_large):
            self.handle_events(most_requests=0)  # this thread may be serving one already

    def _flush_soon(self, *, is_large: bool = False) -> None:
        """As `_flush`, but responses to requests that came together leave together."""
        carrier = self._carrier
        if isinstance(carrier, GrpcStream):
            carrier.flush()
        elif carrier is not None and self._native.flush_soon(is_large):
            self.handle_events(most_requests=0)

    def feed(self, data: bytes, stream: GrpcStream) -> None:
        """Takes what was read from a stream. The event loop handles what no caller waits for."""
        with self._lock:
            # Else it was replaced; the other peer sends what matters again.
            has_output = self._carrier is stream and self._native.feed(data)
        if has_output:
            stream.flush()

    def wait_until_delivered(self, timeout: float) -> bool:
        """Waits for the other peer to acknowledge all large responses, or to be unreachable. Returns
        whether that happened in time."""
        with self._delivered:
            self._delivery_is_awaited = True
            return self._delivered.wait_for(
                lambda: self._carrier is None or self._native.all_delivered, timeout
            )

    # -- events

    def _take_events(self, call: int = 0, most_requests: int = _ALL) -> list[native.Event]:
        """What has happened, for `_handle`. The lock is held."""
        events = self._native.take_events(call, most_requests)
        for event in events:
            if event.kind == native.REQUEST:
                # Here, so that no other thread can come with a cancellation before.
                self._inbound[event.id] = InboundCall(self, event)
        if self._delivery_is_awaited:
            self._delivered.notify_all()
        return events

    def handle_events(self, call: int = 0, most_requests: int = _ALL) -> None:
        """Handles what has happened, up to the last of so many requests, which this thread may serve: what
        follows must not wait for that, and is left to the event loop. Before the first request for 0.
        Outcomes of other calls than that of this handle are left to threads that wait in `read_for`."""
        with self._lock:
            events = self._take_events(call, most_requests)
        self._handle(events)

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
            self._set_timer(now)
            events = self._take_events()
        self._handle(events)
        self._flush()

    def _handle(self, events: list[native.Event]) -> None:
        for event in events:
            try:
                _HANDLERS[event.kind](self, event)
            except Exception as error:
                log.exception("an event of the session with %s could not be handled", self.peer)
                failure = InternalError(f"an event could not be handled: {error!r}")
                if isinstance(event.cookie, OutboundCall):
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
        event.cookie.settle(payload_of(event))

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
                events = self._take_events(most_requests=0)
            self._handle(events)
        else:
            with self._lock:
                self._native.confirm(event.id)
        self._flush(is_large=True)

    def _on_goodbye(self, event: native.Event) -> None:
        if event.body:
            self.abort(faults.rebuild(link_pb2.Error.FromString(event.body)))
        else:
            error = LinkClosed(f"{self.peer} ended the link", worker=str(self.peer))
            error.leaving = event.flag
            self.abort(error)

    def _on_timer(self, event: native.Event) -> None:
        with self._lock:
            self._set_timer(time.monotonic())

    def _on_disconnected(self, event: native.Event) -> None:
        carrier = self._carrier
        if isinstance(carrier, SocketCarrier) and carrier.number == event.id:
            carrier.lacked_descriptors = event.flag
            carrier.on_cut(carrier, event.body.decode())

    def _on_broken(self, event: native.Event) -> None:
        log.warning("%s broke the protocol: %s", self.peer, event.body.decode())
        self.refuse(ProtocolError(f"{self.peer}: {event.body.decode()}", worker=str(self.peer)))

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
            events = self._take_events()
            calls: list[OutboundCall] = self._native.open_calls()
            end()
            self._ended = error
            inbound, self._inbound = self._inbound, {}
            callbacks, self._end_callbacks = self._end_callbacks, []
            if self._timer is not None:
                self._timer.cancel()
            self._delivered.notify_all()
            if isinstance(self._carrier, GrpcStream) and self._carrier.writer == "nobody":
                self._carrier.hand_over()  # to write the goodbye, if there is one, and end
        self._flush()
        self._handle(events)
        for call in calls:
            call.settle(error.again())
        call_each(call.cancel for call in inbound.values())
        call_each(partial(callback, self) for callback in callbacks)

    def leave_to_parent(self) -> None:
        """In a forked process: the session, and what carries it, are the parent's. Threads that do not exist
        here may hold its locks, and those of the native session, which is not used any more."""
        self._lock = threading.RLock()
        self._delivered = threading.Condition(self._lock)
        self._carrier = None
        self._inbound, self._end_callbacks, self._timer = {}, [], None
        self._ended = self._ended or ForkedProcess("the link is that of the process which forked this one")

    @property
    def connected(self) -> bool:
        return self._carrier is not None and self._ended is None

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
    native.REQUEST: Session._on_request,
    native.RESPONSE: Session._on_response,
    native.ERROR: Session._on_error,
    native.EXPIRED: Session._on_expired,
    native.NO_MEMORY: Session._on_no_memory,
    native.UNREACHABLE: Session._on_unreachable,
    native.DISCARDED: Session._on_discarded,
    native.CANCELLED: Session._on_cancelled,
    native.ACKNOWLEDGED: Session._on_acknowledged,
    native.CHECK: Session._on_check,
    native.GOODBYE: Session._on_goodbye,
    native.TIMER: Session._on_timer,
    native.DISCONNECTED: Session._on_disconnected,
    native.BROKEN: Session._on_broken,
}


_live: weakref.WeakSet[Session] = weakref.WeakSet()


def _after_fork() -> None:
    for session in list(_live):
        session.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)


def _views(attachments: Sequence[Sendable]) -> list[memoryview]:
    blocks.trim_later()  # they may go through shared memory
    return [attachment.view for attachment in attachments]


def _error(error: GradwireError, local: PeerIdentity) -> bytes:
    return faults.describe(error, local.name).SerializeToString()


def _refusal() -> ResourceExhausted:
    error = ResourceExhausted("too many bytes of large requests are arriving, or wait to be served")
    error.retry_after = _RETRY_AFTER_SECONDS
    error.not_started = True
    return error
