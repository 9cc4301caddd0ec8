"""A link that changes between a socket and gRPC while it is used."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

from tests.faults import carriers

from gradwire.transport import GrpcLink, Session, frames

__all__ = ["Switch"]

_NOWHERE = "gradwire-test-where-nobody-listens"
_CLOSED_PORT = 1
_SECONDS = 20.0


class Switch:
    """Cuts what carries a link, by turns the socket and gRPC, right after a request was sent or has arrived.

    After the cut the other one carries it: every second offer of a socket leads nowhere. It cuts after the
    1st, 2nd, 4th, 8th such moment and so on, of both ends together: early in tests that send little, and not
    so often in others that nothing arrives.
    """

    def __init__(self) -> None:
        self.cuts = Counter[str]()
        """How often the link was cut while which carrier was in use."""
        self.moments = 0
        self._lock = threading.Lock()
        self._offers = 0
        self._ends: tuple[GrpcLink, Session] | None = None
        self._dead: list[object] = []
        """What carried both ends before the latest cut."""
        self._is_over = False

    def between(self, written: Iterator[bytes]) -> Iterator[bytes]:
        """For `serving`: changes every second Welcome."""
        (frame,) = frames.parse(next(written))
        self._offers += 1
        if self._offers % 2 == 0:
            if frame.welcome.HasField("same_host"):
                frame.welcome.same_host.socket = _NOWHERE
            if frame.welcome.HasField("direct"):
                frame.welcome.direct.port = _CLOSED_PORT
        yield frames.envelope(frame)
        yield from written

    def watch(self, left: GrpcLink, right: Session) -> None:
        """Begins with this link, that is connected."""
        self._ends = left, right
        left._avoid_direct = lambda: None  # type: ignore[method-assign] # it goes back to the direct socket
        for end in (left, right):
            self._watch_sending(end)

    def _watch_sending(self, end: Any) -> None:
        send_request = end.send_request

        def sending(*args: Any, **options: Any) -> Any:
            future = send_request(*args, **options)
            self.moment()
            return future

        end.send_request = sending

    def moment(self) -> None:
        """Something is under way."""
        with self._lock:
            if self._ends is None or self._is_over:
                return
            self.moments += 1
            if self.moments & (self.moments - 1):
                return
            carrier = carriers.carrier_of(self._ends[0])
            dying = [end._carrier for end in self._ends]
            if carrier is not None and carriers.cut([carrier]):
                self.cuts[carrier] += 1
                self._dead = dying

    def stop(self) -> None:
        """Cuts no more. Returns when what was cut last has been mended."""
        with self._lock:
            self._is_over = True
        assert self._ends is not None
        give_up_at = time.monotonic() + _SECONDS
        while any(end._carrier is None or end._carrier in self._dead for end in self._ends):
            assert time.monotonic() < give_up_at
            time.sleep(0.001)
