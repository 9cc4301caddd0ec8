"""Memory for attachments that arrive over a socket; large buffers are pooled and reused.

Most of the cost of large fresh memory is mapping its pages. So the memory of a received tensor is kept for a
while after the tensor is gone.

The sender announces the size of an attachment. The announcement alone allocates nothing:
memory is taken as the bytes arrive.
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
"""Smaller buffers are left to malloc, which pools them itself."""
_HUGE_BYTES = 2 << 20
"""The size of a huge page. Writing its first byte allocates all of it."""
_FIRST_BYTES = 4096
"""The smallest allocation for a buffer that grows."""
_TRIM_SECONDS = 1.0
"""How often the pool is checked for memory that exceeds its limits."""


def view(memory: mmap.mmap, size: int) -> tuple[object, Buffer]:
    """The first `size` bytes of `memory`, and the object that every view of them refers to.

    Each call creates a new such object. numpy lets views refer to it rather than to the array, so its
    destruction means that no view is left.
    """
    hold = (ctypes.c_char * len(memory)).from_buffer(memory)
    return hold, np.frombuffer(memoryview(hold), dtype=np.uint8, count=size)


class Buffers:
    """A pool of memory: hands out buffers, and takes their memory back when the last view of it is gone."""

    def __init__(self, kept_bytes: int = 1 << 30, idle_seconds: float = 30.0) -> None:
        self._kept_bytes = kept_bytes
        """How many bytes may lie idle in the pool."""
        self._idle_seconds = idle_seconds
        """How long memory may lie idle in the pool."""
        self._lock = threading.Lock()
        self._free: list[tuple[float, mmap.mmap]] = []
        """Idle memory, each with the time since when it is idle; the most recent is last."""
        self._returned: deque[tuple[float, mmap.mmap]] = deque()
        """Memory that destructors returned. They run at any moment, even while this thread holds the
        lock, so they only append here."""
        self._trimmed_at = 0.0
        """When the pool is to be trimmed next, or was trimmed last."""

    @property
    def idle_bytes(self) -> int:
        """How many bytes lie idle in the pool."""
        with self._lock:
            self._collect_returned()
            return sum(len(memory) for _, memory in self._free)

    def new(self, size: int) -> Buffer:
        """A buffer of `size` bytes with arbitrary content: all of it must be written before it is handed on.

        Raises MemoryError or ValueError if there is not enough memory.
        """
        arriving = self.arriving(size)
        arriving.reserve(size)
        return arriving.finish()

    def arriving(self, total: int) -> Arriving:
        """Memory for `total` bytes that have yet to arrive. Raises as `new` does."""
        if total < SMALLEST_BYTES:
            return Arriving(total)
        # Rounded up to a power of two, so that tensors of about the same size can reuse the same memory.
        # Pages that were never written to take no memory.
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
        """Schedules trimming, unless it is already scheduled. Scheduling is recorded as a time, not as a
        flag: a flag that an interrupt left behind would prevent trimming for good."""
        if now >= self._trimmed_at:
            pause = min(_TRIM_SECONDS, self._idle_seconds)
            self._trimmed_at = now + pause
            call_later(pause, self._trim)

    def _collect_returned(self) -> None:
        """Moves returned memory to the idle list, within the pool's limit. The lock is held."""
        while self._returned:
            self._free.append(self._returned.popleft())
        kept = sum(len(memory) for _, memory in self._free)
        while kept > self._kept_bytes:
            kept -= len(self._free.pop(0)[1])

    def _trim(self) -> None:
        """Frees memory that exceeds the pool's size limit, or was idle for too long."""
        now = time.monotonic()
        with self._lock:
            self._collect_returned()
            self._free = [entry for entry in self._free if entry[0] > now - self._idle_seconds]
            is_left = bool(self._free)
        if is_left:
            self._watch(now)


class Arriving:
    """Memory for bytes that arrive one after another. It grows with the bytes that arrived,
    not with the announced size."""

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
        """Memory for the complete attachment. None: the attachment is small, and its buffer
        is reallocated as it grows."""
        self._give_back = give_back
        self._advised = advised
        """How many bytes of the memory may use huge pages."""
        self._hold: object = None
        self._buffer: Buffer = np.empty(0, dtype=np.uint8)
        if memory is not None:
            self._hold, self._buffer = view(memory, total)

    def reserve(self, end: int) -> None:
        """Prepares the memory for bytes up to `end`, which are about to be written."""
        if self._memory is None:
            if end > len(self._buffer):
                size = min(self.total, max(end, 2 * len(self._buffer), _FIRST_BYTES))
                grown = np.empty(size, dtype=np.uint8)
                grown[: len(self._buffer)] = self._buffer
                self._buffer = grown
        elif 2 * end > self._advised and 2 * end >= _HUGE_BYTES:
            # Twice the bytes that have arrived, so that madvise is called rarely.
            capacity = min(-(-2 * end // _HUGE_BYTES) * _HUGE_BYTES, len(self._memory))
            if capacity > self._advised:
                _advise(self._memory, "MADV_HUGEPAGE", self._advised, capacity - self._advised)
                self._advised = capacity

    def write(self, offset: int, data: memoryview | bytes) -> None:
        end = offset + len(data)
        self.reserve(end)
        self._buffer[offset:end] = np.frombuffer(data, dtype=np.uint8)

    def finish(self) -> Buffer:
        """The buffer, when all of its bytes have arrived. Call it once: from now on the memory goes
        back to the pool when its last view is gone. Memory of a transfer that was given up goes
        back to the system instead."""
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
    """Memory for `total` bytes that have yet to arrive, from the pool that all
    links of this process share."""
    return _buffers.arriving(total)


def _after_fork() -> None:
    global _buffers
    _buffers = Buffers()


os.register_at_fork(after_in_child=_after_fork)
