"""Shared memory between two peers: reused only when no view of it is left, and
checked before it is trusted."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest
import torch

from gradwire.errors import MalformedMessage
from gradwire.transport import segments
from gradwire.transport.segments import MappedSegments, SegmentPool

MIB = 1 << 20


class Pair:
    """The pool of a sender and the mapped segments of its receiver, without a socket between."""

    def __init__(self, max_bytes: int = 1 << 30) -> None:
        self.segment_pool = SegmentPool(max_bytes)
        unused = self.unused = list[int]()
        # Without a reference cycle, which would keep the mappings until the garbage collector runs.
        self.mapped = MappedSegments(max_bytes, lambda id, _: unused.append(id))

    def pass_on(self, content: bytes) -> tuple[int, segments.Buffer]:
        """The segment's id, and the memory that the receiver sees."""
        segment = self.segment_pool.take(len(content))
        assert segment is not None
        if segment.descriptor is not None:
            self.mapped.map(segment.id, segment.size, os.dup(segment.descriptor))
            segment.close_descriptor()
        segment.write(0, memoryview(content))
        return segment.id, self.mapped.use(segment.id, len(content))

    def settle(self) -> None:
        gc.collect()
        self.segment_pool.give_back(self.unused)
        self.unused.clear()


def test_the_receiver_sees_the_content_and_the_segment_is_reused() -> None:
    pair = Pair()
    first, seen = pair.pass_on(b"a" * MIB)
    assert seen.tobytes() == b"a" * MIB
    del seen
    pair.settle()
    second, seen = pair.pass_on(b"b" * (MIB - 5))
    assert second == first
    assert seen.tobytes() == b"b" * (MIB - 5)


@pytest.mark.parametrize(
    "view_of",
    [
        lambda seen: seen,
        lambda seen: seen[5:10],
        lambda seen: seen.view(np.float32)[1:],
        lambda seen: torch.from_numpy(seen),
        lambda seen: torch.from_numpy(seen).view(torch.float32)[3:7],
        lambda seen: torch.from_numpy(seen[:64]).untyped_storage(),
        lambda seen: memoryview(seen)[3:],
    ],
)
def test_any_view_keeps_the_segment(view_of: object) -> None:
    pair = Pair()
    id, seen = pair.pass_on(b"a" * MIB)
    view = view_of(seen)  # type: ignore[operator]
    del seen
    gc.collect()
    assert pair.unused == []
    other, _ = pair.pass_on(b"b" * MIB)
    assert other != id
    del view
    gc.collect()
    assert id in pair.unused


def test_the_limit_holds_over_all_links_and_closing_frees_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "_total", segments._Total())
    one, other = Pair(8 * MIB), Pair(8 * MIB)
    taken = [one.segment_pool.take(2 * MIB) for _ in range(3)]
    assert all(taken)
    assert other.segment_pool.take(2 * MIB) is not None
    assert other.segment_pool.take(1) is None
    one.segment_pool.close()
    assert other.segment_pool.take(1) is not None
    other.segment_pool.close()


def test_idle_segments_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair()
    id, seen = pair.pass_on(b"a" * MIB)
    monkeypatch.setattr(segments, "_IDLE_SECONDS", 0.0)
    assert pair.segment_pool.trim() == []  # the segment is in use
    del seen
    pair.settle()
    assert pair.segment_pool.trim() == [id]
    pair.mapped.drop([id])
    with pytest.raises(MalformedMessage):
        pair.mapped.use(id, 1)


def test_received_memory_outlives_the_link() -> None:
    pair = Pair()
    id, seen = pair.pass_on(b"a" * MIB)
    pair.mapped.drop([id])
    pair.segment_pool.close()
    del pair
    gc.collect()
    assert seen.tobytes() == b"a" * MIB


def test_a_segment_is_not_filled_while_it_is_in_use() -> None:
    pair = Pair()
    id, seen = pair.pass_on(b"a" * MIB)
    with pytest.raises(MalformedMessage, match="in use"):
        pair.mapped.use(id, MIB)
    with pytest.raises(MalformedMessage, match="does not fit"):
        pair.mapped.use(id + 1, 1)
    del seen
    gc.collect()
    with pytest.raises(MalformedMessage, match="does not fit"):
        pair.mapped.use(id, 2 * MIB)
    with pytest.raises(MalformedMessage, match="not in use"):
        pair.segment_pool.give_back([99])


def test_memory_that_could_be_shrunk_is_refused() -> None:
    mapped = MappedSegments(1 << 30, lambda *_: None)
    unsealed = os.memfd_create("unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(unsealed, MIB)
    with pytest.raises(MalformedMessage, match="sealed"):
        mapped.map(1, MIB, unsealed)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(unsealed)  # the descriptor was closed
    with pytest.raises(MalformedMessage, match="sealed"):
        mapped.map(1, MIB, os.open("/dev/zero", os.O_RDWR))
    segment = SegmentPool(1 << 30).take(MIB)
    assert segment is not None
    assert segment.descriptor is not None
    with pytest.raises(MalformedMessage, match="sealed"):
        mapped.map(1, 2 * MIB, os.dup(segment.descriptor))
    with pytest.raises(MalformedMessage, match="already mapped or exceeds"):
        mapped.map(1, 1 << 31, os.dup(segment.descriptor))
    segment.close_descriptor()
