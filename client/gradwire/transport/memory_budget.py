"""The memory budget for large questions: how many bytes of attachments may be on their way in, or wait.

The other end of a link keeps to it by itself (`window`). This is for ends that do not, and for many ends at
once: what finds no room is refused before anything of it runs, and is asked again later. What is being worked
on no longer counts, so that questions which that work causes can always be asked.
"""

from __future__ import annotations

import threading

from gradwire.errors import ResourceExhausted

__all__ = ["MemoryBudget", "Quota"]

_RETRY_AFTER_SECONDS = 0.1


class MemoryBudget:
    """What all links of a peer may use together."""

    def __init__(self, max_bytes: int = 1 << 62) -> None:
        self._max_bytes = max_bytes
        self._used = 0
        self._lock = threading.Lock()

    def take(self, size: int, already: int) -> bool:
        """Whether there is room for so much more of a question that has `already` taken some.

        One that is larger than everything finds room when it is alone.
        """
        with self._lock:
            if self._used > already and self._used + size > self._max_bytes:
                return False
            self._used += size
            return True

    def give_back(self, size: int) -> None:
        with self._lock:
            self._used -= size


class Quota:
    """What one link may use of a room."""

    def __init__(self, max_bytes: int, budget: MemoryBudget) -> None:
        self.max_bytes = max_bytes
        self._budget = budget
        self._lock = threading.Lock()
        self._taken: dict[int, int] = {}
        """By the question's id."""

    def take(self, request_id: int, size: int) -> bool:
        """Whether there is room for so much more of a question."""
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
        """It was answered, is being worked on, or will not come."""
        if request_id not in self._taken:
            return  # as is nearly always so, and should cost nothing
        with self._lock:
            self._budget.give_back(self._taken.pop(request_id, 0))

    def give_back_all(self) -> None:
        with self._lock:
            self._budget.give_back(sum(self._taken.values()))
            self._taken.clear()

    def refusal(self) -> ResourceExhausted:
        error = ResourceExhausted("too many bytes of large requests are on their way, or wait here, already")
        error.retry_after = _RETRY_AFTER_SECONDS
        error.not_started = True
        return error
