"""What a gRPC stream writes, and when."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.unit.system.support import SECONDS, eventually

from gradwire.transport import GrpcStream


class Sends:
    """A session with some messages to write. Its stream is attached."""

    def __init__(self, *messages: bytes) -> None:
        self.messages = list(messages)
        self.lock = threading.Lock()

    def begin_output(self, stream: GrpcStream) -> bool:
        with self.lock:
            begins = stream.writer == "nobody" and bool(self.messages)
            if begins:
                stream.writer = "caller"
            return begins

    def take_output(self, stream: GrpcStream) -> bytes:
        with self.lock:
            if self.messages:
                return self.messages.pop(0)
            stream.rest()
            return b""

    def feed(self, data: bytes, stream: GrpcStream) -> None:
        raise AssertionError("nothing was read")


class Written:
    """Messages that are written when a test says so."""

    def __init__(self) -> None:
        self.begun: list[bytes] = []
        self.on_written: Callable[[], object] = lambda: None

    def write(self, data: bytes, on_written: Callable[[], object]) -> bool:
        self.begun.append(data)
        self.on_written = on_written
        return True

    def read(self, on_read: Callable[[bytes | None], object]) -> None:
        pass


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as pool:
        yield pool


def test_the_opening_goes_before_what_the_session_writes(pool: ThreadPoolExecutor) -> None:
    stream = GrpcStream(Sends(b"a message"))
    written = pool.submit(next, stream)
    stream.opening = b"the session goes over this stream"
    stream.hand_over()
    assert written.result(SECONDS) == b"the session goes over this stream"
    assert next(stream) == b"a message"


def test_small_messages_are_written_by_the_caller_and_what_follows_a_large_one_by_the_iterator() -> None:
    large = bytes(1 << 20)
    messages = Written()
    stream = GrpcStream(Sends(b"small", large, b"more"))
    stream.read(iter(()), messages, "")
    stream.flush()
    messages.on_written()
    assert messages.begun == [b"small", large]
    messages.on_written()
    assert stream.writer == "iterator"
    assert next(stream) == b"more"


def test_a_stream_that_is_closed_ends_when_what_is_being_written_was_written(
    pool: ThreadPoolExecutor,
) -> None:
    messages = Written()
    stream = GrpcStream(Sends(b"a message", b"more"))
    stream.read(iter(()), messages, "")
    stream.flush()
    ended = pool.submit(list, stream)
    stream.close()
    eventually(stream._wakes.empty)
    assert not ended.done()
    messages.on_written()
    assert ended.result(SECONDS) == []
    assert messages.begun == [b"a message"]


def test_a_stream_that_is_closed_while_a_caller_finds_nothing_to_write_ends(pool: ThreadPoolExecutor) -> None:
    session = Sends()
    stream = GrpcStream(session)
    stream.writer = "caller"
    ended = pool.submit(list, stream)
    stream.close()
    eventually(stream._wakes.empty)
    assert session.take_output(stream) == b""
    assert ended.result(SECONDS) == []


class WithoutMemory(Sends):
    def take_output(self, stream: GrpcStream) -> bytes:
        raise MemoryError


def test_a_stream_that_cannot_be_written_for_lack_of_memory_ends() -> None:
    stream = GrpcStream(WithoutMemory(b"a message"))
    stream.read(iter(()), Written(), "")
    with pytest.raises(MemoryError):
        stream.flush()
    assert stream.closed
    assert list(stream) == []
