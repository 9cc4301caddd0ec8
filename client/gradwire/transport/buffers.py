"""Memory for attachments that come over a socket; that of large ones is used again and again.

Most of the cost of large fresh memory is having its pages mapped in. So the memory of a tensor that came is
kept for a while when the tensor is gone.

Who sends says how much will come. That alone sets nothing aside: memory is taken as the bytes come.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable

import numpy as np

from gradwire.system.timers import call_later
from gradwire.transport.base import Buffer

__all__ = ["Arriving", "Buffers", "new_arriving", "view"]

SMALLEST_BYTES = 1 << 20
"""What is smaller the C library keeps by itself."""
_HUGE_BYTES = 2 << 20
"""A huge page, of which the first byte that is written takes all."""
_FIRST_BYTES = 4096
"""What is taken of the C library at least."""
_TRIM_SECONDS = 1.0
"""How often it is looked whether too much is kept, or for too long."""


def view(memory: mmap.mmap, size: int) -> tuple[object, Buffer]:
    """The first bytes of some memory, and what everything refers to that looks at them.

    An object of its own for each use: numpy lets views refer to it, past the array itself. So when it is
    gone, nobody looks any more.
    """
    hold = (ctypes.c_char * len(memory)).from_buffer(memory)
    return hold, np.frombuffer(memoryview(hold), dtype=np.uint8, count=size)


class Buffers:
    """Gives out memory, and takes it back when the last view of it is gone."""

    def __init__(self, kept_bytes: int = 1 << 30, idle_seconds: float = 30.0) -> None:
        self._kept_bytes = kept_bytes
        """How much may lie idle ..."""
        self._idle_seconds = idle_seconds
        """... for how long."""
        self._lock = threading.Lock()
        self._free: list[tuple[float, mmap.mmap]] = []
        """Since when, the latest last."""
        self._returned: deque[tuple[float, mmap.mmap]] = deque()
        """Destructors leave it here: they run at any moment, also while this thread has the lock."""
        self._trimmed_at = 0.0
        """When it is, or was, trimmed next."""

    @property
    def idle_bytes(self) -> int:
        """How much is kept for later."""
        with self._lock:
            self._collect_returned()
            return sum(len(memory) for _, memory in self._free)

    def new(self, size: int) -> Buffer:
        """Memory for so many bytes, which may hold anything: all must be written before anybody sees it.

        Raises MemoryError or ValueError if there is none.
        """
        arriving = self.arriving(size)
        arriving.reserve(size)
        return arriving.finish()

    def arriving(self, total: int) -> Arriving:
        """Memory for so many bytes that are still to come. Raises as `new` does."""
        if total < SMALLEST_BYTES:
            return Arriving(total)
        # Powers of two, so that tensors of about the same size can use the same memory. What was never
        # written to takes none.
        capacity = 1 << (total - 1).bit_length()
        memory = self._take_free(capacity)
        if memory is not None:
            return Arriving(total, memory, self._give_back, advised=capacity)
        try:
            memory = mmap.mmap(-1, capacity, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise MemoryError(f"{capacity} bytes") from error
        _advise(memory, "MADV_NOHUGEPAGE", 0, capacity)
        return Arriving(total, memory, self._give_back if capacity <= self._kept_bytes else None)

    def _take_free(self, capacity: int) -> mmap.mmap | None:
        with self._lock:
            self._collect_returned()
            for index in reversed(range(len(self._free))):
                if len(self._free[index][1]) == capacity:
                    return self._free.pop(index)[1]
        return None

    def _give_back(self, memory: mmap.mmap) -> None:
        now = time.monotonic()
        self._returned.append((now, memory))
        self._watch(now)

    def _watch(self, now: float) -> None:
        """Has it trimmed, if that is not about to be. Told by the time: a flag that an interrupt leaves
        behind would end it for good."""
        if now >= self._trimmed_at:
            pause = min(_TRIM_SECONDS, self._idle_seconds)
            self._trimmed_at = now + pause
            call_later(pause, self._trim)

    def _collect_returned(self) -> None:
        """With the lock held."""
        while self._returned:
            self._free.append(self._returned.popleft())
        kept = sum(len(memory) for _, memory in self._free)
        while kept > self._kept_bytes:
            kept -= len(self._free.pop(0)[1])

    def _trim(self) -> None:
        """Lets go of what is too much, and of what was idle for long."""
        now = time.monotonic()
        with self._lock:
            self._collect_returned()
            self._free = [entry for entry in self._free if entry[0] > now - self._idle_seconds]
            is_left = bool(self._free)
        if is_left:
            self._watch(now)


class Arriving:
    """Memory for bytes that come one after another. It grows with what has come, not with what was said."""

    __slots__ = ("_advised", "_buffer", "_give_back", "_hold", "_memory", "total")

    def __init__(
        self,
        total: int,
        memory: mmap.mmap | None = None,
        give_back: Callable[[mmap.mmap], None] | None = None,
        *,
        advised: int = 0,
    ) -> None:
        self.total = total
        self._memory = memory
        """Where it will all lie. None: it is small, and moves when it grows."""
        self._give_back = give_back
        self._advised = advised
        """How much of it may lie in huge pages."""
        self._hold: object = None
        self._buffer: Buffer = np.empty(0, dtype=np.uint8)
        if memory is not None:
            self._hold, self._buffer = view(memory, total)

    def reserve(self, end: int) -> None:
        """The bytes up to there are about to be written."""
        if self._memory is None:
            if end > len(self._buffer):
                size = min(self.total, max(end, 2 * len(self._buffer), _FIRST_BYTES))
                grown = np.empty(size, dtype=np.uint8)
                grown[: len(self._buffer)] = self._buffer
                self._buffer = grown
        elif 2 * end > self._advised and 2 * end >= _HUGE_BYTES:
            # Twice of what has come, so that it is seldom that the system is asked.
            capacity = min(-(-2 * end // _HUGE_BYTES) * _HUGE_BYTES, len(self._memory))
            if capacity > self._advised:
                _advise(self._memory, "MADV_HUGEPAGE", self._advised, capacity - self._advised)
                self._advised = capacity

    def write(self, offset: int, data: memoryview | bytes) -> None:
        end = offset + len(data)
        self.reserve(end)
        self._buffer[offset:end] = np.frombuffer(data, dtype=np.uint8)

    def finish(self) -> Buffer:
        """The memory, when all of it has come. Once: from now on it is kept for later when it is unused. What
        was given up before goes back to the system."""
        if self._memory is not None and self._give_back is not None:
            weakref.finalize(self._hold, self._give_back, self._memory).atexit = False
        buffer, self._buffer, self._hold = self._buffer, np.empty(0, dtype=np.uint8), None
        return buffer


def _advise(memory: mmap.mmap, advice: str, start: int, length: int) -> None:
    option = getattr(mmap, advice, None)
    if option is not None:
        try:
            memory.madvise(option, start, length)
        except OSError:
            pass  # this system has no huge pages


_buffers = Buffers()


def new_arriving(total: int) -> Arriving:
    """Memory for so many bytes, of those that this process keeps for all links together."""
    return _buffers.arriving(total)


def _after_fork() -> None:
    global _buffers
    _buffers = Buffers()


os.register_at_fork(after_in_child=_after_fork)
