"""The behaviour of every link, over whatever transport."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError, as_completed

import numpy as np
import pytest
from tests.conformance.ends import KINDS, SECONDS, STEADY, Ends, Memory, opened

from gradwire import errors
from gradwire.proto.v1 import link_pb2
from gradwire.transport import Link, LinkSettings, ResponseFuture, ServerCall, faults

PING = link_pb2.METHOD_PING


@pytest.fixture(params=KINDS)
def ends(request: pytest.FixtureRequest) -> Iterator[Ends]:
    with opened(request.param) as ends:
        yield ends
        assert not ends.switch or not ends.switch.moments or ends.switch.cuts


def body_of(future: ResponseFuture) -> bytes:
    return future.result(SECONDS).body


def attachments_of(future: ResponseFuture) -> list[bytes]:
    return [attachment.tobytes() for attachment in future.result(SECONDS).attachments]


class Held:
    """A handler that keeps server calls until the test responds to them."""

    def __init__(self) -> None:
        self.server_calls: list[ServerCall] = []
        self.arrived = threading.Semaphore(0)

    def __call__(self, server_call: ServerCall) -> None:
        self.server_calls.append(server_call)
        self.arrived.release()

    def wait(self, times: int = 1) -> list[ServerCall]:
        for _ in range(times):
            assert self.arrived.acquire(timeout=SECONDS)
        return self.server_calls


# -- requests and responses


def test_a_request_gets_its_response(ends: Ends) -> None:
    assert body_of(ends.left.send_request(PING, b"hello")) == b"hello"


def test_an_empty_request_gets_its_response(ends: Ends) -> None:
    assert body_of(ends.left.send_request(PING, b"")) == b""


def test_both_peers_send_requests(ends: Ends) -> None:
    there = ends.right.send_request(PING, b"from the right")
    here = ends.left.send_request(PING, b"from the left")
    assert (body_of(here), body_of(there)) == (b"from the left", b"from the right")
    assert ends.here.received == [b"from the right"]
    assert ends.there.received == [b"from the left"]


def test_a_server_call_has_the_request_and_the_link_back(ends: Ends) -> None:
    held = ends.there.respond = Held()
    future = ends.left.send_request(link_pb2.METHOD_DESCRIBE, b"x", timeout=SECONDS)
    (server_call,) = held.wait()
    assert server_call.method == link_pb2.METHOD_DESCRIBE
    assert server_call.deadline is not None
    assert server_call.link is ends.right
    assert body_of(ends.right.send_request(PING, b"back")) == b"back"
    server_call.respond(b"done")
    assert body_of(future) == b"done"


def test_the_peers_know_each_other(ends: Ends) -> None:
    assert ends.left.peer.id == ends.right.local.id == ends.there.identity.id
    assert ends.right.peer.id == ends.left.local.id == ends.here.identity.id
    assert ends.left.peer.name == "there"
    assert ends.right.peer.name == "here"


def test_many_requests_are_in_flight_both_ways(ends: Ends) -> None:
    bodies = [str(number).encode() for number in range(500)]
    lefts = [ends.left.send_request(PING, body) for body in bodies]
    rights = [ends.right.send_request(PING, body) for body in bodies]
    assert [body_of(future) for future in lefts] == bodies
    assert [body_of(future) for future in rights] == bodies


def test_responses_arrive_in_any_order(ends: Ends) -> None:
    held = ends.there.respond = Held()
    futures = [ends.left.send_request(PING, str(number).encode()) for number in range(5)]
    for server_call in reversed(held.wait(5)):
        server_call.respond(server_call.request.body)
    assert [body_of(future) for future in futures] == [b"0", b"1", b"2", b"3", b"4"]


def test_only_the_first_response_counts(ends: Ends) -> None:
    def twice(server_call: ServerCall) -> None:
        server_call.respond(b"first")
        server_call.respond(b"second")
        server_call.fail(link_pb2.Error(code=link_pb2.Error.CODE_INTERNAL))

    ends.there.respond = twice
    assert body_of(ends.left.send_request(PING, b"")) == b"first"
    assert body_of(ends.left.send_request(PING, b"")) == b"first"


def test_responses_may_come_from_any_thread(ends: Ends) -> None:
    threads: list[threading.Thread] = []

    def elsewhere(server_call: ServerCall) -> None:
        thread = threading.Thread(target=server_call.respond, args=(b"elsewhere",))
        threads.append(thread)
        thread.start()

    ends.there.respond = elsewhere
    assert body_of(ends.left.send_request(PING, b"")) == b"elsewhere"
    threads[0].join()


# -- failing


def test_a_failure_arrives_as_the_error_that_it_was(ends: Ends) -> None:
    error = errors.NotFound("no such thing")
    ends.there.respond = lambda server_call: server_call.fail(faults.describe(error, "there"))
    with pytest.raises(errors.NotFound, match="no such thing") as caught:
        ends.left.send_request(PING, b"").result(SECONDS)
    assert caught.value.worker == "there"


def test_a_handler_that_raises_fails_the_request(ends: Ends, caplog: pytest.LogCaptureFixture) -> None:
    def broken(server_call: ServerCall) -> None:
        raise ZeroDivisionError("broken")

    ends.there.respond = broken
    with pytest.raises(ZeroDivisionError, match="broken"):
        ends.left.send_request(PING, b"").result(SECONDS)
    assert "the handler of requests from here failed" in caplog.text
    assert ends.left.ended is None


def test_a_body_over_the_limit_is_refused_before_it_is_sent() -> None:
    with opened("in-process", LinkSettings(max_body_bytes=1000)) as ends:
        with pytest.raises(errors.ResourceExhausted, match="1001 bytes exceeds the limit of 1000 bytes"):
            ends.left.send_request(PING, bytes(1001))
        assert body_of(ends.left.send_request(PING, bytes(1000))) == bytes(1000)
        ends.there.respond = lambda server_call: server_call.respond(bytes(1001))
        with pytest.raises(errors.ResourceExhausted, match="1001 bytes"):
            ends.left.send_request(PING, b"").result(SECONDS)


@pytest.mark.parametrize("kind", KINDS)
def test_attachments_over_the_peers_limit_are_refused_before_they_are_sent(kind: str) -> None:
    with opened(kind, LinkSettings(max_message_bytes=100_000)) as ends:
        attachments = [Memory(bytes(60_000)), Memory(bytes(60_000))]
        with pytest.raises(errors.ResourceExhausted, match="exceeds the limit of 100000 bytes"):
            ends.left.send_request(PING, b"", attachments)
        # The limit is for one message, not for all that are in flight.
        futures = [ends.left.send_request(PING, b"", attachments[:1]) for _ in range(5)]
        for future in futures:
            assert attachments_of(future) == [bytes(60_000)]


# -- cancelling


def test_a_request_with_a_cancelled_future_is_not_awaited(ends: Ends) -> None:
    ends.there.respond = Held()
    future = ResponseFuture()
    assert future.cancel()
    assert ends.left.send_request(PING, b"", future=future) is future
    assert future.cancelled()
    assert open_calls(ends.left) == 0


def test_cancelling_reaches_the_other_peer(ends: Ends) -> None:
    held = ends.there.respond = Held()
    future = ends.left.send_request(PING, b"")
    (server_call,) = held.wait()
    told = threading.Event()
    server_call.when_cancelled(told.set)
    assert not server_call.cancelled
    assert future.cancel()
    assert told.wait(SECONDS)
    assert server_call.cancelled
    at_once = threading.Event()
    server_call.when_cancelled(at_once.set)
    assert at_once.is_set()
    with pytest.raises(CancelledError):
        future.result(0)
    server_call.respond(b"too late")
    ends.there.respond = lambda server_call: server_call.respond(b"the link goes on")
    assert body_of(ends.left.send_request(PING, b"")) == b"the link goes on"


def test_a_callback_that_was_removed_is_not_called(ends: Ends) -> None:
    held = ends.there.respond = Held()
    future = ends.left.send_request(PING, b"")
    (server_call,) = held.wait()
    called: list[str] = []
    told = threading.Event()
    server_call.when_cancelled(lambda: called.append("taken back"))()
    server_call.when_cancelled(told.set)
    future.cancel()
    assert told.wait(SECONDS)
    assert called == []


def test_one_failing_callback_keeps_no_other_from_being_called(
    ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    held = ends.there.respond = Held()
    future = ends.left.send_request(PING, b"")
    (server_call,) = held.wait()
    told = threading.Event()
    server_call.when_cancelled(lambda: 1 / 0)
    server_call.when_cancelled(told.set)
    future.cancel()
    assert told.wait(SECONDS)
    assert "ZeroDivisionError" in caplog.text


def test_cancelling_after_the_response_changes_nothing(ends: Ends) -> None:
    future = ends.left.send_request(PING, b"response")
    assert body_of(future) == b"response"
    assert not future.cancel()
    assert body_of(future) == b"response"


def test_cancelling_twice_is_cancelling_once(ends: Ends) -> None:
    ends.there.respond = Held()
    future = ends.left.send_request(PING, b"")
    assert future.cancel()
    assert future.cancel()


def test_as_completed_notices_cancelled_futures(ends: Ends) -> None:
    ends.there.respond = Held()
    futures = [ends.left.send_request(PING, b"") for _ in range(3)]
    waiting = threading.Thread(target=lambda: [future.cancel() for future in futures])
    waiting.start()
    assert set(as_completed(futures, timeout=SECONDS)) == set(futures)
    waiting.join()


def test_cancelling_during_a_transfer_drops_it_at_both_peers(ends: Ends) -> None:
    future = ends.left.send_request(PING, b"large", [Memory(bytes(256 << 20))])
    assert future.cancel()
    assert body_of(ends.left.send_request(PING, b"small", [Memory(bytes(1 << 20))])) == b"small"
    assert b"large" not in ends.there.received
    assert arrived_bytes(ends.right) == 0


def test_an_unwanted_response_is_not_sent_to_its_end(ends: Ends) -> None:
    held = ends.there.respond = Held()
    future = ends.left.send_request(PING, b"")
    (server_call,) = held.wait()
    server_call.respond(b"", [Memory(bytes(64 << 20))])
    future.cancel()
    ends.there.respond = lambda server_call: server_call.respond(b"next", [Memory(bytes(100_000))])
    assert body_of(ends.left.send_request(PING, b"")) == b"next"
    assert arrived_bytes(ends.left) == 0


# -- deadlines


def test_a_request_fails_at_its_deadline(ends: Ends) -> None:
    held = ends.there.respond = Held()
    future = ends.left.send_request(PING, b"", timeout=0.5)
    with pytest.raises(errors.DeadlineExceeded, match=r"did not respond within 0\.5 s"):
        future.result(SECONDS)
    (server_call,) = held.wait()
    told = threading.Event()
    server_call.when_cancelled(told.set)
    assert told.wait(SECONDS)


def test_a_response_in_time_stops_the_timer(ends: Ends) -> None:
    future = ends.left.send_request(PING, b"in time", timeout=SECONDS)
    assert body_of(future) == b"in time"


# -- ending


def test_closing_fails_the_requests_of_both_peers(ends: Ends) -> None:
    held = ends.there.respond = Held()
    ends.here.respond = Held()
    mine = ends.left.send_request(PING, b"")
    (server_call,) = held.wait()
    theirs = ends.right.send_request(PING, b"")
    ended = threading.Event()
    ends.right.when_ended(lambda link: ended.set())
    ends.calm_down()
    ends.left.close()
    with pytest.raises(errors.LinkClosed, match="was closed"):
        mine.result(SECONDS)
    with pytest.raises(errors.LinkClosed, match="here ended the link"):
        theirs.result(SECONDS)
    assert ended.wait(SECONDS)
    assert server_call.cancelled
    with pytest.raises(errors.LinkClosed):
        ends.left.send_request(PING, b"")
    assert isinstance(ends.left.ended, errors.LinkClosed)
    ends.left.close()


def test_closing_by_the_other_peer_is_noticed(ends: Ends) -> None:
    ended = threading.Event()
    ends.left.when_ended(lambda link: ended.set())
    ends.right.close()
    assert ended.wait(SECONDS)
    assert isinstance(ends.left.ended, errors.LinkClosed)


def test_closing_first_sends_waiting_frames(ends: Ends) -> None:
    for number in range(100):
        ends.left.send_request(PING, str(number).encode())
    ends.calm_down()
    ends.left.close()
    ends.there.wait_for_requests(100)


def test_aborting_fails_with_the_error_given(ends: Ends) -> None:
    held = ends.there.respond = Held()
    future = ends.left.send_request(PING, b"")
    held.wait()
    ends.left.abort(errors.WorkerLost("made up"))
    with pytest.raises(errors.WorkerLost, match="made up"):
        future.result(SECONDS)
    with pytest.raises(errors.WorkerLost, match="made up"):
        ends.left.send_request(PING, b"")


@pytest.mark.parametrize("kind", STEADY)  # the lease is shorter than it takes to connect again
def test_a_peer_that_aborts_is_lost_to_the_other(kind: str) -> None:
    with opened(kind, LinkSettings(lease=0.1, connect_timeout=SECONDS)) as ends:
        ends.here.respond = Held()
        future = ends.right.send_request(PING, b"")
        ends.here.wait_for_requests()
        ends.left.abort(errors.WorkerLost("made up"))
        with pytest.raises(errors.WorkerLost):
            future.result(SECONDS)


def test_callbacks_added_after_the_end_are_called_at_once(ends: Ends) -> None:
    ends.left.close()
    told: list[Link] = []
    ends.left.when_ended(told.append)
    assert told == [ends.left]


# -- attachments

CHUNK = 1 << 16


@pytest.mark.parametrize("size", [0, 1, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 3 * CHUNK - 1, 1_000_003])
def test_an_attachment_arrives_bit_for_bit_both_ways(ends: Ends, size: int) -> None:
    content = np.random.default_rng(size).bytes(size)
    future = ends.left.send_request(PING, b"body", [Memory(content)])
    assert attachments_of(future) == [content]
    assert body_of(future) == b"body"
    assert attachments_of(ends.right.send_request(PING, b"", [Memory(content)])) == [content]


def test_attachments_keep_their_order(ends: Ends) -> None:
    contents = [bytes([number]) * size for number, size in enumerate((5, 0, 300_000, 1, 70_000))]
    future = ends.left.send_request(PING, b"", [Memory(content) for content in contents])
    assert attachments_of(future) == contents


def test_received_attachments_are_writable(ends: Ends) -> None:
    (attachment,) = ends.left.send_request(PING, b"", [Memory(bytes(10))]).result(SECONDS).attachments
    attachment[:] = 7
    assert attachment.tobytes() == bytes([7]) * 10


def test_many_messages_with_attachments_are_in_flight_both_ways(ends: Ends) -> None:
    contents = [np.random.default_rng(seed).bytes(200_000) for seed in range(20)]
    lefts = [ends.left.send_request(PING, b"", [Memory(content)]) for content in contents]
    rights = [ends.right.send_request(PING, b"", [Memory(content)]) for content in contents]
    assert [attachments_of(future) for future in lefts] == [[content] for content in contents]
    assert [attachments_of(future) for future in rights] == [[content] for content in contents]


def test_a_large_transfer_does_not_delay_small_messages(ends: Ends) -> None:
    large = ends.left.send_request(PING, b"large", [Memory(bytes(384 << 20))])
    for _ in range(5):
        assert body_of(ends.left.send_request(PING, b"small")) == b"small"
        assert body_of(ends.right.send_request(PING, b"small")) == b"small"
    assert not large.done()
    assert body_of(ends.left.send_request(PING, b"medium", [Memory(bytes(1 << 20))])) == b"medium"
    assert not large.done()
    assert body_of(large) == b"large"


def test_an_attachment_modified_while_being_sent_is_never_used(ends: Ends) -> None:
    torn, sound = Memory(bytes(1 << 20)), Memory(bytes(1 << 20))
    torn.modify(errors.Unencodable("a tensor was modified in place while being sent"))
    with pytest.raises(errors.Unencodable, match="modified in place"):
        ends.left.send_request(PING, b"torn", [sound, torn, sound]).result(SECONDS)
    assert body_of(ends.left.send_request(PING, b"sound", [sound])) == b"sound"
    assert ends.there.received == [b"sound"]
    assert arrived_bytes(ends.right) == 0


def test_a_response_modified_while_being_sent_becomes_an_error(ends: Ends) -> None:
    torn, sound = Memory(bytes(1 << 20)), Memory(bytes(1 << 20))
    torn.modify(errors.Unencodable("a tensor was modified in place while being sent"))
    ends.there.respond = lambda server_call: server_call.respond(b"", [sound, torn, sound])
    with pytest.raises(errors.Unencodable, match="modified in place"):
        ends.left.send_request(PING, b"").result(SECONDS)
    ends.there.respond = lambda server_call: server_call.respond(b"", [sound])
    assert attachments_of(ends.left.send_request(PING, b"")) == [bytes(1 << 20)]
    assert arrived_bytes(ends.left) == 0


def test_an_attachment_that_cannot_be_read_fails_its_message_alone(
    ends: Ends, caplog: pytest.LogCaptureFixture
) -> None:
    class Unreadable(Memory):
        def check_unmodified(self) -> None:
            raise OSError("the disk is gone")

    with pytest.raises(errors.InternalError, match="the disk is gone"):
        ends.left.send_request(PING, b"", [Unreadable(bytes(1 << 20))]).result(SECONDS)
    assert body_of(ends.left.send_request(PING, b"next")) == b"next"


# -- memory


def test_finished_calls_leave_nothing_behind(ends: Ends) -> None:
    for _ in range(100):
        ends.left.send_request(PING, b"", [Memory(bytes(10))]).result(SECONDS)
    left, right = ends.left, ends.right
    assert open_calls(left) == open_calls(right) == 0
    # Acknowledgements are sent with the next frame; those of responses with attachments do not wait.
    ends.left.send_request(PING, b"").result(SECONDS)
    assert unacknowledged_calls(right) <= 1
    assert arrived_bytes(left) == arrived_bytes(right) == 0


# What a link keeps.


def counted(link: Link, name: str) -> int:
    return link._native.statistics()[name]  # type: ignore[attr-defined,no-any-return]


def open_calls(link: Link) -> int:
    return counted(link, "calls")


def unacknowledged_calls(link: Link) -> int:
    return counted(link, "inbound_calls")


def arrived_bytes(link: Link) -> int:
    """Of messages that are not complete."""
    return counted(link, "arrived_bytes")
