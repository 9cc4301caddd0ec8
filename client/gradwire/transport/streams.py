"""What carries a session for a while: where it is written to, and what has half arrived."""

from __future__ import annotations

from gradwire.errors import ProtocolError
from gradwire.proto.v1 import link_pb2
from gradwire.transport.base import LinkSettings, ResponseFuture, Traffic
from gradwire.transport.memory_budget import Quota
from gradwire.transport.outbox import Outbox, Outgoing
from gradwire.transport.reassembly import CompleteMessage, Reassembler

__all__ = ["StreamPair", "Streams"]


class Streams:
    """One attempt to carry a session: what waits to be written, and what has half arrived."""

    inline_bytes = 512 * 1024
    """How much had better go within a message than beside it: see `Link`."""

    def __init__(
        self,
        settings: LinkSettings,
        quota: Quota,
        control: Outgoing,
        bulk: Outgoing,
        *,
        orphan_timeout: float | None = None,
        parent: Streams | None = None,
    ) -> None:
        self.control = control
        self.bulk = bulk
        self.reassembler = Reassembler(settings.max_message_bytes, quota, orphan_timeout)
        self.parent = parent
        """The streams that led to these. They end together."""
        self.received = 0
        """Bytes that came."""
        self.has_unhandled_frames = False
        """Whether more has been read than is taken in so far."""

    @property
    def traffic(self) -> Traffic:
        return Traffic(sum(outbox.written for outbox in {self.control, self.bulk}), self.received)

    def take(self, frame: link_pb2.Frame, kind: str | None) -> CompleteMessage | None:
        """Takes a frame that only some streams know. Returns the message that it completes, if any."""
        raise ProtocolError(f"an unexpected frame: {kind or 'of an unknown kind'}")

    def note_request_sent(self) -> None:
        """A question was put."""

    def flush(self) -> None:
        """Writes what was put, where nobody does so unasked."""

    def flush_response(self) -> None:
        """The same for an answer. It may leave a little later, together with others."""
        self.flush()

    def may_run_inline(self) -> bool:
        """Whether a question may be answered by the thread that brings it."""
        return False

    def about_to_block(self) -> None:
        """For a thread that answers, and that is about to wait: if others wait for it, they need not."""

    def read_for(self, future: ResponseFuture) -> None:
        """Reads until there is an answer, where the thread that waits for it can."""

    def read_in_background(self, future: ResponseFuture) -> None:
        """Has an answer read without delay, where nobody does so unasked."""

    def close(self, *, discard: bool = False) -> None:
        self.control.close(discard=discard)
        self.bulk.close(discard=discard)
        self.reassembler.close()
        if discard and self.parent is not None:
            self.parent.close(discard=True)


class StreamPair(Streams):
    """A stream for small messages and one for bulk, each written from an outbox."""

    control: Outbox
    bulk: Outbox

    def __init__(self, settings: LinkSettings, quota: Quota) -> None:
        super().__init__(settings, quota, Outbox(), Outbox(), orphan_timeout=settings.hello_timeout)
