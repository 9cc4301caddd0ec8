"""What a Session makes of its native session: futures, server calls, callbacks."""

from __future__ import annotations

import gc
import socket
import weakref
from collections.abc import Iterator

import pytest
from tests.unit.system.support import eventually

from gradwire import errors
from gradwire.proto.v1 import link_pb2
from gradwire.transport import GrpcStream, LinkSettings, PeerIdentity, ServerCall, Session, SocketCarrier

METHOD = link_pb2.METHOD_FORWARD_WITH_AUTOGRAD


class Memory:
    def __init__(self, content: bytes) -> None:
        self.view = memoryview(content)

    def check_unmodified(self) -> None:
        pass


class Pair:
    """Two sessions. What one writes the other reads when a test says so."""

    def __init__(self) -> None:
        self.calls: list[ServerCall] = []
        self.a = Session(PeerIdentity(1, "a"), PeerIdentity(2, "b"), self.calls.append, LinkSettings())
        self.b = Session(PeerIdentity(2, "b"), PeerIdentity(1, "a"), self.calls.append, LinkSettings())
        self.streams = {session: GrpcStream(session) for session in (self.a, self.b)}
        for session, stream in self.streams.items():
            session.attach(stream)

    def deliver(self, sender: Session) -> None:
        receiver = self.b if sender is self.a else self.a
        while data := sender.take_output(self.streams[sender]):
            self.feed(receiver, data)

    def feed(self, session: Session, data: bytes) -> None:
        """Lets a session read. What it makes of that, a thread of the event loop handles."""
        session.feed(data, self.streams[session])

    def request(self, *attachments: Memory) -> ServerCall:
        self.future = self.a.send_request(METHOD, b"", attachments)
        self.deliver(self.a)
        eventually(lambda: bool(self.calls))
        return self.calls.pop()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    for session, stream in pair.streams.items():
        session.detach(stream)


def envelope(*responses: link_pb2.Response) -> bytes:
    frames = [link_pb2.Frame(response=response) for response in responses]
    return link_pb2.Envelope(frames=frames).SerializeToString()


def test_an_error_that_cannot_be_read_leaves_no_call_without_an_outcome(pair: Pair) -> None:
    first, second = (pair.a.send_request(METHOD, b"") for _ in range(2))
    broken = b"\x22\x03" + b"\x12\x01\xff"  # a response's error, whose message is no UTF-8
    frame = b"\x22" + bytes([2 + len(broken)]) + b"\x08\x01" + b"\x1a" + broken[1:]
    data = b"\x0a" + bytes([len(frame)]) + frame + envelope(link_pb2.Response(id=2, body=b"fine"))
    pair.a.take_output(pair.streams[pair.a])
    pair.feed(pair.a, data)
    with pytest.raises(errors.InternalError):
        first.result(20)
    eventually(second.done)
    eventually(lambda: pair.a.ended is not None)


def test_what_came_before_the_protocol_was_broken_counts(pair: Pair) -> None:
    future = pair.a.send_request(METHOD, b"")
    pair.a.take_output(pair.streams[pair.a])
    pair.feed(pair.a, envelope(link_pb2.Response(id=1, body=b"fine")) + b"\x12\x00")
    assert future.result(20).body == b"fine"
    eventually(lambda: isinstance(pair.a.ended, errors.ProtocolError))


def test_a_call_that_is_given_up_keeps_no_memory(pair: Pair) -> None:
    memory = Memory(bytes(1 << 20))
    alive = weakref.ref(memory)
    pair.request(memory)
    assert pair.future.cancel()
    del memory
    gc.collect()
    assert alive() is None


def test_what_waits_for_a_response_to_be_lost_is_told(pair: Pair) -> None:
    call = pair.request()
    assert call.respond(b"")
    lost: list[str] = []
    call.when_cancelled(lambda: lost.append("lost"))
    pair.b.abort(errors.WorkerLost("gone"))
    assert lost == ["lost"]


def test_what_waits_for_a_response_that_arrived_is_not(pair: Pair) -> None:
    call = pair.request()
    assert call.respond(b"", [Memory(bytes(1 << 20))])
    lost: list[str] = []
    call.when_cancelled(lambda: lost.append("lost"))
    pair.deliver(pair.b)
    assert len(pair.future.result(20).attachments[0]) == 1 << 20
    pair.deliver(pair.a)
    eventually(lambda: not pair.b._inbound)
    pair.b.abort(errors.WorkerLost("gone"))
    assert lost == []


def test_a_deadline_is_kept_though_a_longer_one_was_set_before(pair: Pair) -> None:
    pair.a.send_request(METHOD, b"", timeout=3600.0)
    soon = pair.a.send_request(METHOD, b"", timeout=0.05)
    with pytest.raises(errors.DeadlineExceeded):
        soon.result(20)
    pair.a.close()


def test_what_was_read_is_handled_though_the_socket_is_cut_before() -> None:
    """A client may send its last requests, say goodbye and end, and the worker is slow."""
    calls: list[ServerCall] = []
    a = Session(PeerIdentity(1, "a"), PeerIdentity(2, "b"), calls.append, LinkSettings())
    b = Session(PeerIdentity(2, "b"), PeerIdentity(1, "a"), calls.append, LinkSettings())
    ends = [SocketCarrier(end, lambda *_: None, is_accepted=True) for end in socket.socketpair()]
    a.attach(ends[0])
    b.attach(ends[1])
    try:
        with b._lock:  # so that nothing is handled
            for _ in range(5):
                a.send_request(METHOD, b"")
            eventually(lambda: b._native.statistics()["inbound_calls"] == 5)
            b.detach(ends[1])
        eventually(lambda: len(calls) == 5)
    finally:
        a.detach(ends[0])
