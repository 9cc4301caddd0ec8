"""The streams of a session: the outboxes that it writes to, and the messages that have partly arrived."""

from __future__ import annotations

from gradwire.errors import ProtocolError
from gradwire.proto.v1 import link_pb2
from gradwire.transport.base import LinkSettings, ResponseFuture, Traffic
from gradwire.transport.memory_budget import Quota
from gradwire.transport.outbox import Outbox, Outgoing
from gradwire.transport.reassembly import CompleteMessage, Reassembler

__all__ = ["StreamPair", "Streams"]


class Streams:
    """The streams of one connection attempt: their outboxes, and the messages that have partly arrived."""

    inline_bytes = 512 * 1024
    """Up to how many bytes of tensors should go into a message's body: see `Link.inline_bytes`."""

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
        """The gRPC streams that led to this local socket. They end together."""
        self.received = 0
        """How many bytes were received."""
        self.has_unhandled_frames = False
        """Whether further frames of the same envelope have yet to be handled."""

    @property
    def traffic(self) -> Traffic:
        return Traffic(sum(outbox.written for outbox in {self.control, self.bulk}), self.received)

    def take(self, frame: link_pb2.Frame, kind: str | None) -> CompleteMessage | None:
        """Handles a kind of frame that only some streams know. Returns the
        message that it completes, if any."""
        raise ProtocolError(f"an unexpected frame: {kind or 'of an unknown kind'}")

    def note_request_sent(self) -> None:
        """Notes that a request was put into the outbox."""

    def flush(self) -> None:
        """Writes the frames that were put, if the streams have no thread that does so."""

    def flush_response(self) -> None:
        """Like `flush`, for a response. It may be written a little later, together with other responses."""
        self.flush()

    def may_run_inline(self) -> bool:
        """Whether the thread that read a request may serve it."""
        return False

    def about_to_block(self) -> None:
        """Called by a serving thread before it waits for another peer, so that
        another thread takes over reading."""

    def read_for(self, future: ResponseFuture) -> None:
        """Reads until the response is there, if the streams are read by threads that wait."""

    def read_in_background(self, future: ResponseFuture) -> None:
        """Has another thread read until the response is there, if the streams
        are read by threads that wait."""

    def close(self, *, discard: bool = False) -> None:
        self.control.close(discard=discard)
        self.bulk.close(discard=discard)
        self.reassembler.close()
        if discard and self.parent is not None:
            self.parent.close(discard=True)


class StreamPair(Streams):
    """A stream for small messages and one for bulk data, each with its own outbox."""

    control: Outbox
    bulk: Outbox

    def __init__(self, settings: LinkSettings, quota: Quota) -> None:
        super().__init__(settings, quota, Outbox(), Outbox(), orphan_timeout=settings.hello_timeout)
