"""Small frames are written first and together; transfers alternate."""

from __future__ import annotations

import threading

import pytest
from tests.conformance.ends import Memory

from gradwire.errors import GradwireError
from gradwire.transport import frames
from gradwire.transport.outbox import Outbox, OutgoingTransfer


def transfer(id: int, size: int, owner: int = 1) -> OutgoingTransfer:
    def failed(_: OutgoingTransfer, error: GradwireError) -> None:
        raise AssertionError(error)

    return OutgoingTransfer(id, Memory(bytes(size)), (False, owner), 10, failed)


def written(outbox: Outbox) -> list[tuple[int, int]]:
    outbox.close()
    pieces = [frames.parse_chunk(data) for data in outbox]
    return [(piece.transfer, piece.offset) for piece in pieces if piece is not None]


def test_waiting_frames_are_written_as_one_envelope() -> None:
    outbox = Outbox()
    for id in (1, 2, 3):
        outbox.put(frames.cancel(id))
    assert [frame.cancel.id for frame in frames.parse(next(outbox))] == [1, 2, 3]


def test_large_frames_are_not_joined() -> None:
    outbox = Outbox()
    for _ in range(3):
        outbox.put(bytes(200_000))
    outbox.close()
    assert [len(data) for data in outbox] == [200_000] * 3


def test_frames_leave_before_transfers() -> None:
    outbox = Outbox()
    outbox.put_transfer(transfer(1, 20))
    outbox.put(b"frame")
    assert next(outbox) == b"frame"
    assert written(outbox) == [(1, 0), (1, 10)]


def test_transfers_alternate_and_begin_in_order() -> None:
    outbox = Outbox()
    for id in (1, 2):
        outbox.put_transfer(transfer(id, 30))
    next(outbox)
    outbox.put_transfer(transfer(3, 10))
    assert written(outbox) == [(2, 0), (1, 10), (3, 0), (2, 10), (1, 20), (2, 20)]


def test_dropped_transfers_are_not_written() -> None:
    outbox = Outbox()
    outbox.put_transfer(transfer(1, 30, owner=1))
    outbox.put_transfer(transfer(2, 30, owner=2))
    next(outbox)
    outbox.drop_transfers((False, 1))
    assert written(outbox) == [(2, 0), (2, 10), (2, 20)]


def test_an_empty_attachment_is_one_empty_chunk() -> None:
    outbox = Outbox()
    outbox.put_transfer(transfer(1, 0))
    assert written(outbox) == [(1, 0)]


def test_nothing_is_taken_after_the_end() -> None:
    outbox = Outbox()
    outbox.put(b"before")
    outbox.close()
    outbox.put(b"after")
    outbox.put_transfer(transfer(1, 10))
    assert list(outbox) == [b"before"]


def test_discarding_ends_at_once() -> None:
    outbox = Outbox()
    outbox.put(b"frame")
    outbox.put_transfer(transfer(1, 10))
    outbox.close(discard=True)
    assert list(outbox) == []


def test_closing_wakes_a_waiting_writer() -> None:
    outbox = Outbox()
    results: list[list[bytes]] = []
    waiting = threading.Thread(target=lambda: results.append(list(outbox)))
    waiting.start()
    outbox.close()
    waiting.join(10)
    assert results == [[]]


@pytest.mark.parametrize("size", [0, 1, 127, 128, 300, 70_000])
@pytest.mark.parametrize("numbers", [(0, 0, 0), (1, 0, 5), (1 << 40, 1 << 63, (1 << 64) - 1), (127, 128, 0)])
def test_chunks_are_written_as_protobuf_would(numbers: tuple[int, int, int], size: int) -> None:
    from gradwire.proto.v1 import link_pb2

    data = bytes(size)
    ours = frames.chunk(*numbers, memoryview(data))
    chunk = link_pb2.TransferChunk(transfer=numbers[0], offset=numbers[1], total=numbers[2], data=data)
    assert ours == link_pb2.Envelope(frames=[link_pb2.Frame(transfer_chunk=chunk)]).SerializeToString()
    read = frames.parse_chunk(ours)
    assert read is not None
    assert (read.transfer, read.offset, read.total, bytes(read.data)) == (*numbers, data)


def test_anything_but_one_chunk_is_left_to_protobuf() -> None:
    one = frames.chunk(1, 0, 5, memoryview(b"hello"))
    for data in (b"", b"\x0a", one + one, one[:-1], one + b"\x00", frames.cancel(3), b"\x0a" + b"\xff" * 20):
        assert frames.parse_chunk(data) is None
