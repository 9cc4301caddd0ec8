"""The memory budget for large requests: how many bytes of attachments may be
arriving or waiting to be served.

A well-behaved peer limits its requests itself (`window`). The budget protects against peers that do not, and
against many peers at once: a request that exceeds it is refused before anything of it runs, and its requester
sends it again later. A request that is being served no longer counts, so that the nested requests which it
causes are never refused for its sake.
"""

from __future__ import annotations

import threading

from gradwire.errors import ResourceExhausted

__all__ = ["MemoryBudget", "Quota"]

_RETRY_AFTER_SECONDS = 0.1


class MemoryBudget:
    """What all links of a peer may use together."""

    def __init__(self, max_bytes: int = 1 << 62) -> None:
        self.max_bytes = max_bytes
        self._used = 0
        self._lock = threading.Lock()

    def take(self, size: int, already: int) -> bool:
        """Reserves `size` more bytes for a request that has `already` reserved
        some. Returns whether they fit.

        A request that is larger than the whole budget fits if no other request has reserved anything.
        """
        with self._lock:
            if self._used > already and self._used + size > self.max_bytes:
                return False
            self._used += size
            return True

    def give_back(self, size: int) -> None:
        with self._lock:
            self._used -= size


class Quota:
    """What one link may use of the memory budget."""

    def __init__(self, max_bytes: int, budget: MemoryBudget) -> None:
        self.max_bytes = max_bytes
        self._budget = budget
        self._lock = threading.Lock()
        self._taken: dict[int, int] = {}
        """Reserved bytes by request id."""

    def take(self, request_id: int, size: int) -> bool:
        """Reserves `size` more bytes for a request. Returns whether they fit."""
        with self._lock:
            already = self._taken.get(request_id, 0)
            used = sum(self._taken.values())
            if used > already and used + size > self.max_bytes:
                return False
            if not self._budget.take(size, already):
                return False
            self._taken[request_id] = already + size
            return True

    def give_back(self, request_id: int) -> None:
        """Releases the bytes of a request that runs now, has a response, or will not arrive."""
        if request_id not in self._taken:
            return  # the usual case, which should cost nothing
        with self._lock:
            self._budget.give_back(self._taken.pop(request_id, 0))

    def give_back_all(self) -> None:
        with self._lock:
            self._budget.give_back(sum(self._taken.values()))
            self._taken.clear()

    def refusal(self) -> ResourceExhausted:
        error = ResourceExhausted("too many bytes of large requests are arriving, or wait to be served")
        error.retry_after = _RETRY_AFTER_SECONDS
        error.not_started = True
        return error
