"""Memory for large attachments that come over a socket, used again and again.

Most of the cost of large fresh memory is having its pages mapped in. So the memory of a tensor that came is
kept for a while when the tensor is gone.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
import weakref
from collections import deque

import numpy as np

from gradwire.transport.base import Buffer
from gradwire.transport.timers import call_later

__all__ = ["Buffers", "new_buffer", "view"]

SMALLEST_BYTES = 1 << 20
"""What is smaller the C library keeps by itself."""
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
            self._take_in()
            return sum(len(memory) for _, memory in self._free)

    def new(self, size: int) -> Buffer:
        """Memory for so many bytes, which may hold anything: all must be written before anybody sees it.

        Raises MemoryError or ValueError if there is none.
        """
        # Powers of two, so that tensors of about the same size can use the same memory. What was never
        # written to takes none.
        room = 1 << (size - 1).bit_length()
        if size < SMALLEST_BYTES or room > self._kept_bytes:
            return np.empty(size, dtype=np.uint8)
        memory = self._take(room)
        hold, buffer = view(memory, size)
        weakref.finalize(hold, self._give_back, memory).atexit = False
        return buffer

    def _take(self, room: int) -> mmap.mmap:
        with self._lock:
            self._take_in()
            for index in reversed(range(len(self._free))):
                if len(self._free[index][1]) == room:
                    return self._free.pop(index)[1]
        try:
            memory = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError) as error:
            raise MemoryError(f"{room} bytes") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            try:
                memory.madvise(mmap.MADV_HUGEPAGE)
            except OSError:
                pass  # this system has none
        return memory

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

    def _take_in(self) -> None:
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
            self._take_in()
            self._free = [entry for entry in self._free if entry[0] > now - self._idle_seconds]
            is_left = bool(self._free)
        if is_left:
            self._watch(now)


_buffers = Buffers()


def new_buffer(size: int) -> Buffer:
    """Memory for so many bytes, of those that this process keeps for all links together."""
    return _buffers.new(size)


def _after_fork() -> None:
    global _buffers
    _buffers = Buffers()


os.register_at_fork(after_in_child=_after_fork)
