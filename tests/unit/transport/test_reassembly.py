"""Chunks become attachments; invalid ones are refused before memory is allocated for them."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.unit.wire.test_hashing import keys_in_each_others_way

from gradwire.errors import MalformedMessage, ResourceExhausted
from gradwire.proto.v1 import link_pb2
from gradwire.transport import buffers
from gradwire.transport.base import LARGE_BYTES
from gradwire.transport.frames import Chunk
from gradwire.transport.memory_budget import MemoryBudget, Quota
from gradwire.transport.reassembly import Reassembler

Request, Response = link_pb2.Request, link_pb2.Response
REQUEST = Request(id=1)


@pytest.fixture
def reassembler() -> Reassembler:
    return Reassembler(max_bytes=1000)


def chunk(transfer: int, offset: int, total: int, data: bytes) -> Chunk:
    return Chunk(transfer, offset, total, data)


def test_chunks_before_and_after_their_message_complete_it(reassembler: Reassembler) -> None:
    assert reassembler.chunk(chunk(1, 0, 4, b"ab")) is None
    assert reassembler.message((False, 1), [1, 2], REQUEST) is None
    assert reassembler.chunk(chunk(2, 0, 1, b"x")) is None
    assert reassembler.held == 3
    complete = reassembler.chunk(chunk(1, 2, 4, b"cd"))
    assert complete is not None
    assert [buffer.tobytes() for buffer in complete[1]] == [b"abcd", b"x"]
    assert reassembler.held == 0


@pytest.mark.parametrize(
    ("pieces", "complaint"),
    [
        ([(1, 0, 4, b"abcde")], "bytes 0 to 5 arrived after 0 of 4"),
        ([(1, 0, 4, b"ab"), (1, 3, 4, b"d")], "bytes 3 to 4 arrived after 2 of 4"),
        ([(1, 0, 4, b"ab"), (1, 0, 4, b"ab")], "bytes 0 to 2 arrived after 2 of 4"),
        ([(1, 0, 4, b"ab"), (1, 2, 4, b"cde")], "bytes 2 to 5 arrived after 2 of 4"),
        ([(1, 0, 4, b"")], "bytes 0 to 0 arrived after 0 of 4"),
        ([(1, 0, 4, b"abcd"), (1, 4, 4, b"e")], "bytes 4 to 5 arrived after 4 of 4"),
        ([(1, 2, 4, b"cd")], "lacks its first 2 bytes"),
        ([(2, 0, 1, b"x"), (1, 0, 1, b"x")], "began twice, or out of order"),
        ([(0, 0, 1, b"x")], "began twice, or out of order"),
    ],
)
def test_chunks_that_do_not_fit_are_refused(
    reassembler: Reassembler, pieces: list[tuple[int, int, int, bytes]], complaint: str
) -> None:
    *fitting, last = pieces
    for piece in fitting:
        reassembler.chunk(chunk(*piece))
    with pytest.raises(MalformedMessage, match=complaint):
        reassembler.chunk(chunk(*last))


@pytest.mark.parametrize("total", [1001, 1 << 60, (1 << 64) - 1])
def test_a_total_over_the_limit_is_refused(reassembler: Reassembler, total: int) -> None:
    with pytest.raises(ResourceExhausted, match=f"{total} bytes exceed the limit of 1000 bytes"):
        reassembler.chunk(chunk(1, 0, total, b"x"))
    assert reassembler.held == 0


def test_a_total_that_no_memory_can_hold_is_refused() -> None:
    with pytest.raises(ResourceExhausted, match="no memory"):
        Reassembler(max_bytes=1 << 62).chunk(chunk(1, 0, 1 << 62, b"x"))


def test_attachments_that_together_are_over_the_limit_are_refused(reassembler: Reassembler) -> None:
    reassembler.message((False, 1), [1, 2], REQUEST)
    reassembler.chunk(chunk(1, 0, 600, b"x"))
    with pytest.raises(ResourceExhausted, match="1200 bytes exceed the limit"):
        reassembler.chunk(chunk(2, 0, 600, b"x"))


def test_transfers_that_were_chosen_to_collide_are_refused(reassembler: Reassembler) -> None:
    with pytest.raises(MalformedMessage, match="collide too often"):
        reassembler.message((False, 1), keys_in_each_others_way(4096, 2000, 600), REQUEST)


@pytest.mark.parametrize("transfers", [[1, 1], [3, 1, 3]])
def test_a_transfer_belongs_to_one_message_once(reassembler: Reassembler, transfers: list[int]) -> None:
    with pytest.raises(MalformedMessage, match="twice"):
        reassembler.message((False, 1), transfers, REQUEST)


def test_a_transfer_belongs_to_one_message(reassembler: Reassembler) -> None:
    reassembler.message((False, 1), [1], REQUEST)
    with pytest.raises(MalformedMessage, match="twice"):
        reassembler.message((False, 2), [1], REQUEST)


def test_a_message_cannot_name_a_transfer_that_will_never_arrive(reassembler: Reassembler) -> None:
    reassembler.chunk(chunk(5, 0, 1, b"x"))
    with pytest.raises(
        MalformedMessage, match="transfer 3 was named as an attachment, but will never arrive"
    ):
        reassembler.message((False, 1), [3], REQUEST)


def test_requests_must_arrive_in_order(reassembler: Reassembler) -> None:
    reassembler.message((False, 2), [], REQUEST)
    with pytest.raises(MalformedMessage, match="request 1 arrived after request 2"):
        reassembler.message((False, 1), [], REQUEST)


def test_a_second_response_to_a_request_is_refused(reassembler: Reassembler) -> None:
    reassembler.message((True, 1), [1], link_pb2.Response(id=1))
    with pytest.raises(MalformedMessage, match="a second response"):
        reassembler.message((True, 1), [2], link_pb2.Response(id=1))


def test_skipped_attachments_are_discarded_as_they_arrive(reassembler: Reassembler) -> None:
    reassembler.skip((False, 1), [1, 2])
    for transfer in (1, 2):
        assert reassembler.chunk(chunk(transfer, 0, 4, b"ab")) is None
        assert reassembler.chunk(chunk(transfer, 2, 4, b"cd")) is None
    assert reassembler.held == 0
    assert reassembler._unwanted == set()


def test_the_memory_of_cancellations_is_bounded(reassembler: Reassembler) -> None:
    reassembler.MAX_EXPECTED = 10  # type: ignore[misc]
    for id in range(1, 11):
        reassembler.drop((False, id))
    with pytest.raises(ResourceExhausted):
        reassembler.drop((False, 11))
    # Requests arrive in order: those before this one never will.
    assert reassembler.message((False, 10), [], REQUEST) is None
    for id in range(11, 21):
        reassembler.drop((False, id))
    assert reassembler._cancelled == set(range(11, 21))


def test_incomplete_messages_are_freed_with_the_streams() -> None:
    reassembler = Reassembler(1 << 30)
    idle = buffers._buffers.idle_bytes
    reassembler.message((False, 1), [1], REQUEST)
    for transfer in (1, 2):
        reassembler.chunk(chunk(transfer, 0, 4 << 20, bytes(3 << 20)))
    assert reassembler.held == 6 << 20
    reassembler.close()
    assert reassembler.held == 0
    assert (reassembler._transfers, reassembler._waiting, reassembler._wanted_by) == ({}, {}, {})
    # The memory goes back to the system rather than to the pool: it may never be needed again.
    assert buffers._buffers.idle_bytes <= idle


def test_only_so_many_attachments_begin_at_a_time(reassembler: Reassembler) -> None:
    reassembler.MAX_BEGUN = 10  # type: ignore[misc]
    for transfer in range(1, 11):
        reassembler.chunk(chunk(transfer, 0, 2, b"x"))
    with pytest.raises(ResourceExhausted, match="more than 10 attachments"):
        reassembler.chunk(chunk(11, 0, 2, b"x"))


def test_orphans_count_as_the_memory_that_they_take() -> None:
    reassembler = Reassembler(1 << 30, Quota(40_960, MemoryBudget()), orphan_timeout=0.01)
    for transfer in range(1, 11):
        reassembler.chunk(chunk(transfer, 0, 2 << 20, b"x"))
    with pytest.raises(MalformedMessage, match="belongs to no message"):
        reassembler.chunk(chunk(11, 0, 2 << 20, b"x"))
    # Transfers that were claimed by a message, or are unwanted, no longer count.
    reassembler.message((False, 1), [1, 2], REQUEST)
    reassembler.skip((True, 1), [3])
    assert reassembler._orphan_bytes == 7 * 4096
    for transfer in range(12, 15):
        reassembler.chunk(chunk(transfer, 0, 2 << 20, b"x"))


def test_an_orphan_over_the_quota_waits_for_its_message() -> None:
    reassembler = Reassembler(1000, Quota(10, MemoryBudget()), orphan_timeout=20.0)
    assert reassembler.chunk(chunk(1, 0, 20, b"0123456789")) is None
    with ThreadPoolExecutor() as pool:
        rest = pool.submit(reassembler.chunk, chunk(1, 10, 20, b"0123456789"))
        # Larger than the whole quota, but alone.
        assert reassembler.message((False, 1), [1], Request(id=1)) is None
        complete = rest.result(20)
    assert complete is not None
    assert bytes(complete[1][0]) == b"0123456789" * 2  # type: ignore[index]


def test_an_orphan_over_the_quota_without_a_message_is_refused() -> None:
    reassembler = Reassembler(1000, Quota(10, MemoryBudget()), orphan_timeout=0.01)
    reassembler.chunk(chunk(1, 0, 20, b"0123456789"))
    with pytest.raises(MalformedMessage, match="belongs to no message"):
        reassembler.chunk(chunk(1, 10, 20, b"0123456789"))


def test_an_orphan_stops_waiting_when_the_streams_end() -> None:
    reassembler = Reassembler(1000, Quota(10, MemoryBudget()), orphan_timeout=600.0)
    reassembler.chunk(chunk(1, 0, 20, b"0123456789"))
    with ThreadPoolExecutor() as pool:
        rest = pool.submit(reassembler.chunk, chunk(1, 10, 20, b"0123456789"))
        reassembler.close()
        assert rest.result(20) is None


def test_a_large_body_counts_as_attachments_do() -> None:
    quota = Quota(LARGE_BYTES + 10, MemoryBudget())
    reassembler = Reassembler(1000, quota)
    small, large = Request(id=1, body=bytes(LARGE_BYTES - 1)), Request(id=2, body=bytes(LARGE_BYTES))
    assert reassembler.message((False, 1), [], small) == (small, ())
    assert reassembler.message((False, 2), [], large) == (large, ())
    assert reassembler.message((False, 3), [1], Request(id=3)) is None
    assert reassembler.chunk(chunk(1, 0, 11, b"0123")) == (Request(id=3), None)
    another = Request(id=4, body=bytes(LARGE_BYTES))
    assert reassembler.message((False, 4), [2], another) == (another, None)
    assert reassembler.chunk(chunk(2, 0, 1, b"x")) is None
    assert reassembler.held == 0
    quota.give_back(2)
    assert reassembler.message((False, 5), [], Request(id=5, body=large.body)) is not None
    # Responses are exempt: this peer requested them.
    response = Response(id=1, body=large.body)
    assert reassembler.message((True, 1), [], response) == (response, ())


def test_a_request_over_the_quota_is_refused_and_its_rest_ignored() -> None:
    quota = Quota(10, MemoryBudget())
    reassembler = Reassembler(1000, quota)
    assert reassembler.message((False, 1), [1], Request(id=1)) is None
    assert reassembler.chunk(chunk(1, 0, 8, b"0123")) is None
    second = Request(id=2)
    assert reassembler.message((False, 2), [2, 3], second) is None
    assert reassembler.chunk(chunk(2, 0, 8, b"0123")) == (second, None)
    assert reassembler.chunk(chunk(2, 4, 8, b"4567")) is None
    assert reassembler.chunk(chunk(3, 0, 8, b"01234567")) is None
    assert reassembler.held == 4
    # Responses are exempt: this peer requested them.
    assert reassembler.message((True, 1), [4], Response(id=1)) is None
    assert reassembler.chunk(chunk(4, 0, 20, b"0123")) is None
    reassembler.close()
    assert quota.take(9, 10)
    assert not quota.take(10, 1)
