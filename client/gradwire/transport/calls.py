"""A request as its two ends know it while it is under way: `OutboundCall` and `InboundCall`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gradwire.errors import GradwireError, ResourceExhausted
from gradwire.proto.v1 import link_pb2
from gradwire.transport import blocks, event_loop, faults, native
from gradwire.transport.base import NO_PAYLOAD, Payload, ResponseFuture, Sendable, ServerCall

if TYPE_CHECKING:
    from gradwire.transport.session import Session

__all__ = ["InboundCall", "OutboundCall", "payload_of"]


def payload_of(event: native.Event) -> Payload:
    attachments = event.attachments
    return Payload(event.body, blocks.buffers(attachments) if attachments else ())


class OutboundCall:
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
        self.attachments = ()
        future = self.future
        future.abandon = None
        future.settle(outcome)


class InboundCall(ServerCall):
    """A request from the other peer."""

    link: Session

    def __init__(self, session: Session, event: native.Event) -> None:
        super().__init__()
        self.link = session
        self.id = event.id
        self.method = event.method
        self.deadline = event.deadline
        self.cancelled = event.flag
        self.request = payload_of(event)

    def begin(self) -> None:
        self.link.begin(self)

    def may_run_inline(self) -> bool:
        return event_loop.serves(self.link)

    def about_to_block(self) -> None:
        if event_loop.serves(self.link):
            native.about_to_block()

    def respond(self, body: bytes, attachments: Sequence[Sendable] = ()) -> bool:
        # Its memory is free before the requester sends more. Sending the response again does not need it.
        self.request = NO_PAYLOAD
        try:
            self.link.check_size(body, attachments)
        except ResourceExhausted as error:
            self.fail(faults.describe(error, self.link.local.name))
            return False
        return self._done(self.link.respond(self, body, attachments))

    def fail(self, error: link_pb2.Error) -> None:
        self.request = NO_PAYLOAD
        self._done(self.link.fail(self, error))

    def _done(self, is_sent: bool) -> bool:
        self._when_cancelled.clear()
        return is_sent
