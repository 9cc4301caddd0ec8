"""Memory for attachments is reused, but never while a view of it is left."""

from __future__ import annotations

import gc
import os
import threading
from weakref import finalize

import numpy as np
import pytest
import torch
from tests.unit.transport.support import eventually

from gradwire.transport.buffers import SMALLEST_BYTES, Buffers

MIB = 1 << 20


def address(buffer: np.ndarray[tuple[int], np.dtype[np.uint8]]) -> int:
    return int(buffer.ctypes.data)


def test_memory_is_reused() -> None:
    buffers = Buffers()
    first = buffers.new(3 * MIB)
    assert len(first) == 3 * MIB
    where = address(first)
    del first
    assert buffers.idle_bytes == 4 * MIB
    for size in (3 * MIB, 4 * MIB, 2 * MIB + 1):
        assert address(buffers.new(size)) == where


def test_memory_in_use_is_not_reused() -> None:
    buffers = Buffers()
    buffer = buffers.new(2 * MIB)
    buffer[:] = 7
    tensor = torch.from_numpy(buffer)
    part = tensor[MIB : MIB + 10]
    del buffer, tensor
    other = buffers.new(2 * MIB)
    other[:] = 1
    assert buffers.idle_bytes == 0
    assert part.tolist() == [7] * 10
    del part
    assert buffers.idle_bytes == 2 * MIB


def test_small_buffers_are_left_to_malloc() -> None:
    buffers = Buffers()
    buffers.new(SMALLEST_BYTES - 1)
    assert len(buffers.new(0)) == 0
    assert buffers.idle_bytes == 0


def test_large_memory_is_not_reused_for_a_small_buffer() -> None:
    buffers = Buffers()
    buffers.new(64 * MIB)
    small = buffers.new(2 * MIB)
    assert buffers.idle_bytes == 64 * MIB
    del small


def test_the_pool_keeps_no_more_than_its_limit() -> None:
    buffers = Buffers(kept_bytes=4 * MIB)
    several = [buffers.new(2 * MIB) for _ in range(4)]
    last = address(several[-1])
    while several:
        del several[0]
    assert buffers.idle_bytes == 4 * MIB
    assert address(buffers.new(2 * MIB)) == last


def test_a_buffer_over_the_limit_displaces_no_other() -> None:
    buffers = Buffers(kept_bytes=4 * MIB)
    buffers.new(2 * MIB)
    assert len(buffers.new(5 * MIB)) == 5 * MIB
    assert buffers.idle_bytes == 2 * MIB


def test_idle_memory_is_freed() -> None:
    buffers = Buffers(idle_seconds=0.02)
    buffers.new(2 * MIB)
    eventually(lambda: buffers.idle_bytes == 0)
    buffers.new(2 * MIB)
    eventually(lambda: buffers.idle_bytes == 0)


def test_too_large_a_buffer_raises_an_error() -> None:
    with pytest.raises((MemoryError, ValueError)):
        Buffers().new(1 << 62)


def test_a_destructor_may_return_memory_while_the_lock_is_held() -> None:
    """Garbage collection may run in any line, even while the lock is held."""
    buffers = Buffers()

    class Cycle:
        def __init__(self) -> None:
            self.me = self
            self.buffer = buffers.new(MIB)

    cycle = Cycle()
    collected = threading.Event()
    finalize(cycle, collected.set)
    del cycle
    with buffers._lock:
        gc.collect()
    assert collected.is_set()
    assert buffers.idle_bytes == MIB


@pytest.mark.parametrize("total", [MIB // 2, 2 * MIB, 3 * MIB, 3 << 30])
def test_memory_is_taken_as_the_bytes_arrive(total: int) -> None:
    """The announced size does not matter. The first byte of a huge page would take 2 MiB."""
    buffers = Buffers()
    before = resident_bytes()
    arriving = [buffers.arriving(total) for _ in range(200)]
    for one in arriving:
        one.write(0, b"x")
    assert resident_bytes() - before < 200 * 2 * MIB / 10


@pytest.mark.parametrize(
    "pieces", [[1, 2, 3], [5000, 1, 90_000], [MIB] * 7, [1, 3 * MIB, 5 * MIB], [1000] * 900]
)
def test_a_buffer_that_arrives_in_pieces_is_complete(pieces: list[int]) -> None:
    buffers = Buffers()
    for _ in range(2):  # in fresh memory, and in reused memory
        arriving = buffers.arriving(sum(pieces))
        offset, expected = 0, b""
        for index, size in enumerate(pieces):
            piece = bytes([index % 251]) * size
            arriving.write(offset, piece)
            offset += size
            expected += piece
        assert arriving.finish().tobytes() == expected


def test_an_abandoned_buffer_is_not_kept() -> None:
    buffers = Buffers()
    arriving = buffers.arriving(4 * MIB)
    arriving.write(0, bytes(3 * MIB))
    del arriving
    assert buffers.idle_bytes == 0


def resident_bytes() -> int:
    gc.collect()
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
