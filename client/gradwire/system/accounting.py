"""Accounting for the stores of objects that are held for clients."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager
from typing import Protocol

__all__ = ["InUse", "Tally"]


class Tally:
    """An amount per client, and the total. The owner's lock guards changes; reading needs no lock."""

    __slots__ = ("_of", "total")

    def __init__(self) -> None:
        self._of: dict[int | None, int] = {}
        self.total = 0

    def of(self, client: int | None) -> int:
        return self._of.get(client, 0)

    def add(self, client: int | None, amount: int) -> None:
        """Adds to a client's amount; subtracts if `amount` is negative."""
        has = self._of.get(client, 0) + amount
        if has:
            self._of[client] = has
        else:
            self._of.pop(client, None)
        self.total += amount


class Used(Protocol):
    users: int
    last_used: float


class InUse:
    """A block in which an entry of a store is in use, so that it is not freed for being idle."""

    __slots__ = ("_lock", "_used")

    def __init__(self, lock: AbstractContextManager[object], used: Used) -> None:
        self._lock = lock
        self._used = used

    def __enter__(self) -> None:
        with self._lock:
            self._used.users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._used.users -= 1
            self._used.last_used = time.monotonic()
