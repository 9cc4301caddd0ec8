"""The one seam between gradwire and what carries its messages.

A `Link` is a session with one other peer in which both ends may ask. Whoever is asked gets an
`ServerCall` and answers it once, from any thread, whenever the answer is ready. Bodies are opaque bytes
here; attachments are the memory of large tensors.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from gradwire.errors import GradwireError
from gradwire.proto.v1 import link_pb2, tensor_pb2
from gradwire.system.callbacks import call_each, call_elsewhere
from gradwire.wire import Limits, supported_codecs

__all__ = [
    "LARGE_BYTES",
    "Buffer",
    "Handler",
    "Link",
    "LinkSettings",
    "Payload",
    "PeerIdentity",
    "ResponseFuture",
    "Sendable",
    "ServerCall",
    "Traffic",
    "counted_size",
]

Buffer = npt.NDArray[np.uint8]
"""Memory that an attachment arrived in. It belongs to whoever receives the message."""


log = logging.getLogger("gradwire.link")

LARGE_BYTES = 64 * 1024
"""A body of this size is treated as attachments are: it counts as bytes in flight, and an answer is
acknowledged at once, since the other end keeps it until then."""
_CANCELLED = ("CANCELLED", "CANCELLED_AND_NOTIFIED")
_SETTLED = (*_CANCELLED, "FINISHED")
"""The states of a `concurrent.futures.Future` with an outcome."""


def counted_size(body: bytes) -> int:
    """What a body counts as in flight: nothing, if it is small."""
    return len(body) if len(body) >= LARGE_BYTES else 0


class Sendable(Protocol):
    """Memory that travels beside a message, read while it is being sent."""

    @property
    def view(self) -> memoryview:
        """The bytes."""

    def check_unmodified(self) -> None:
        """Raises if the memory was written to since the message was made."""


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """Who a peer is."""

    id: int
    """Random 64-bit id, new for each start of a process."""
    name: str
    """For people."""
    address: str = ""
    """Where it was reached, if it listens."""

    def __str__(self) -> str:
        return f"{self.name} ({self.address})" if self.address else self.name


@dataclass(frozen=True)
class LinkSettings:
    """How a link behaves. Times are in seconds."""

    connect_timeout: float = 10.0
    """How long the first connection may take, retries included."""
    lost_after: float = 10.0
    """How long the other end may be out of reach before it counts as lost."""
    wait_for_ready: bool = True
    """Whether to wait for an end that is out of reach: to try again when connecting, and to hold questions
    back while a cut is mended. If not, both fail at once."""
    lease: float = 30.0
    """How long the accepting end keeps what it holds for a peer that is out of reach."""
    max_message_bytes: int = 1 << 40
    """The largest message, attachments included, that this end takes."""
    max_bytes_in_flight: int = 4 << 30
    """How much of large questions may be unanswered at a time. A larger one goes alone."""
    max_tensor_elements: int = Limits.max_tensor_elements
    """How many elements a tensor that comes may span without that their bytes came."""
    max_body_bytes: int = 64 << 20
    """The largest message body, attachments not included, that this end takes."""
    same_host: bool = True
    """Whether to go around the network between processes of one host."""
    max_shared_bytes: int = 4 << 30
    """How much shared memory this process may set up for what it sends to others on the same host, over all
    links together. What finds no room there goes over the socket."""
    chunk_bytes: int = 1 << 20
    """How much of an attachment goes into one frame."""
    hello_timeout: float = 10.0
    """How long a stream may stay silent after it was opened."""
    codecs: tuple[tensor_pb2.Codec, ...] = field(default_factory=supported_codecs)
    """What this end says that it can decode."""

    @property
    def max_frame_bytes(self) -> int:
        """A body, and what may be in a frame beside it: ids of transfers, small frames that left with it."""
        return self.max_body_bytes + (2 << 20)


@dataclass(frozen=True, slots=True)
class Payload:
    """A message that arrived whole."""

    body: bytes
    attachments: Sequence[Buffer] = ()


@dataclass(frozen=True, slots=True)
class Traffic:
    """What went over a link so far, in bytes: whole frames, but not what gRPC and TCP add to them. What
    crossed in shared memory counts."""

    sent: int = 0
    received: int = 0
    saved: int = 0
    """What would have gone as well without compression, both ways."""

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.sent + other.sent, self.received + other.received, self.saved + other.saved)

    @property
    def total(self) -> int:
        """Both ways."""
        return self.sent + self.received


class ResponseFuture(Future[Any]):
    """The answer to a question. Cancelling it reaches the other end."""

    is_nested = False
    """Whether a question of somebody else waits for it. Then nothing may keep it back: it could be what the
    room that it lacks is waiting for."""
    abandon: Callable[[], None] | None = None
    """Set by the link: tells the other end that nobody waits any more."""
    on_discarded: Callable[[Payload], object] | None = None
    """Set by whoever asks: told of an answer that came when it had just been cancelled. The other end does
    not know that nobody looks into it."""

    def __init__(self) -> None:
        # Not `Future`'s own: it makes a condition, which takes longer than all the rest, and which nobody
        # needs whose answer is here when they ask for it, or who reads it themselves.
        self._guard = threading.RLock()
        self._awaited: threading.Condition | None = None
        self._state = "PENDING"
        self._result: Any = None
        self._exception: BaseException | None = None
        self._waiters: list[Any] = []
        self._done_callbacks: list[Callable[[Future[Any]], object]] = []
        self._when_settled: list[Callable[[], object]] | None = []
        """None once they have been called."""

    @property
    def _condition(self) -> threading.Condition:  # type: ignore[override]
        """What `Future` waits with."""
        with self._guard:
            is_first = self._awaited is None
            if self._awaited is None:
                self._awaited = threading.Condition(self._guard)
        if is_first:
            self._on_awaited()
        return self._awaited

    def _on_awaited(self) -> None:
        """Somebody waits for it who may not read it themselves."""

    # `Future` takes its lock for these, which a state that only ever goes one way does not need.

    def done(self) -> bool:
        return self._state in _SETTLED

    def result(self, timeout: float | None = None) -> Any:
        if self._state == "FINISHED" and self._exception is None:
            return self._result
        try:
            return super().result(timeout)
        finally:
            del self  # else the traceback of an error would lead back to the error

    def exception(self, timeout: float | None = None) -> BaseException | None:
        return self._exception if self._state == "FINISHED" else super().exception(timeout)

    def cancelled(self) -> bool:
        return self._state in _CANCELLED

    def cancel(self) -> bool:
        with self._guard:
            if self._state != "PENDING":
                return self.cancelled()
            self._state = "CANCELLED"
            # Unlike Future's own, tells those who wait in futures.wait and as_completed, too: no executor
            # will ever pick this future up and do so.
            self.set_running_or_notify_cancel()
            if self._awaited is not None:
                self._awaited.notify_all()
        self._invoke_callbacks()
        if self.abandon is not None:
            self.abandon()
        return True

    def add_done_callback(self, fn: Callable[[Future[Any]], object]) -> None:
        """As `Future`'s, but on another thread: the thread that brings the answer reads the link, and
        a callback that waits for another answer would keep it from ever coming."""
        if self.done():
            super().add_done_callback(fn)
            return
        self.when_settled(partial(call_elsewhere, partial(fn, self)))
        self._on_awaited()

    def when_settled(self, callback: Callable[[], object]) -> None:
        """Calls back when there is an outcome, on the thread that brings it: it must not block."""
        with self._guard:
            if self._when_settled is not None:
                self._when_settled.append(callback)
                return
        callback()

    def _invoke_callbacks(self) -> None:
        """`Future` calls this when there is an outcome."""
        with self._guard:
            callbacks, self._when_settled = self._when_settled or (), None
        call_each(callbacks)
        if self._done_callbacks:
            super()._invoke_callbacks()  # type: ignore[misc]

    def settle(self, outcome: Payload | GradwireError) -> bool:
        """Sets the outcome unless there is one already."""
        received, error = (outcome, None) if isinstance(outcome, Payload) else (None, outcome)
        with self._guard:
            # An answer, a timer and a lost link may race; the lock decides who is first.
            is_first = self._state == "PENDING"
            if is_first:
                self._result, self._exception = received, error
                self._state = "FINISHED"
                for waiter in self._waiters:
                    (waiter.add_result if error is None else waiter.add_exception)(self)
                if self._awaited is not None:
                    self._awaited.notify_all()
        if is_first:
            self._invoke_callbacks()
        elif received is not None and self.on_discarded is not None:
            self.on_discarded(received)
        return is_first


class ServerCall(ABC):
    """One question from the other end."""

    method: int
    """A value of link_pb2.Method."""
    request: Payload
    deadline: float | None
    """On time.monotonic's clock."""
    link: Link | None
    """The way back: the one who asked can be asked over it. None if there is no way back."""

    def __init__(self) -> None:
        self._cancel_lock = threading.Lock()
        self._cancelled = False
        self._when_cancelled: dict[object, Callable[[], object]] = {}

    @property
    def cancelled(self) -> bool:
        """Whether the requester no longer wants the answer."""
        return self._cancelled

    def when_cancelled(self, callback: Callable[[], object]) -> Callable[[], None]:
        """Calls back, once, when the requester cancels or is lost; at once if it already is so.

        What it returns takes the callback back: what is done must not be kept for the length of a call.
        """
        token = object()
        with self._cancel_lock:
            if not self._cancelled:
                self._when_cancelled[token] = callback
                return lambda: self._remove_callback(token)
        callback()
        return lambda: None

    def _remove_callback(self, token: object) -> None:
        with self._cancel_lock:
            self._when_cancelled.pop(token, None)

    def cancel(self) -> None:
        """The requester no longer wants the answer."""
        with self._cancel_lock:
            self._cancelled = True
            callbacks, self._when_cancelled = self._when_cancelled, {}
        call_each(callbacks.values())

    def begin(self) -> None:  # noqa: B027 - not all have something to do then
        """Work on it begins: what came with it no longer counts as waiting."""

    def may_run_inline(self) -> bool:
        """For whoever takes the question: whether the thread that brings it may be used to answer it."""
        return False

    def about_to_block(self) -> None:  # noqa: B027
        """For a thread that answers, and that is about to wait: if others wait for it, they need not."""

    @abstractmethod
    def respond(self, body: bytes, attachments: Sequence[Sendable] = ()) -> bool:
        """Sends the response. Whether the requester gets it: not if it is too large, nobody waits for it any
        more, or another was sent before."""

    @abstractmethod
    def fail(self, error: link_pb2.Error) -> None:
        """Answers with an error."""


Handler = Callable[[ServerCall], object]
"""Takes a question, on the thread that reads the link: it must hand over what takes time."""


class Link(ABC):
    """A session with one other peer: either end may ask."""

    local: PeerIdentity
    peer: PeerIdentity
    peer_codecs: frozenset[int] = frozenset()
    """What the other end can decode."""
    inline_bytes: int = 0
    """How much of what could go beside a message had better go within it: bytes of their own take longer,
    unless they are many."""
    limits: Limits = Limits()
    """On what is decoded here of messages from the other end."""
    ended_by_timeout: bool = False
    """Whether it ended because the other end was out of reach for too long."""
    autograd_state: Any = None
    """What the layer above keeps for as long as the link lives."""

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
        """Sends a question. The answer settles `future` (a new one if none is given).

        The answer is a `Payload` or an exception: whatever the other end failed with,
        DeadlineExceeded after `timeout`, or a LinkError if the other end is lost.
        """

    @abstractmethod
    def read_for(self, future: ResponseFuture) -> None:
        """For a thread that is about to wait for an answer: reads the link until it comes, if nobody does."""

    @abstractmethod
    def read_in_background(self, future: ResponseFuture) -> None:
        """For those who wait for an answer in another way: has the link read until it comes."""

    @abstractmethod
    def close(self, *, leaving: bool = False) -> None:
        """Says goodbye and ends: questions in flight fail with LinkClosed at both ends.

        `leaving` tells the other end that this peer goes altogether.
        """

    @abstractmethod
    def abort(self, error: GradwireError) -> None:
        """Ends now, without a word: what waits is not sent. Questions in flight fail with `error`."""

    @property
    @abstractmethod
    def connected(self) -> bool:
        """Whether messages can pass right now; if not, they wait until they can."""

    @property
    @abstractmethod
    def traffic(self) -> Traffic:
        """What went over the link since it was opened."""

    @abstractmethod
    def count_saved(self, size: int) -> None:
        """A message that was sent or received was so many bytes smaller for being compressed."""

    @property
    @abstractmethod
    def ended(self) -> GradwireError | None:
        """Why the link has ended for good; None while it lives."""

    @abstractmethod
    def when_ended(self, callback: Callable[[Link], None]) -> None:
        """Calls back once when the link has ended for good; at once if it already has."""
