"""Bytes in flight: large requests wait while too many bytes of earlier ones are without a response."""

from __future__ import annotations

import threading
from collections import OrderedDict

from gradwire.errors import GradwireError
from gradwire.transport.calls import OutboundCall

__all__ = ["Window"]


class Window:
    """Admits large requests while the bytes in flight stay within a limit.

    A request that is larger than the limit is sent when nothing else is in flight. Small requests are always
    sent, and so are nested ones, which another request waits for.
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._in_flight: dict[OutboundCall, int] = {}
        self._used = 0
        self._kept_back: OrderedDict[OutboundCall, None] = OrderedDict()

    def admits(self, call: OutboundCall) -> bool:
        """Whether a request may be sent now; if not, a later `leave` returns it when it may."""
        if not call.is_large or call.future.is_nested:
            return True
        with self._lock:
            if call in self._in_flight:
                return True
            size = call.size
            if self._kept_back or (self._in_flight and self._used + size > self.max_bytes):
                self._kept_back[call] = None
                return False
            self._enter(call, size)
            return True

    def leave(self, call: OutboundCall) -> list[OutboundCall]:
        """Removes a request that has a response or was withdrawn. Returns the
        requests that may be sent now."""
        if not call.is_large:
            return []
        with self._lock:
            self._kept_back.pop(call, None)
            self._used -= self._in_flight.pop(call, 0)
            ready = []
            while self._kept_back:
                following = next(iter(self._kept_back))
                size = following.size
                if self._in_flight and self._used + size > self.max_bytes:
                    break
                del self._kept_back[following]
                self._enter(following, size)
                ready.append(following)
            return ready

    def end(self, error: GradwireError) -> None:
        """Fails all requests that wait."""
        with self._lock:
            kept_back, self._kept_back = self._kept_back, OrderedDict()
            self._in_flight.clear()
        for call in kept_back:
            call.stop_timer()
            call.future.settle(error.again())

    def _enter(self, call: OutboundCall, size: int) -> None:
        self._in_flight[call] = size
        self._used += size
