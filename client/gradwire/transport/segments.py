"""Shared memory segments for tensors between two processes of one host.

The sender copies an attachment into a segment of its own pool, and the receiver maps the segment and uses the
attachment there, without copying, until the last tensor over it is gone. Then the sender reuses the segment.
Reuse makes this fast: most of the cost of large fresh memory is mapping its pages.

Segments have no names. The kernel passes their descriptors over the socket, so no other process can open
them, and nothing is left behind however either process ends.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from gradwire.errors import MalformedMessage
from gradwire.transport.base import Buffer
from gradwire.transport.buffers import view

__all__ = ["MappedSegments", "Segment", "SegmentPool", "are_supported"]

_SMALLEST_BYTES = 64 * 1024
_IDLE_SECONDS = 30.0
"""A segment that was not used for this long is freed."""

if sys.platform == "linux":
    # Without these seals the other peer could shrink a segment, and reading beyond its end is fatal.
    _SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def are_supported() -> bool:
    """Whether this system supports memory segments."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


class Segment:
    """A shared memory segment that this peer fills."""

    __slots__ = ("descriptor", "free_since", "id", "memory", "size")

    def __init__(self, id: int, size: int) -> None:
        self.id = id
        self.size = size
        self.free_since = 0.0
        self.descriptor: int | None = os.memfd_create("gradwire", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        """The memory's file descriptor; None once the other peer has it."""
        try:
            os.ftruncate(self.descriptor, size)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _SEALS)
            self.memory: Buffer = np.frombuffer(mmap.mmap(self.descriptor, size), dtype=np.uint8)
        except BaseException:
            os.close(self.descriptor)
            raise

    def write(self, offset: int, piece: memoryview) -> int:
        self.memory[offset : offset + len(piece)] = np.frombuffer(piece, dtype=np.uint8)
        return len(piece)

    def close_descriptor(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


class _Total:
    """The total size of the segments that this process has allocated, over all links."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bytes = 0

    def grow(self, more: int, max_bytes: int) -> bool:
        with self._lock:
            if self._bytes + more > max_bytes:
                return False
            self._bytes += more
            return True

    def shrink(self, less: int) -> None:
        with self._lock:
            self._bytes -= less


_total = _Total()


class SegmentPool:
    """The segments that this peer fills for the other peer."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._free: list[Segment] = []
        self._out: dict[int, Segment] = {}
        self._last_id = 0
        self._closed = False

    def take(self, size: int) -> Segment | None:
        """A segment of at least `size` bytes; None if the limit is reached or
        the system has no memory left."""
        # Rounded up to a power of two, so that tensors of about the same size can reuse the same segments.
        # Pages that were never written to take no memory.
        capacity = max(1 << (size - 1).bit_length(), _SMALLEST_BYTES)
        with self._lock:
            fitting = [segment for segment in self._free if capacity <= segment.size <= 4 * capacity]
            if fitting:
                # The most recently used segment is the likeliest to be in a cache.
                segment = min(fitting, key=lambda segment: (segment.size, -segment.free_since))
                self._free.remove(segment)
            else:
                if self._closed or not _total.grow(capacity, self._max_bytes):
                    return None
                self._last_id += 1
                try:
                    segment = Segment(self._last_id, capacity)
                except (OSError, ValueError, OverflowError):
                    _total.shrink(capacity)
                    return None
                except BaseException:  # an interrupt
                    _total.shrink(capacity)
                    raise
            self._out[segment.id] = segment
            return segment

    def give_back(self, ids: Sequence[int]) -> None:
        """Takes back segments that the other peer no longer uses, or never received."""
        now = time.monotonic()
        with self._lock:
            for id in ids:
                segment = self._out.pop(id, None)
                if segment is None:
                    if self._closed:
                        return
                    raise MalformedMessage(f"segment {id} was returned, but is not in use")
                segment.free_since = now
                self._free.append(segment)

    def trim(self) -> list[int]:
        """Frees segments that were idle for long. Returns the ids of those that the other peer has mapped."""
        long_ago = time.monotonic() - _IDLE_SECONDS
        with self._lock:
            idle = [segment for segment in self._free if segment.free_since < long_ago]
            self._free = [segment for segment in self._free if segment.free_since >= long_ago]
            _total.shrink(sum(segment.size for segment in idle))
        known = [segment.id for segment in idle if segment.descriptor is None]
        for segment in idle:
            segment.close_descriptor()
        return known

    def close(self) -> None:
        with self._lock:
            segments = (*self._free, *self._out.values())
            for segment in segments:
                segment.close_descriptor()
            _total.shrink(sum(segment.size for segment in segments))
            self._free.clear()
            self._out.clear()
            self._closed = True


class MappedSegments:
    """The segments of the other peer that this peer has mapped."""

    def __init__(self, max_bytes: int, on_unused: Callable[[int, int], object]) -> None:
        self._max_bytes = max_bytes
        self._on_unused = on_unused
        """Called with the id and the size of a segment that this peer no longer uses, on
        any thread and at any moment."""
        self._mapped: dict[int, mmap.mmap] = {}
        self._in_use: dict[int, weakref.ref[object]] = {}

    def map(self, id: int, size: int, descriptor: int) -> None:
        """Maps a new segment, and closes its descriptor."""
        try:
            if id in self._mapped or not 0 < size <= self._max_bytes:
                raise MalformedMessage(f"segment {id} of {size} bytes is already mapped or exceeds the limit")
            try:
                sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _SEALS == _SEALS
            except OSError:
                sealed = False
            if not sealed or os.fstat(descriptor).st_size != size:
                raise MalformedMessage(f"segment {id} is not {size} bytes of sealed memory")
            self._mapped[id] = mmap.mmap(descriptor, size)
        finally:
            os.close(descriptor)

    def use(self, id: int, total: int) -> Buffer:
        """The attachment that lies in a segment. The segment is returned when the last view of it is gone."""
        memory = self._mapped.get(id)
        if memory is None or total > len(memory):
            raise MalformedMessage(f"an attachment of {total} bytes does not fit in segment {id}")
        used = self._in_use.get(id)
        if used is not None and used() is not None:
            raise MalformedMessage(f"segment {id} was filled while it was in use")
        hold, buffer = view(memory, total)
        self._in_use[id] = weakref.ref(hold, partial(_tell, self._on_unused, id, len(memory)))
        return buffer

    def drop(self, ids: Sequence[int]) -> None:
        """Unmaps segments that the other peer has freed. Existing views of them stay valid."""
        for id in ids:
            self._mapped.pop(id, None)
            self._in_use.pop(id, None)

    def drop_all(self) -> None:
        """Unmaps all segments. Existing views of them stay valid."""
        self._mapped.clear()
        self._in_use.clear()


def _tell(on_unused: Callable[[int, int], object], id: int, size: int, _: object) -> None:
    on_unused(id, size)
