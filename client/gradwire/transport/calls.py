"""The calls that a session keeps track of: outbound requests without a response, and inbound requests."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gradwire.errors import Cancelled, ResourceExhausted
from gradwire.proto.v1 import link_pb2
from gradwire.system.timers import Timer
from gradwire.transport import faults
from gradwire.transport.base import Buffer, Payload, ResponseFuture, Sendable, ServerCall, counted_size
from gradwire.transport.frames import RequestFrame

if TYPE_CHECKING:
    from gradwire.transport.session import Session
    from gradwire.transport.streams import Streams

__all__ = ["InboundCall", "OutboundCall"]

Response = tuple[bytes | link_pb2.Error, Sequence[Sendable]]


class OutboundCall:
    """A request that this peer sent and that has no response yet."""

    __slots__ = (
        "attachments",
        "body",
        "deadline",
        "future",
        "method",
        "refused_since",
        "timeout",
        "timer",
    )

    def __init__(
        self,
        method: int,
        body: bytes,
        attachments: Sequence[Sendable],
        future: ResponseFuture,
        timeout: float | None,
    ) -> None:
        self.method = method
        self.body = body
        self.attachments = attachments
        self.future = future
        self.timeout = timeout
        self.deadline = None if timeout is None else time.monotonic() + timeout
        self.timer: Timer | None = None
        self.refused_since = 0.0
        """When the other peer first refused the request because it was too busy; 0 if it did not."""

    @property
    def is_large(self) -> bool:
        """Whether the request counts as bytes in flight."""
        return bool(self.attachments or counted_size(self.body))

    @property
    def size(self) -> int:
        """How many bytes in flight the request counts as."""
        return counted_size(self.body) + sum(len(attachment.view) for attachment in self.attachments)

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


class InboundCall(ServerCall):
    """A request from the other peer, kept until its response is acknowledged.

    The session's lock guards `response`.
    """

    def __init__(
        self,
        session: Session,
        streams: Streams,
        request: RequestFrame,
        attachments: Sequence[Buffer],
    ) -> None:
        super().__init__()
        self._streams = streams
        self.id = request.id
        self.method = request.method
        self.request = Payload(request.body, attachments)
        left = request.timeout_seconds
        self.deadline = time.monotonic() + left if left > 0 else None
        self.link = session
        self.response: Response | None = None
        self._session = session

    def may_run_inline(self) -> bool:
        return self._streams.may_run_inline()

    def about_to_block(self) -> None:
        self._streams.about_to_block()

    def begin(self) -> None:
        self._session.quota.give_back(self.id)

    def respond(self, body: bytes, attachments: Sequence[Sendable] = ()) -> bool:
        try:
            self._session._check_size(body, attachments)
        except ResourceExhausted as error:
            self.fail(faults.describe(error, self._session.local.name))
            return False
        return self._respond(body, attachments)

    def fail(self, error: link_pb2.Error) -> None:
        self._respond(error, ())

    def _respond(self, outcome: bytes | link_pb2.Error, attachments: Sequence[Sendable]) -> bool:
        with self._session._lock:
            is_sent = self.response is None
            if self.response is None:
                if self._cancelled and attachments:
                    # The response is no longer awaited, so its attachments need not be sent.
                    is_sent = False
                    error = Cancelled("the call was cancelled")
                    outcome, attachments = faults.describe(error, self._session.local.name), ()
                self.response = (outcome, attachments)
                self.begin()  # if the call never ran: it was refused or cancelled
                self.request = Payload(b"")  # sending the response again does not need the request's memory
                self._when_cancelled.clear()
                self._session._put_response(self)
        self._session._flush_response()
        return is_sent
