"""Which thread copies which attachment into shared memory; no segment is left behind."""

from __future__ import annotations

import gc
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.unit.transport.support import SECONDS, eventually

from gradwire.errors import GradwireError
from gradwire.proto.v1 import link_pb2
from gradwire.transport import local_outbox
from gradwire.transport.frames import LENGTH, parse
from gradwire.transport.local_outbox import LocalOutbox
from gradwire.transport.outbox import OutgoingTransfer
from gradwire.transport.segments import Segment, SegmentPool

SMALL, LARGE = 1000, local_outbox._COPIED_BYTES + 1000


@dataclass
class Memory:
    """The memory of an attachment, and the threads that read it."""

    size: int
    when_read: Callable[[], None] = lambda: None
    readers: list[str] = field(default_factory=list)

    @property
    def view(self) -> memoryview:
        return memoryview(bytes(self.size))

    def check_unmodified(self) -> None:
        self.readers.append(threading.current_thread().name)
        self.when_read()


class Ends:
    """An outbox, and the socket that its frames arrive at."""

    def __init__(self) -> None:
        self.near, self.far = socket.socketpair()
        self.outbox = LocalOutbox(self.near, SegmentPool(1 << 30))
        self.outbox.start()
        self._received = b""

    def send(self, id: int, memory: Memory) -> None:
        self.outbox.put_transfer(OutgoingTransfer(id, memory, (False, id), 1 << 20, self._failed))

    def _failed(self, transfer: OutgoingTransfer, error: GradwireError) -> None:
        raise AssertionError(error)

    def next_frame(self) -> link_pb2.Frame:
        """The next frame that does not announce a segment."""
        self.far.settimeout(SECONDS)
        while True:
            while len(self._received) < 4 or len(self._received) < 4 + LENGTH.unpack_from(self._received)[0]:
                more = self.far.recv(1 << 20)
                assert more
                self._received += more
            end = 4 + LENGTH.unpack_from(self._received)[0]
            data, self._received = self._received[4:end], self._received[end:]
            (frame,) = parse(data)
            if frame.WhichOneof("kind") != "segment":
                return frame

    def placed(self) -> tuple[int, int]:
        """The next transfer that is placed, and its segment."""
        while True:
            frame = self.next_frame()
            if frame.placed.segment:
                return frame.placed.transfer, frame.placed.segment

    def close(self) -> None:
        self.outbox.finish()
        self.near.close()
        self.far.close()


@pytest.fixture
def ends() -> Iterator[Ends]:
    ends = Ends()
    yield ends
    ends.close()
    gc.collect()  # the traceback of an interrupt keeps the segment that was being filled
    eventually(lambda: "/memfd:gradwire" not in Path("/proc/self/maps").read_text())


def test_small_attachments_are_copied_by_the_sending_thread(ends: Ends) -> None:
    memory = Memory(SMALL)
    for id in (1, 2, 3):
        ends.send(id, memory)
    ends.outbox.flush()
    assert [ends.placed()[0] for _ in range(3)] == [1, 2, 3]
    assert memory.readers == [threading.current_thread().name] * 3


def test_small_attachments_are_written_together_once_their_segments_are_mapped(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    for id in (1, 2, 3):
        ends.send(id, Memory(SMALL))
    ends.outbox.flush()
    ends.outbox.segment_pool.give_back([ends.placed()[1] for _ in range(3)])
    writes: list[int] = []
    send = LocalOutbox._send

    def counted(outbox: LocalOutbox, data: memoryview, announced: Segment | None) -> int:
        writes.append(len(data))
        return send(outbox, data, announced)

    monkeypatch.setattr(LocalOutbox, "_send", counted)
    for id in (4, 5, 6):
        ends.send(id, Memory(SMALL))
    ends.outbox.flush()
    assert [ends.placed()[0] for _ in range(3)] == [4, 5, 6]
    assert len(writes) == 1


def test_large_attachments_are_copied_by_the_background_thread(ends: Ends) -> None:
    memory = Memory(LARGE)
    ends.send(1, memory)
    ends.outbox.flush()
    assert ends.placed()[0] == 1
    assert memory.readers == ["gradwire-copy"]


def test_a_small_attachment_behind_a_large_one_arrives(ends: Ends) -> None:
    for id, size in enumerate((SMALL, LARGE, SMALL, LARGE, SMALL), start=1):
        ends.send(id, Memory(size))
        ends.outbox.flush()
    assert sorted(ends.placed()[0] for _ in range(5)) == [1, 2, 3, 4, 5]


def test_an_attachment_that_is_never_flushed_is_still_copied(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread that was to flush it was interrupted."""
    monkeypatch.setattr(local_outbox, "_CHECK_SECONDS", 0.01)
    ends.send(1, Memory(SMALL))
    assert ends.placed()[0] == 1


def test_an_interrupt_during_a_copy_ends_the_stream(ends: Ends) -> None:
    """It is unknown how much was copied. The session sends what matters again over the next streams."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    ends.send(1, Memory(SMALL, interrupt))
    with pytest.raises(KeyboardInterrupt):
        ends.outbox.flush()
    assert ends.outbox.closed
    ends.far.settimeout(SECONDS)
    assert ends.far.recv(100) == b""


def test_segments_are_returned_with_the_next_write(ends: Ends) -> None:
    ends.outbox.return_segment(7, SMALL)
    ends.outbox.return_segment(8, SMALL)
    ends.send(1, Memory(SMALL))
    ends.outbox.flush()
    assert list(ends.next_frame().returned.segments) == [7, 8]
    assert ends.placed()[0] == 1


def test_segments_are_returned_if_nothing_is_written(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_outbox, "_CHECK_SECONDS", 0.01)
    ends.outbox.return_segment(7, SMALL)
    assert list(ends.next_frame().returned.segments) == [7]


def test_large_segments_are_returned_at_once(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_outbox, "_CHECK_SECONDS", 3600.0)
    ends.send(1, Memory(LARGE))  # so that the background thread waits this long from now on
    assert ends.placed()[0] == 1
    ends.outbox.return_segment(7, LARGE)
    assert list(ends.next_frame().returned.segments) == [7]


def test_segments_are_reused(ends: Ends) -> None:
    used = set()
    for id in range(1, 6):
        ends.send(id, Memory(SMALL))
        ends.outbox.flush()
        segment = ends.placed()[1]
        ends.outbox.segment_pool.give_back([segment])
        used.add(segment)
    assert len(used) == 1


def test_many_threads_send_at_once(ends: Ends) -> None:
    def send(first: int) -> None:
        for id in range(first, first + 20):
            with numbering:
                ends.send(next(ids), Memory(LARGE if id % 7 == 0 else SMALL))
            ends.outbox.flush()

    numbering, ids = threading.Lock(), iter(range(1, 1000))
    threads = [threading.Thread(target=send, args=(20 * number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    placed: list[int] = []
    begun: list[int] = []
    while len(placed) < 80:
        frame = ends.next_frame()
        transfer, segment = frame.placed.transfer, frame.placed.segment
        if transfer not in begun:
            begun.append(transfer)
        if segment:
            placed.append(transfer)
    assert begun == sorted(begun)  # the receiver relies on it
    assert sorted(placed) == list(range(1, 81))
    for thread in threads:
        thread.join(SECONDS)
    eventually(lambda: not ends.outbox._transfers)
