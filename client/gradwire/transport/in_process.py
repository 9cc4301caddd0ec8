"""A link between two peers of one process: two sessions over a pair of sockets."""

from __future__ import annotations

import socket

from gradwire.errors import WorkerLost
from gradwire.transport.base import Handler, LinkSettings
from gradwire.transport.carriers import SocketCarrier
from gradwire.transport.identity import PeerIdentity
from gradwire.transport.session import Session

__all__ = ["InProcessLink"]


class InProcessLink(Session):
    """One peer's end of the link; `pair` makes both."""

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
        for end, connection in zip(ends, socket.socketpair(), strict=True):
            end.peer_codecs = frozenset(settings.codecs)
            end.attach(SocketCarrier(connection, end._on_cut, is_accepted=end is ends[1]))
            end.handle_events(most_requests=0)
        return ends

    def _on_cut(self, carrier: SocketCarrier, reason: str) -> None:
        self.abort(WorkerLost(f"{self.peer} ended the link without a goodbye", worker=str(self.peer)))
        self.detach(carrier)
