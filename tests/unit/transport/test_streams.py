"""What a gRPC stream writes, and when."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from gradwire.transport import GrpcStream

SECONDS = 20.0


class Idle:
    """A session with nothing to write."""

    def __init__(self) -> None:
        self.was_asked = threading.Event()
        self._lock = threading.Lock()

    def begin_output(self, stream: GrpcStream) -> bool:
        with self._lock:
            begins = stream.is_asleep and bool(stream.first)
            stream.is_asleep = stream.is_asleep and not begins
            return begins

    def take_output(self, stream: GrpcStream) -> bytes:
        with self._lock:
            stream.sleep()
        self.was_asked.set()
        return b""

    def feed(self, data: bytes, stream: GrpcStream) -> None:
        raise AssertionError("nothing was read")


def test_what_is_put_while_it_waits_for_the_session_is_written_at_once() -> None:
    session = Idle()
    stream = GrpcStream(session)
    with ThreadPoolExecutor(1) as pool:
        written = pool.submit(next, stream)
        assert session.was_asked.wait(SECONDS)
        stream.first.append(b"the session goes over this stream")
        stream.flush()
        try:
            assert written.result(SECONDS) == b"the session goes over this stream"
        finally:
            stream.close()


def test_what_was_put_is_written_even_if_the_stream_is_closed_before() -> None:
    stream = GrpcStream(Idle())
    stream.first.append(b"the session goes over this stream")
    stream.close()
    assert list(stream) == [b"the session goes over this stream"]


class HandsOver(Idle):
    """Another thread hands the right to write to the iterator just before that asks for it."""

    def begin_output(self, stream: GrpcStream) -> bool:
        stream.wake()
        return False


def test_the_right_to_write_is_not_lost_when_it_is_handed_over_and_asked_for_at_once() -> None:
    stream = GrpcStream(HandsOver())
    stream.sleep()
    stream.first.append(b"the session goes over this stream")
    with ThreadPoolExecutor(1) as pool:
        try:
            assert pool.submit(next, stream).result(SECONDS) == b"the session goes over this stream"
        finally:
            stream.close()


class WithoutMemory(Idle):
    def begin_output(self, stream: GrpcStream) -> bool:
        return True

    def take_output(self, stream: GrpcStream) -> bytes:
        raise MemoryError


class Never:
    """Messages that are never written."""

    def write(self, data: bytes, on_written: Callable[[], object]) -> bool:
        raise AssertionError("nothing was taken")

    def read(self, on_read: Callable[[bytes | None], object]) -> None:
        pass


def test_a_stream_that_cannot_be_written_for_lack_of_memory_ends() -> None:
    stream = GrpcStream(WithoutMemory())
    stream.read(iter(()), Never(), "")
    with pytest.raises(MemoryError):
        stream.flush()
    assert stream.closed
    assert list(stream) == []
