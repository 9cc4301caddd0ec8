"""Sessions whose frames the test delivers itself, so that every order of events can be tested."""

from __future__ import annotations

import time
from typing import Any

import pytest
from google.protobuf.message import Message
from tests.conformance.ends import Memory, Peer

from gradwire import errors
from gradwire.proto.v1 import link_pb2
from gradwire.system.timers import call_later
from gradwire.transport import (
    LinkSettings,
    ResponseFuture,
    ServerCall,
    Session,
    StreamPair,
    Streams,
    frames,
    session,
)
from gradwire.transport.outbox import Outbox

PING = link_pb2.METHOD_PING
SETTINGS = LinkSettings(chunk_bytes=10)


class Pair:
    """Two sessions; frames are delivered only when the test says so."""

    def __init__(self) -> None:
        self.here, self.there = Peer("here"), Peer("there")
        self.left = Session(self.here.identity, self.there.identity, self.here.handle, SETTINGS)
        self.right = Session(self.there.identity, self.here.identity, self.there.handle, SETTINGS)
        self.reconnect()

    def reconnect(self) -> None:
        self.left_streams, self.right_streams = (
            StreamPair(SETTINGS, self.left.quota),
            StreamPair(SETTINGS, self.right.quota),
        )
        self.left.attach(self.left_streams)
        self.right.attach(self.right_streams)

    def control_to_right(self, limit: int = 1000) -> int:
        return deliver(self.left_streams.control, self.right, self.right_streams, limit)

    def bulk_to_right(self, limit: int = 1000) -> int:
        return deliver(self.left_streams.bulk, self.right, self.right_streams, limit)

    def control_to_left(self, limit: int = 1000) -> int:
        return deliver(self.right_streams.control, self.left, self.left_streams, limit)

    def bulk_to_left(self, limit: int = 1000) -> int:
        return deliver(self.right_streams.bulk, self.left, self.left_streams, limit)

    def run(self) -> None:
        while sum(
            (self.control_to_right(), self.bulk_to_right(), self.control_to_left(), self.bulk_to_left())
        ):
            pass


def deliver(outbox: Outbox, there: Session, received: Streams, limit: int) -> int:
    count = 0
    while count < limit and (outbox._frames or outbox._transfers):
        there.receive(next(outbox), received)
        count += 1
    return count


@pytest.fixture
def pair() -> Pair:
    return Pair()


def test_a_request_sent_again_runs_once_even_if_the_response_overtakes_its_attachments(
    pair: Pair,
) -> None:
    future = pair.left.send_request(PING, b"once", [Memory(bytes(100))])
    pair.control_to_right()
    pair.bulk_to_right()
    assert pair.there.received == [b"once"]
    pair.reconnect()  # the response was lost; request and response are sent again
    pair.control_to_right()
    pair.control_to_left()
    pair.bulk_to_left()
    assert future.done()
    pair.control_to_right()  # the acknowledgement: the right peer forgets the request ...
    assert pair.right._inbound_calls == {}
    pair.bulk_to_right()  # ... and only then the request's attachments arrive again
    pair.run()
    assert pair.there.received == [b"once"]
    assert pair.right_streams.reassembler.held == 0


def test_frames_from_replaced_streams_are_ignored(pair: Pair) -> None:
    future = pair.left.send_request(PING, b"request")
    late = next(pair.left_streams.control)
    stale = pair.right_streams
    pair.reconnect()
    pair.right.receive(late, stale)
    assert pair.there.received == []
    pair.run()
    assert pair.there.received == [b"request"]
    assert future.result(0).body == b"request"


def test_a_response_on_replaced_streams_is_ignored_and_sent_again(pair: Pair) -> None:
    future = pair.left.send_request(PING, b"request", [Memory(bytes(30))])
    pair.control_to_right()
    pair.bulk_to_right()
    response, stale = next(pair.right_streams.control), pair.left_streams
    pair.reconnect()
    pair.left.receive(response, stale)
    assert not future.done()
    pair.run()
    assert future.result(0).attachments[0].tobytes() == bytes(30)
    pair.left.send_request(PING, b"")
    pair.run()
    assert set(pair.right._inbound_calls) <= {2}


def test_an_acknowledgement_that_was_lost_is_sent_again(pair: Pair) -> None:
    future = pair.left.send_request(PING, b"q", [Memory(bytes(30))])
    pair.control_to_right()
    pair.bulk_to_right()
    pair.control_to_left()
    pair.bulk_to_left()
    assert future.done()
    pair.reconnect()
    assert len(pair.right._inbound_calls) == 1
    pair.run()
    assert pair.right._inbound_calls == {}
    assert pair.left_streams.reassembler.held == 0


def test_a_cancellation_that_overtakes_its_request_keeps_it_from_running(pair: Pair) -> None:
    future = pair.left.send_request(PING, b"unwanted", [Memory(bytes(100))])
    pair.bulk_to_right(3)
    future.cancel()
    pair.bulk_to_right()
    pair.control_to_right()
    pair.run()
    assert pair.there.received == []
    assert pair.right_streams.reassembler.held == 0
    assert pair.right_streams.reassembler._cancelled == set()


def test_a_cancellation_before_the_first_chunk_leaves_nothing_behind(pair: Pair) -> None:
    future = pair.left.send_request(PING, b"unwanted", [Memory(bytes(100)), Memory(bytes(100))])
    pair.control_to_right()
    future.cancel()
    pair.run()
    follow_up = pair.left.send_request(PING, b"next", [Memory(bytes(50))])
    pair.run()
    assert follow_up.done()
    assert pair.there.received == [b"next"]
    assert pair.right_streams.reassembler._unwanted == set()


def test_an_unwanted_response_is_dropped_with_its_chunks(pair: Pair) -> None:
    server_calls: list[ServerCall] = []
    pair.there.respond = server_calls.append
    future = pair.left.send_request(PING, b"")
    pair.control_to_right()
    server_calls[0].respond(b"", [Memory(bytes(100))])
    pair.bulk_to_left(2)
    future.cancel()
    pair.control_to_left()
    pair.run()
    assert pair.left_streams.reassembler.held == 0
    assert pair.right._inbound_calls == {}
    assert not pair.right_streams.bulk._transfers


def test_requests_during_a_cut_are_sent_over_the_next_streams(pair: Pair) -> None:
    pair.left.detach(pair.left_streams)
    future = pair.left.send_request(PING, b"patience")
    withdrawn = pair.left.send_request(PING, b"withdrawn")
    withdrawn.cancel()
    pair.reconnect()
    pair.run()
    assert future.result(0).body == b"patience"
    assert pair.there.received == [b"patience"]


def test_a_cancellation_that_was_lost_in_a_cut_is_sent_again(pair: Pair) -> None:
    server_calls: list[ServerCall] = []
    pair.there.respond = server_calls.append
    future = pair.left.send_request(PING, b"")
    pair.control_to_right()
    future.cancel()
    pair.reconnect()
    pair.run()
    assert server_calls[0].cancelled


def test_cancellations_during_a_cut_are_sent_over_the_next_streams(pair: Pair) -> None:
    server_calls: list[ServerCall] = []
    pair.there.respond = server_calls.append
    future = pair.left.send_request(PING, b"", [Memory(bytes(30))])
    pair.run()
    pair.left.detach(pair.left_streams)
    future.cancel()
    pair.reconnect()
    pair.run()
    assert server_calls[0].cancelled
    server_calls[0].respond(b"")
    pair.run()
    assert pair.left._withdrawn == {}


def test_a_cancelled_request_is_remembered_until_its_response(pair: Pair) -> None:
    server_calls: list[ServerCall] = []
    pair.there.respond = server_calls.append
    pair.left.send_request(PING, b"").cancel()
    pair.run()
    assert list(pair.left._withdrawn) == [1]
    server_calls[0].respond(b"")
    pair.run()
    assert pair.left._withdrawn == {}


def test_the_memory_of_withdrawn_requests_is_bounded(pair: Pair) -> None:
    for _ in range(1500):
        pair.left.send_request(PING, b"", [Memory(bytes(30))]).cancel()
    assert list(pair.left._withdrawn) == list(range(501, 1501))


def test_an_acknowledgement_without_a_response_is_ignored(pair: Pair) -> None:
    server_calls: list[ServerCall] = []
    pair.there.respond = server_calls.append
    future = pair.left.send_request(PING, b"")
    pair.control_to_right()
    pair.right.receive(
        frames.envelope(link_pb2.Frame(acknowledge=link_pb2.Acknowledge(ids=[1]))), pair.right_streams
    )
    server_calls[0].respond(b"response")
    pair.run()
    assert future.result(0).body == b"response"


def test_a_response_after_the_deadline_is_discarded(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the deadline's timer is later still."""
    monkeypatch.setattr(session, "call_later", lambda _, callback: call_later(3600.0, callback))
    on_discarded: list[object] = []
    future = ResponseFuture()
    future.on_discarded = on_discarded.append
    pair.left.send_request(PING, b"", timeout=0.001, future=future)
    time.sleep(0.002)
    pair.run()
    with pytest.raises(errors.DeadlineExceeded, match="did not respond within"):
        future.result(0)
    assert len(on_discarded) == 1


def test_acknowledgements_do_not_pile_up(pair: Pair) -> None:
    for _ in range(100):
        pair.left.send_request(PING, b"")
        pair.run()
        assert len(pair.right._inbound_calls) <= 32
        assert len(pair.left._to_acknowledge) <= 32


def test_a_large_response_is_acknowledged_at_once(pair: Pair) -> None:
    pair.left.send_request(PING, bytes(100_000))
    pair.run()
    assert pair.right._inbound_calls == {}


def test_responses_count_as_delivered_when_they_are_acknowledged(pair: Pair) -> None:
    pair.left.send_request(PING, b"", [Memory(bytes(100))])
    pair.control_to_right()
    pair.bulk_to_right()
    assert not pair.right.wait_until_delivered(0.01)
    pair.run()
    assert pair.right.wait_until_delivered(0.01)


def test_a_frame_over_the_limit_is_refused() -> None:
    settings = LinkSettings(max_body_bytes=1000)
    peer = Peer("here")
    session = Session(peer.identity, peer.identity, peer.handle, settings)
    streams = StreamPair(settings, session.quota)
    session.attach(streams)
    with pytest.raises(errors.ResourceExhausted, match="exceeds the limit of 1000 bytes"):
        session.receive(bytes(3 << 20), streams)


@pytest.mark.parametrize(
    "frame",
    [
        link_pb2.Frame(hello=link_pb2.Hello()),
        link_pb2.Frame(welcome=link_pb2.Welcome()),
        link_pb2.Frame(),
    ],
)
def test_frames_out_of_place_break_the_protocol(pair: Pair, frame: link_pb2.Frame) -> None:
    with pytest.raises(errors.ProtocolError, match="an unexpected frame"):
        pair.right.receive(frames.envelope(frame), pair.right_streams)


def test_bytes_that_are_no_frame_break_the_protocol(pair: Pair) -> None:
    with pytest.raises(errors.MalformedMessage, match="no gradwire Envelope"):
        pair.right.receive(b"\xff\xff\xff", pair.right_streams)


def test_a_request_that_comes_twice_over_the_same_streams_breaks_the_protocol(pair: Pair) -> None:
    pair.left.send_request(PING, b"once")
    data = next(pair.left_streams.control)
    pair.right.receive(data, pair.right_streams)
    with pytest.raises(errors.MalformedMessage, match="request 1 arrived after request 1"):
        pair.right.receive(data, pair.right_streams)
    assert pair.there.received == [b"once"]


class Watched:
    """A message that counts how often its body, or that of a message in it, is read."""

    def __init__(self, message: Any, copies: list[int]) -> None:
        self._message = message
        self._copies = copies

    @property
    def __class__(self) -> type:
        return type(self._message)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._message, name)
        if name == "body":
            self._copies.append(len(value))
        return Watched(value, self._copies) if isinstance(value, Message) else value


@pytest.mark.parametrize("attached", [False, True])
def test_a_body_is_copied_out_of_its_message_once(
    pair: Pair, attached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """protobuf copies the body each time that it is read, even for its length."""
    copies: list[int] = []
    parse = frames.parse
    monkeypatch.setattr(frames, "parse", lambda data: [Watched(frame, copies) for frame in parse(data)])
    attachments = [Memory(b"x" * 25)] if attached else []
    body = b"q" * (100 << 10)
    future = pair.left.send_request(PING, body, attachments)
    pair.run()  # the response has the same body
    assert pair.there.received == [body]
    assert future.result(0).body == body
    assert copies == [len(body), len(body)]
