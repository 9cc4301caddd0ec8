"""The seam between gradwire and the transports that deliver its messages.

A `Link` is what users of the transport see of a session with one peer. Either peer may send requests over it.
The peer that receives a request gets a `ServerCall` and responds to it once, from any thread, whenever the
response is ready. Message bodies are opaque bytes in this package; attachments are the memory of large
tensors.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from gradwire.errors import GradwireError
from gradwire.proto.v1 import link_pb2, tensor_pb2
from gradwire.system.callbacks import call_each, call_elsewhere
from gradwire.transport.identity import PeerIdentity
from gradwire.transport.tls import Tls
from gradwire.wire import Limits, Plans, supported_codecs

__all__ = [
    "NO_PAYLOAD",
    "Buffer",
    "Handler",
    "Link",
    "LinkSettings",
    "Payload",
    "ResponseFuture",
    "Sendable",
    "ServerCall",
    "Traffic",
]

Buffer = npt.NDArray[np.uint8]
"""Memory that an attachment arrived in. It belongs to the receiver of the message."""


log = logging.getLogger("gradwire.link")

_CANCELLED = ("CANCELLED", "CANCELLED_AND_NOTIFIED")
_SETTLED = (*_CANCELLED, "FINISHED")
"""The states of a `concurrent.futures.Future` that has an outcome."""


class Sendable(Protocol):
    """Memory that is sent beside a message, and read while the message is being sent."""

    @property
    def view(self) -> memoryview:
        """The bytes to send."""

    def check_unmodified(self) -> None:
        """Raises an error if the memory was written to after the message was made."""


@dataclass(frozen=True)
class LinkSettings:
    """The behaviour of a link. All times are in seconds."""

    connect_timeout: float = 10.0
    """How long the first connection may take, retries included."""
    lost_after: float = 10.0
    """How long the peer may be unreachable before it counts as lost."""
    wait_for_ready: bool = True
    """Whether to wait for a peer that is unreachable: to try again while connecting, and to hold requests
    back while the connection is cut. If False, connecting and sending requests fail at once."""
    lease: float = 30.0
    """How long the accepting peer keeps the state that it holds for an unreachable peer."""
    max_message_bytes: int = 1 << 40
    """The largest message, attachments included, that this peer accepts."""
    max_bytes_in_flight: int = 4 << 30
    """How many bytes of large requests may be without a response at a time. A request that is larger than
    this is sent when no other large request is in flight."""
    max_tensor_elements: int = Limits.max_tensor_elements
    """How many elements a received tensor may span beyond those whose bytes were received."""
    max_body_bytes: int = 64 << 20
    """The largest message body, attachments not included, that this peer accepts."""
    same_host: bool = True
    """Whether to bypass the network between two processes of one host."""
    direct: bool = True
    """Whether to bypass gRPC between two hosts, over a TCP socket. Not with TLS, since that socket is plain
    text."""
    tls: Tls | None = None
    """How the connecting peer uses TLS; None: not at all."""
    max_shared_bytes: int = 4 << 30
    """How much shared memory this process may allocate for attachments to peers on the same host, over all
    links together. Attachments beyond this limit go over the socket."""
    chunk_bytes: int = 256 * 1024
    """How many bytes of an attachment go into one frame. Other frames may go between two of them."""
    hello_timeout: float = 10.0
    """How long a new stream may stay silent before it is closed."""
    codecs: tuple[tensor_pb2.Codec, ...] = field(default_factory=supported_codecs)
    """The codecs that this peer tells the other peer that it can decode."""


class Payload(NamedTuple):
    """The body and the attachments of a message that arrived completely."""

    body: bytes
    attachments: Sequence[Buffer] = ()


NO_PAYLOAD = Payload(b"")
"""In place of one whose memory is not needed any more."""


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that a link has sent and received so far: complete frames and attachments in shared memory,
    without the overhead of gRPC and TCP."""

    sent: int = 0
    received: int = 0
    saved: int = 0
    """How many more bytes would have been sent and received without compression."""

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.sent + other.sent, self.received + other.received, self.saved + other.saved)

    @property
    def total(self) -> int:
        """Bytes sent and received."""
        return self.sent + self.received


class ResponseFuture(Future[Any]):
    """The response to a request. Cancelling the future also cancels the request at the other peer."""

    waits_for_link = False
    """Whether its request waits while the connection is cut, whatever the settings say."""
    is_nested = False
    """Whether this request was sent while serving another request. The window never holds such a request
    back: the bytes in flight that it would wait for may be those of the outer request."""
    handle = 0
    """Set by the link: its name for the request."""
    abandon: Callable[[], None] | None = None
    """Set by the link: tells the other peer that the response is no longer awaited."""
    on_discarded: Callable[[Payload], object] | None = None
    """Set by the requester: called with a response that arrived just after the future was cancelled. The
    other peer does not know that such a response was discarded."""

    def __init__(self) -> None:
        # `Future.__init__` would create a condition, which costs more than everything else here.
        # Most futures need none: their response is already there when `result` is called, or the
        # waiting thread reads it itself.
        self._guard = threading.RLock()
        self._awaited: threading.Condition | None = None
        self._state = "PENDING"
        self._result: Any = None
        self._exception: BaseException | None = None
        self._waiters: list[Any] = []
        self._done_callbacks: list[Callable[[Future[Any]], object]] = []
        self._when_settled: list[Callable[[], object]] | None = []
        """None once the callbacks have been called."""

    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override]
        """The condition that `Future` waits on, created when it is first needed."""
        with self._guard:
            is_first = self._awaited is None
            if self._awaited is None:
                self._awaited = threading.Condition(self._guard)
        if is_first:
            self._on_awaited()
        return self._awaited

    def _on_awaited(self) -> None:
        """Called when a thread waits for the outcome without reading the link
        itself. Subclasses override it."""

    # `Future` takes its lock in these methods. They need none, since a state that is settled never changes.

    def done(self) -> bool:
        return self._state in _SETTLED

    def result(self, timeout: float | None = None) -> Any:
        if self._state == "FINISHED" and self._exception is None:
            return self._result
        try:
            return super().result(timeout)
        finally:
            del self  # otherwise the traceback of an error would refer back to the error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return self._exception if self._state == "FINISHED" else super().exception(timeout)

    def cancelled(self) -> bool:
        return self._state in _CANCELLED

    def cancel(self) -> bool:
        with self._guard:
            if self._state != "PENDING":
                return self.cancelled()
            self._state = "CANCELLED"
            # Unlike `Future.cancel`, this also notifies threads in futures.wait and as_completed: no executor
            # will ever pick up this future and notify them.
            self.set_running_or_notify_cancel()
            if self._awaited is not None:
                self._awaited.notify_all()
        self._invoke_callbacks()
        if self.abandon is not None:
            self.abandon()
        return True

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        """As `Future.add_done_callback`, but calls back on another thread. The thread that
        settles the future also reads the link: a callback that waits for another response would
        keep that response from being read."""
        if self.done():
            super().add_done_callback(fn)
            return
        self.when_settled(partial(call_elsewhere, partial(fn, self)))
        self._on_awaited()

    def when_settled(self, callback: Callable[[], object]) -> None:
        """Calls back when there is an outcome, on the thread that settles the future:
        the callback must not block."""
        with self._guard:
            if self._when_settled is not None:
                self._when_settled.append(callback)
                return
        callback()

    def _invoke_callbacks(self) -> None:
        """Called by `Future` and `settle` when there is an outcome."""
        with self._guard:
            callbacks, self._when_settled = self._when_settled or (), None
        call_each(callbacks)
        if self._done_callbacks:
            super()._invoke_callbacks()  # type: ignore[misc]

    def settle(self, outcome: Payload | GradwireError) -> bool:
        """Sets the outcome, unless there is one already. Returns whether it was set."""
        received, error = (outcome, None) if isinstance(outcome, Payload) else (None, outcome)
        with self._guard:
            # A response, a timer and a lost link may race; the lock decides which of them sets the outcome.
            is_first = self._state == "PENDING"
            if is_first:
                self._result, self._exception = received, error
                self._state = "FINISHED"
                for waiter in self._waiters:
                    (waiter.add_result if error is None else waiter.add_exception)(self)
                if self._awaited is not None:
                    self._awaited.notify_all()
                callbacks, self._when_settled = self._when_settled, None
        if is_first:
            if callbacks:
                call_each(callbacks)
            if self._done_callbacks:
                super()._invoke_callbacks()  # type: ignore[misc]
        elif received is not None and self.on_discarded is not None:
            self.on_discarded(received)
        return is_first


class ServerCall(ABC):
    """A request from the other peer, to be served by this process."""

    method: int
    """A value of link_pb2.Method."""
    request: Payload
    deadline: float | None
    """When the requester stops waiting, on the clock of time.monotonic. None: never."""
    link: Link | None
    """The link to the requester, over which this process can send requests of
    its own. None for unary calls."""

    def __init__(self) -> None:
        self._cancel_lock = threading.Lock()
        self.cancelled = False
        """Whether the requester no longer wants the response."""
        self._when_cancelled: dict[object, Callable[[], object]] = {}

    def when_cancelled(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Calls back once when the requester cancels or is lost; at once if that has already happened.

        Returns a function that removes the callback, so that finished work is not
        kept alive until the call ends.
        """
        token = object()
        with self._cancel_lock:
            if not self.cancelled:
                self._when_cancelled[token] = callback
                return lambda: self._remove_callback(token)
        callback()
        return lambda: None

    def _remove_callback(self, token: object) -> None:
        with self._cancel_lock:
            self._when_cancelled.pop(token, None)

    def cancel(self) -> None:
        """The requester no longer wants the response."""
        with self._cancel_lock:
            self.cancelled = True
            callbacks, self._when_cancelled = self._when_cancelled, {}
        call_each(callbacks.values())

    def begin(self) -> None:  # noqa: B027 - only some subclasses have something to do here
        """The call starts to run: its attachments no longer count as waiting for it."""

    def may_run_inline(self) -> bool:
        """Whether the thread that read the request may also serve it."""
        return False

    def about_to_block(self) -> None:  # noqa: B027
        """Called by a serving thread before it waits for another peer, so that
        another thread takes over reading."""

    @abstractmethod
    def respond(self, body: bytes, attachments: Sequence[Sendable] = ()) -> bool:
        """Sends the response. Returns whether the requester gets it: not if the response is too large, the
        call was cancelled, or there was a response before."""

    @abstractmethod
    def fail(self, error: link_pb2.Error) -> None:
        """Responds with an error."""


Handler = Callable[[ServerCall], object]
"""Takes a request, on the thread that reads the link: work that takes long must
be handed to another thread."""


class Link(ABC):
    """What users of the transport see of a session with one peer. Either peer may send requests."""

    local: PeerIdentity
    peer: PeerIdentity
    peer_codecs: frozenset[int] = frozenset()
    """The codecs that the other peer can decode."""
    inline_bytes: int = 0
    """Up to how many bytes of tensors should go into a message's body rather than beside it as attachments.
    An attachment has a fixed cost that only pays off for many bytes."""
    limits: Limits = Limits()
    """Limits for decoding messages from the other peer."""
    ended_by_timeout: bool = False
    """Whether the link ended because the other peer was unreachable for longer than `lost_after`."""
    upper_state: Any = None
    """Opaque to the transport, and kept for as long as the link lives; autograd keeps its releases there."""
    plans: Plans
    """The plans of calls over this link, in both directions."""

    @abstractmethod
    def send_request(
        self,
        method: int,
        body: bytes,
        attachments: Sequence[Sendable] = (),
        *,
        timeout: float | None = None,
        future: ResponseFuture | None = None,
    ) -> ResponseFuture:
        """Sends a request. The response settles `future` (a new future if none is given).

        The outcome is a `Payload` or an exception: the error that the other peer responded with,
        DeadlineExceeded after `timeout`, or a LinkError if the other peer is lost.
        """

    @abstractmethod
    def read_for(self, future: ResponseFuture) -> None:
        """Called by a thread before it waits for a response: reads the link until the response is there,
        unless another thread already reads it."""

    @abstractmethod
    def read_in_background(self, future: ResponseFuture) -> None:
        """Has another thread read the link until the response is there, for callers
        that wait without `read_for`."""

    @abstractmethod
    def close(self, *, leaving: bool = False) -> None:
        """Says goodbye and ends the link: requests in flight fail with LinkClosed at both peers.

        `leaving` tells the other peer that this process is going away, not just this link.
        """

    @abstractmethod
    def abort(self, error: GradwireError) -> None:
        """Ends the link now, without a goodbye: frames that wait are not sent. Requests
        in flight fail with `error`."""

    @property
    @abstractmethod
    def connected(self) -> bool:
        """Whether messages can be delivered right now; if not, they wait until they can."""

    @property
    @abstractmethod
    def traffic(self) -> Traffic:
        """Bytes sent and received since the link was opened."""

    @abstractmethod
    def count_saved(self, size: int) -> None:
        """Counts how many bytes compression saved on a message that was sent or received."""

    @property
    @abstractmethod
    def ended(self) -> GradwireError | None:
        """Why the link has ended for good; None while it is alive."""

    @abstractmethod
    def when_ended(self, callback: Callable[[Link], None]) -> None:
        """Calls back once when the link has ended for good; at once if it has already ended."""
