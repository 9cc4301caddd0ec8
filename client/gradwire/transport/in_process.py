"""A link between two peers of one process: the same session, without sockets."""

from __future__ import annotations

import threading

from gradwire.errors import WorkerLost
from gradwire.transport.base import Handler, LinkSettings, PeerIdentity
from gradwire.transport.outbox import Outbox
from gradwire.transport.session import Session
from gradwire.transport.streams import Streams

__all__ = ["InProcessLink"]


class InProcessLink(Session):
    """One peer's end of the link; `pair` makes both. It uses the frames of the wire, delivered
    by one thread per direction."""

    @classmethod
    def pair(
        cls,
        left: tuple[PeerIdentity, Handler],
        right: tuple[PeerIdentity, Handler],
        settings: LinkSettings | None = None,
    ) -> tuple[InProcessLink, InProcessLink]:
        settings = settings or LinkSettings()
        ends = (
            cls(left[0], right[0], left[1], settings),
            cls(right[0], left[0], right[1], settings),
        )
        outboxes = (Outbox(), Outbox())
        streams = [
            Streams(settings, end.quota, outbox, outbox) for end, outbox in zip(ends, outboxes, strict=True)
        ]
        for here, there in ((0, 1), (1, 0)):
            ends[here].peer_codecs = frozenset(settings.codecs)
            ends[here].attach(streams[here])
            thread = threading.Thread(
                target=_deliver,
                args=(ends[there], outboxes[here], streams[there]),
                name=f"gradwire-link-{ends[here].local.name}-{ends[there].local.name}",
                daemon=True,
            )
            thread.start()
        return ends


def _deliver(there: InProcessLink, outbox: Outbox, streams: Streams) -> None:
    # Ends when the sending peer closes its outbox, which both close() and abort() do.
    for data in outbox:
        there.receive_or_refuse(data, streams)
    there.abort(WorkerLost(f"{there.peer} ended the link without a goodbye", worker=str(there.peer)))
