"""A link between two nodes of one process: the same conversation, without sockets."""

from __future__ import annotations

import threading

from gradwire.errors import WorkerLost
from gradwire.transport.base import Handler, Identity, LinkSettings
from gradwire.transport.conversation import Conversation, Streams

__all__ = ["InProcessLink"]


class InProcessLink(Conversation):
    """One end; `pair` makes both. The frames are those of the wire, handed over by a thread each way."""

    @classmethod
    def pair(
        cls,
        left: tuple[Identity, Handler],
        right: tuple[Identity, Handler],
        settings: LinkSettings | None = None,
    ) -> tuple[InProcessLink, InProcessLink]:
        settings = settings or LinkSettings()
        ends = (
            cls(left[0], right[0], left[1], settings),
            cls(right[0], left[0], right[1], settings),
        )
        streams = (Streams(settings, separate_bulk=False), Streams(settings, separate_bulk=False))
        for here, there, sent, received in (
            (ends[0], ends[1], streams[0], streams[1]),
            (ends[1], ends[0], streams[1], streams[0]),
        ):
            here.attach(sent)
            thread = threading.Thread(
                target=_carry,
                args=(there, sent, received),
                name=f"gradwire-link-{here.local.name}-{there.local.name}",
                daemon=True,
            )
            thread.start()
        return ends


def _carry(there: InProcessLink, sent: Streams, received: Streams) -> None:
    # Ends when the sending end closes its outbox, which both close() and abort() do.
    for data in sent.control:
        there.receive_or_refuse(data, received)
    there.abort(WorkerLost(f"{there.peer} has gone without a word", worker=str(there.peer)))
