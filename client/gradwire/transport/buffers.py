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

__all__ = ["Buffers", "new_buffer"]

SMALLEST_BYTES = 1 << 20
"""What is smaller the C library keeps by itself."""


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
        self._is_watched = False

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
        if size < SMALLEST_BYTES:
            return np.empty(size, dtype=np.uint8)
        # An object of its own for each use: numpy lets views refer to it, past the array itself.
        memory = self._take(size)
        hold = (ctypes.c_char * len(memory)).from_buffer(memory)
        weakref.finalize(hold, self._give_back, memory).atexit = False
        return np.frombuffer(memoryview(hold), dtype=np.uint8, count=size)

    def _take(self, size: int) -> mmap.mmap:
        # Powers of two, so that tensors of about the same size can use the same memory. What is not written
        # to takes none.
        room = 1 << (size - 1).bit_length()
        with self._lock:
            self._take_in()
            for index in reversed(range(len(self._free))):
                if room <= len(self._free[index][1]) <= 4 * room:
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
        self._returned.append((time.monotonic(), memory))
        if self._lock.acquire(blocking=False):  # else whoever has it, or comes next, takes it in
            try:
                self._take_in()
            finally:
                self._lock.release()
        if not self._is_watched:
            self._is_watched = True
            call_later(self._idle_seconds, self._trim)

    def _take_in(self) -> None:
        """With the lock held."""
        while self._returned:
            self._free.append(self._returned.popleft())
        kept = sum(len(memory) for _, memory in self._free)
        while kept > self._kept_bytes:
            kept -= len(self._free.pop(0)[1])

    def _trim(self) -> None:
        """Lets go of what was idle for long."""
        self._is_watched = False
        long_ago = time.monotonic() - self._idle_seconds
        with self._lock:
            self._take_in()
            self._free = [entry for entry in self._free if entry[0] > long_ago]
            is_left = bool(self._free)
        if is_left and not self._is_watched:
            self._is_watched = True
            call_later(self._idle_seconds, self._trim)


_buffers = Buffers()


def new_buffer(size: int) -> Buffer:
    """Memory for so many bytes, of those that this process keeps for all links together."""
    return _buffers.new(size)


def _after_fork() -> None:
    global _buffers
    _buffers = Buffers()


os.register_at_fork(after_in_child=_after_fork)
