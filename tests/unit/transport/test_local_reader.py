"""Which thread reads a local connection, and that there always is one."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType

import pytest
from tests.unit.interrupting import interrupted_at
from tests.unit.transport.support import SECONDS, eventually

from gradwire.errors import DeadlineExceeded
from gradwire.transport import Payload, ResponseFuture, leader_followers, local_reader
from gradwire.transport.local_reader import LocalReader


class Line:
    """A connection on which each byte is a frame."""

    has_more = False

    def __init__(self) -> None:
        self.far, self._near = socket.socketpair()

    def fileno(self) -> int:
        return self._near.fileno()

    def __next__(self) -> bytes:
        data = self._near.recv(1)
        if not data:
            raise StopIteration
        return data


class Receiver:
    """Settles the request that a frame names, and records which thread did."""

    def __init__(self) -> None:
        self.futures: dict[bytes, ResponseFuture] = {}
        self.threads: list[str] = []
        self.work: Callable[[], None] = lambda: None
        self.reader: LocalReader | None = None

    def receive(self, frame: bytes) -> None:
        self.threads.append(threading.current_thread().name)
        if frame in self.futures:
            self.futures[frame].settle(Payload(frame))
        elif self.reader is not None and self.reader.may_run_inline():
            self.work()

    def send_request(self, frame: bytes) -> ResponseFuture:
        future = self.futures[frame] = ResponseFuture()
        return future


@contextmanager
def open_line(receiver: Receiver) -> Iterator[tuple[Line, LocalReader]]:
    line = Line()
    reader = receiver.reader = LocalReader(line, receiver.receive)
    thread = threading.Thread(target=reader.run, name="supervisor")
    thread.start()
    try:
        yield line, reader
    finally:
        line.far.close()
        thread.join(SECONDS)
        assert not thread.is_alive()
        line._near.close()


def call(line: Line, reader: LocalReader, receiver: Receiver, frame: bytes) -> None:
    future = receiver.send_request(frame)
    answering = threading.Timer(0.0, line.far.send, [frame])
    answering.start()
    reader.read_for(future)
    assert future.result(SECONDS).body == frame
    answering.join()


def test_a_caller_reads_its_own_responses() -> None:
    receiver = Receiver()
    with open_line(receiver) as (line, reader):
        for _ in range(200):
            call(line, reader, receiver, b"a")
    assert receiver.threads.count(threading.current_thread().name) > 0


def test_unsolicited_frames_are_read_soon() -> None:
    receiver = Receiver()
    with open_line(receiver) as (line, reader):
        for number in range(20):
            call(line, reader, receiver, b"a")
            line.far.send(b"b")
            eventually(lambda number=number: len(receiver.threads) == 2 * number + 2)  # type: ignore[misc]


def test_a_deadline_wakes_the_reading_caller() -> None:
    receiver = Receiver()
    with open_line(receiver) as (line, reader):
        for _ in range(5):
            call(line, reader, receiver, b"a")
            late = receiver.send_request(b"z")
            threading.Timer(0.01, late.settle, [DeadlineExceeded("too late")]).start()
            reader.read_for(late)
            with pytest.raises(DeadlineExceeded):
                late.result(SECONDS)


def test_many_waiting_threads_get_their_responses() -> None:
    receiver = Receiver()

    def call_often(reader: LocalReader, line: Line, frame: bytes) -> None:
        for _ in range(100):
            future = receiver.send_request(frame)
            line.far.send(frame)
            reader.read_for(future)
            assert future.result(SECONDS).body == frame
            done.append(frame)

    done: list[bytes] = []
    with open_line(receiver) as (line, reader):
        threads = [
            threading.Thread(target=call_often, args=(reader, line, bytes([number]))) for number in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        assert len(done) == 800


def test_the_reading_caller_notices_the_end() -> None:
    receiver = Receiver()
    line = Line()
    reader = LocalReader(line, receiver.receive)
    supervisor = threading.Thread(target=reader.run)
    supervisor.start()
    future = receiver.send_request(b"never")
    threading.Timer(0.02, line.far.close).start()
    reader.read_for(future)
    supervisor.join(SECONDS)
    assert not supervisor.is_alive()
    assert not future.done()  # the thread that supervises the link settles it
    reader.read_for(future)  # returns at once
    line._near.close()


def test_a_follower_takes_over_from_a_busy_leader() -> None:
    receiver = Receiver()
    occupied, release = threading.Event(), threading.Event()

    def work() -> None:
        receiver.work = lambda: None
        occupied.set()
        assert release.wait(SECONDS)

    receiver.work = work
    with open_line(receiver) as (line, _):
        line.far.send(b"w")
        assert occupied.wait(SECONDS)
        for number in range(1, 6):
            line.far.send(b"x")
            eventually(lambda number=number: len(receiver.threads) == 1 + number)  # type: ignore[misc]
        assert "supervisor" not in receiver.threads[1:]
        release.set()
    eventually(lambda: not any(thread.name == "gradwire-follower" for thread in threading.enumerate()))


def test_responses_are_read_while_many_requests_are_sent() -> None:
    receiver = Receiver()
    with open_line(receiver) as (line, reader):
        line.far.send(b"x")
        eventually(lambda: len(receiver.threads) == 1)
        future = receiver.send_request(b"a")
        line.far.send(b"a")
        give_up_at = time.monotonic() + SECONDS
        while not future.done() and time.monotonic() < give_up_at:
            reader.note_request_sent()
            time.sleep(0.0001)
        assert future.done()


def test_a_caller_that_never_reads_gets_its_responses() -> None:
    """For example a caller that awaits futures: the background thread keeps reading."""
    receiver = Receiver()
    with open_line(receiver) as (line, reader):
        for _ in range(20):
            future = receiver.send_request(b"a")
            reader.note_request_sent()
            line.far.send(b"a")
            assert future.result(SECONDS).body == b"a"
            assert reader._leader is not None


def test_reading_in_the_background_starts_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """After calls whose responses the caller read itself, and without the help of the watchdog."""
    monkeypatch.setattr(local_reader, "watch", lambda _: None)
    monkeypatch.setattr(leader_followers, "_LIVENESS_SECONDS", SECONDS)
    receiver = Receiver()
    with open_line(receiver) as (line, reader):
        for _ in range(20):
            call(line, reader, receiver, b"a")
            future = receiver.send_request(b"b")
            reader.read_in_background(future)
            reader.read_in_background(future)
            line.far.send(b"b")
            assert future.result(SECONDS / 2).body == b"b"
        reader.read_in_background(receiver.send_request(b"never"))  # so that a thread notices the end


def test_settled_futures_are_not_kept() -> None:
    receiver = Receiver()
    with open_line(receiver) as (line, reader):
        for _ in range(50):
            future = receiver.send_request(b"a")
            reader.read_in_background(future)
            line.far.send(b"a")
            reader.read_for(future)
            assert future.result(SECONDS).body == b"a"
        eventually(lambda: not reader._awaited_futures)


def test_no_descriptor_is_left() -> None:
    before = len(os.listdir("/proc/self/fd"))
    receiver = Receiver()
    with open_line(receiver) as (line, reader):
        call(line, reader, receiver, b"a")
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize("function", [LocalReader.read_for, LocalReader._stop_reading_as_caller])
def test_an_interrupted_caller_always_gives_up_the_lead(function: FunctionType) -> None:
    for number in itertools.count():
        receiver, line = Receiver(), Line()
        reader = LocalReader(line, receiver.receive)
        future = receiver.send_request(b"a")
        line.far.send(b"a")
        was_interrupted = interrupted_at(number, function.__code__, partial(reader.read_for, future))
        supervisor = threading.Thread(target=reader.run)
        supervisor.start()
        later = receiver.send_request(b"b")
        line.far.send(b"b")
        assert later.result(SECONDS).body == b"b"
        line.far.close()
        supervisor.join(SECONDS)
        assert not supervisor.is_alive()
        line._near.close()
        if not was_interrupted:
            break
    assert number >= 3  # there were places to interrupt


def test_an_interrupt_while_a_response_is_handled_loses_nothing() -> None:
    receiver, line = Receiver(), Line()

    def receive(frame: bytes) -> None:
        if frame == b"a":
            signal.raise_signal(signal.SIGINT)
        receiver.receive(frame)

    reader = LocalReader(line, receive)
    own, another = receiver.send_request(b"b"), receiver.send_request(b"a")
    line.far.send(b"a")
    with pytest.raises(KeyboardInterrupt):
        reader.read_for(own)
    assert another.result(SECONDS).body == b"a"
    line.far.send(b"b")
    reader.read_for(own)
    assert own.result(SECONDS).body == b"b"
    line.far.close()
    reader.run()  # returns when the connection has ended
    line._near.close()
