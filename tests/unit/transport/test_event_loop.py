"""One thread reads all connections, and a busy leader delays no connection."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from tests.unit.transport.support import SECONDS, eventually

from gradwire.errors import InternalError, MalformedMessage
from gradwire.system.watchdog import INLINE_SECONDS
from gradwire.transport import event_loop as event_loop_module
from gradwire.transport import leader_followers
from gradwire.transport.event_loop import EventLoop

THREADS = ("gradwire-event-loop", "gradwire-follower")


class Line:
    """A connection on which each byte is a frame."""

    def __init__(self) -> None:
        self.far, self._near = socket.socketpair()
        self._near.setblocking(False)
        self.has_more = False
        self.flushes = 0
        self._buffer = b""
        self._descriptor = self._near.fileno()

    def fileno(self) -> int:
        return self._descriptor

    def __next__(self) -> bytes | None:
        if not self._buffer:
            try:
                self._buffer = self._near.recv(100)
            except BlockingIOError:
                return None
            if not self._buffer:
                raise StopIteration
        frame, self._buffer = self._buffer[:1], self._buffer[1:]
        self.has_more = bool(self._buffer)
        if frame == b"!":
            raise MalformedMessage("no such frame")
        return frame

    def flush(self) -> None:
        self.flushes += 1

    flush_elsewhere = flush

    def close(self) -> None:
        self.far.close()
        self._near.close()


class Receiver:
    """Records the frames and the threads that read them; runs `work` where it may."""

    def __init__(self, event_loop: EventLoop) -> None:
        self.event_loop = event_loop
        self.received: list[tuple[bytes, str]] = []
        self.work: Callable[[], None] | None = None

    def receive(self, frame: bytes) -> None:
        self.received.append((frame, threading.current_thread().name))
        if self.work is not None and self.event_loop.may_run_inline():
            self.work()


@contextmanager
def served(event_loop: EventLoop, line: Line, receiver: Receiver) -> Iterator[threading.Thread]:
    thread = threading.Thread(target=event_loop.serve, args=(line, receiver.receive))
    thread.start()
    try:
        yield thread
    finally:
        line.far.close()
        thread.join(SECONDS)
        assert not thread.is_alive()
        line.close()


@contextmanager
def open_event_loop() -> Iterator[EventLoop]:
    event_loop = EventLoop()
    try:
        yield event_loop
    finally:
        event_loop.close()
    eventually(lambda: not any(thread.name in THREADS for thread in threading.enumerate()))


@contextmanager
def occupied(receiver: Receiver, line: Line, *, data: bytes = b"w") -> Iterator[None]:
    """Keeps the leader busy with the first frame."""
    begun, release = threading.Event(), threading.Event()

    def work() -> None:
        receiver.work = None
        begun.set()
        assert release.wait(SECONDS)

    receiver.work = work
    line.far.send(data)
    assert begun.wait(SECONDS)
    try:
        yield
    finally:
        release.set()


def test_one_thread_reads_all_connections() -> None:
    with open_event_loop() as event_loop:
        receiver = Receiver(event_loop)
        receiver.work = lambda: None
        lines = [Line(), Line()]
        with served(event_loop, lines[0], receiver), served(event_loop, lines[1], receiver):
            for number in range(50):
                lines[number % 2].far.send(bytes([100 + number]))
            eventually(lambda: len(receiver.received) == 50)
        assert {frame for frame, _ in receiver.received} == {bytes([100 + number]) for number in range(50)}


@pytest.mark.parametrize(("stay", "before_the_other"), [(0.0, range(1, 5)), (SECONDS, [10])])
def test_connections_are_served_round_robin(
    stay: float, before_the_other: Container[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each connection is served for its time slice."""
    monkeypatch.setattr(event_loop_module, "_SLICE_SECONDS", stay)
    with open_event_loop() as event_loop:
        receiver, lines = Receiver(event_loop), [Line(), Line()]
        with served(event_loop, lines[0], receiver), served(event_loop, lines[1], receiver):
            # All frames of both connections are there before the rest of either is read.
            with occupied(receiver, lines[0], data=b"a" * 10):
                lines[1].far.send(b"b" * 10)
            eventually(lambda: len(receiver.received) == 20)
        came = b"".join(frame for frame, _ in receiver.received)
        assert came.index(b"b") in before_the_other


def test_a_slow_request_delays_no_other() -> None:
    with open_event_loop() as event_loop:
        slow, fast = Receiver(event_loop), Receiver(event_loop)
        lines = [Line(), Line()]
        # Frames behind the slow request on the same connection do not wait, either.
        with (
            served(event_loop, lines[0], slow),
            served(event_loop, lines[1], fast),
            occupied(slow, lines[0], data=b"wxy"),
        ):
            lines[1].far.send(b"z")
            eventually(lambda: len(fast.received) == 1 and len(slow.received) == 3)


def test_no_follower_takes_over_while_no_work_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_followers, "watch", lambda _: True)  # only this test checks
    with open_event_loop() as event_loop:
        receiver, line = Receiver(event_loop), Line()
        with served(event_loop, line, receiver), occupied(receiver, line):
            a_little_later = event_loop._busy_since + 2 * INLINE_SECONDS
            assert event_loop.check(a_little_later), "it is looked at further"
            assert event_loop._busy_since, "it still has its turn"
            line.far.send(b"x")
            event_loop.check(a_little_later)
            eventually(lambda: [thread for _, thread in receiver.received][1:] == ["gradwire-follower"])


def test_a_follower_takes_over_from_a_leader_that_is_busy_for_very_long() -> None:
    with open_event_loop() as event_loop:
        receiver, line = Receiver(event_loop), Line()
        with served(event_loop, line, receiver), occupied(receiver, line):
            eventually(lambda: event_loop._leader is not None and not event_loop._busy_since)


def test_a_leader_about_to_block_hands_over_at_once() -> None:
    with open_event_loop() as event_loop:
        waiting, other = Receiver(event_loop), Receiver(event_loop)
        answered = threading.Event()

        def work() -> None:
            waiting.work = None
            event_loop.about_to_block()
            assert answered.wait(SECONDS)

        waiting.work = work
        other.work = answered.set
        lines = [Line(), Line()]
        with served(event_loop, lines[0], waiting), served(event_loop, lines[1], other):
            eventually(lambda: len(event_loop._connections) == 2)
            lines[0].far.send(b"w")
            lines[1].far.send(b"x")
            eventually(lambda: len(other.received) == 1)


def test_time_spent_waiting_does_not_count_as_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a request that waits still runs on the reading thread, unless that delayed others."""
    monkeypatch.setattr(leader_followers, "watch", lambda _: True)
    with open_event_loop() as event_loop:
        receiver, line = Receiver(event_loop), Line()
        worked: list[bytes] = []

        def work() -> None:
            event_loop.about_to_block()
            time.sleep(5 * INLINE_SECONDS)
            worked.append(receiver.received[-1][0])

        receiver.work = work
        with served(event_loop, line, receiver):
            for number in range(10):
                line.far.send(bytes([100 + number]))
                eventually(lambda number=number: len(worked) == 1 + number)  # type: ignore[misc]


def test_requests_that_wait_for_their_own_connection_soon_run_on_other_threads() -> None:
    with open_event_loop() as event_loop:
        line, answered = Line(), threading.Event()
        here: list[bool] = []

        def receive(frame: bytes) -> None:
            if frame == b"a":
                answered.set()
                return
            here.append(event_loop.may_run_inline())
            if here[-1]:
                event_loop.about_to_block()
                assert answered.wait(SECONDS)

        receiver = Receiver(event_loop)
        receiver.receive = receive  # type: ignore[method-assign]
        with served(event_loop, line, receiver):
            for number in range(10):
                answered.clear()
                line.far.send(b"q")
                eventually(lambda number=number: len(here) == 1 + number)  # type: ignore[misc]
                line.far.send(b"a")
                assert answered.wait(SECONDS)
        assert here[0]
        assert not all(here)


class Clock:
    """The time that the event loop sees: only work makes it pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        # Not the clock of the whole process, which other code relies on.
        monkeypatch.setattr(event_loop_module, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(leader_followers, "watch", lambda _: True)


def test_a_busy_connection_delays_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    with open_event_loop() as event_loop:
        receiver, lines = Receiver(event_loop), [Line(), Line()]
        first, sent = threading.Event(), threading.Event()

        def work() -> None:
            first.set()
            assert sent.wait(SECONDS)
            clock.now += 0.4 * event_loop_module._SLICE_SECONDS

        receiver.work = work
        with served(event_loop, lines[0], receiver), served(event_loop, lines[1], receiver):
            eventually(lambda: len(event_loop._connections) == 2)
            lines[0].far.send(b"a" * 20)
            assert first.wait(SECONDS)
            lines[1].far.send(b"b" * 20)
            sent.set()
            eventually(lambda: len(receiver.received) == 40)
        came = b"".join(frame for frame, _ in receiver.received)
        # Each connection is served for three frames, which take 1.2 time slices.
        assert came == b"aaabbb" * 6 + b"aabb"


def test_responses_to_a_lone_connection_are_written_together(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    with open_event_loop() as event_loop:
        receiver, line = Receiver(event_loop), Line()
        responses = 0

        def work() -> None:
            nonlocal responses
            clock.now += 0.05 * event_loop_module._SLICE_SECONDS
            assert event_loop.will_write(line)
            responses += 1

        receiver.work = work
        with served(event_loop, line, receiver):
            line.far.send(b"x" * 90)
            eventually(lambda: responses == 90 and line.flushes > 0)
        assert line.flushes < 45


def test_responses_to_requests_that_arrived_together_are_written_together() -> None:
    with open_event_loop() as event_loop:
        receiver, line = Receiver(event_loop), Line()
        written: list[bool] = []
        receiver.work = lambda: written.append(event_loop.will_write(line))
        with served(event_loop, line, receiver):
            line.far.send(b"abcdefghij")
            eventually(lambda: len(written) == 10 and line.flushes > 0)
        assert all(written)
        assert line.flushes <= 10
        assert not event_loop.will_write(line)  # this thread is not the leader


def test_a_response_does_not_wait_for_a_slow_request() -> None:
    with open_event_loop() as event_loop:
        receiver, line = Receiver(event_loop), Line()
        release = threading.Event()

        def work() -> None:
            if receiver.received[-1][0] == b"a":
                assert event_loop.will_write(line)
            else:
                assert release.wait(SECONDS)

        receiver.work = work
        with served(event_loop, line, receiver):
            line.far.send(b"ab")
            eventually(lambda: line.flushes == 1)
            release.set()


def test_a_protocol_error_ends_only_its_connection() -> None:
    with open_event_loop() as event_loop:
        receiver, bad, good = Receiver(event_loop), Line(), Line()
        with served(event_loop, good, receiver):
            bad.far.send(b"!")
            with pytest.raises(MalformedMessage):
                event_loop.serve(bad, receiver.receive)
            good.far.send(b"a")
            eventually(lambda: len(receiver.received) == 1)
        bad.close()


def test_an_error_on_one_connection_leaves_the_others_served() -> None:
    def fail(frame: bytes) -> None:
        raise SystemExit(frame)

    with open_event_loop() as event_loop:
        receiver, bad, good = Receiver(event_loop), Line(), Line()
        with served(event_loop, good, receiver):
            bad.far.send(b"x")
            with pytest.raises(InternalError, match="SystemExit"):
                event_loop.serve(bad, fail)
            good.far.send(b"a")
            eventually(lambda: len(receiver.received) == 1)
        bad.close()


def test_surplus_followers_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_followers, "_LIVENESS_SECONDS", 0.01)
    with open_event_loop() as event_loop:
        receiver, line, release = Receiver(event_loop), Line(), threading.Event()
        receiver.work = lambda: bool(release.wait(SECONDS)) or None
        with served(event_loop, line, receiver):
            # The first few requests run on the thread that read them; a follower takes over for each.
            line.far.send(b"abc")
            eventually(lambda: len(receiver.received) == 3 and event_loop._threads > 1)
            release.set()
            eventually(lambda: event_loop._threads <= 2)


def test_closing_ends_all_and_leaves_no_descriptor() -> None:
    before = len(os.listdir("/proc/self/fd"))
    event_loop = EventLoop()
    receiver, line = Receiver(event_loop), Line()
    thread = threading.Thread(target=event_loop.serve, args=(line, receiver.receive))
    thread.start()
    line.far.send(b"a")
    eventually(lambda: len(receiver.received) == 1)
    event_loop.close()
    thread.join(SECONDS)
    assert not thread.is_alive()
    event_loop.serve(line, receiver.receive)  # returns at once
    event_loop.close()
    line.close()
    eventually(lambda: len(os.listdir("/proc/self/fd")) == before)


def test_it_closes_while_the_leader_is_busy() -> None:
    event_loop = EventLoop()
    receiver, line = Receiver(event_loop), Line()
    thread = threading.Thread(target=event_loop.serve, args=(line, receiver.receive))
    thread.start()
    with occupied(receiver, line):
        event_loop.close()
        thread.join(SECONDS)
        assert not thread.is_alive()
    eventually(lambda: not any(thread.name in THREADS for thread in threading.enumerate()))
    line.close()
