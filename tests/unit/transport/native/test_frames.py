"""The frames that a session writes and reads by hand, beside the code that protoc generates."""

from __future__ import annotations

import random

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from gradwire.proto.v1 import link_pb2
from gradwire.transport import native

from .wiring import FAILED, METHOD, Ends, frames_in, kinds_in, new_session, of_kind, only

SIZES = [0, 1, 126, 127, 128, 16_383, 16_384, 70_000, 600_000]


def check_written(data: bytes) -> list[link_pb2.Frame]:
    """That the generated code would have written the same bytes; returns the frames."""
    envelope = link_pb2.Envelope.FromString(data)
    assert envelope.SerializeToString() == data
    return list(envelope.frames)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("body", SIZES[:-1])
@pytest.mark.parametrize("timeout", [None, 0.25])
def test_requests_and_their_chunks_are_written_as_protobuf_would(
    size: int, body: int, timeout: float | None
) -> None:
    session = new_session()
    session.attach(0.0)
    parts = [bytes(size), b"", b"more"]
    session.call(0.0, METHOD, bytes(body), parts, timeout)
    frames = []
    while session.has_output:
        frames += check_written(session.take_output())
    request = frames[0].request
    assert (request.id, request.method, request.body) == (1, METHOD, bytes(body))
    assert request.timeout_seconds == (timeout or 0.0)
    assert list(request.attachments) == [size, 0, 4]
    assert b"".join(frame.chunk.data for frame in frames[1:]) == b"".join(parts)
    assert all(frame.chunk.message == 1 and not frame.chunk.of_response for frame in frames[1:])


@pytest.mark.parametrize("size", SIZES)
def test_responses_and_their_chunks_are_written_as_protobuf_would(size: int) -> None:
    ends = Ends()
    ends.a.call(0.0, METHOD, b"")
    ends.a.call(0.0, METHOD, b"")
    first, second = ends.requests()
    ends.b.respond(first.id, b"", [bytes(size)])
    ends.b.fail(second.id, FAILED)
    frames = []
    while ends.b.has_output:
        frames += check_written(ends.b.take_output())
    responses = [frame.response for frame in frames if frame.HasField("response")]
    assert [response.WhichOneof("outcome") for response in responses] == ["body", "error"]
    assert responses[1].error.SerializeToString() == FAILED
    chunks = [frame.chunk for frame in frames if frame.HasField("chunk")]
    assert sum(len(chunk.data) for chunk in chunks) == size
    assert all(chunk.of_response and chunk.message == first.id for chunk in chunks)


@pytest.mark.parametrize(("error", "leaving"), [(None, False), (None, True), (FAILED, False), (b"", True)])
def test_goodbyes_are_written_as_protobuf_would(error: bytes | None, leaving: bool) -> None:
    session = new_session()
    session.attach(0.0)
    session.close(error, leaving)
    (frame,) = check_written(session.take_output())
    assert frame.goodbye.HasField("error") == (error is not None)
    assert frame.goodbye.leaving == leaving


def test_cancellations_and_acknowledgements_are_written_as_protobuf_would() -> None:
    ends = Ends()
    handles = [ends.a.call(0.0, METHOD, b"") for _ in range(300)]
    requests = ends.requests()
    for request in requests[:200]:
        ends.b.respond(request.id, b"")
    while ends.b.has_output:
        ends.a.receive(0.0, ends.b.take_output())
    ends.a.withdraw(0.0, handles[299])
    acknowledge, cancel = check_written(ends.a.take_output())
    assert list(acknowledge.acknowledge.ids) == [request.id for request in requests[:200]]
    assert cancel.cancel.id == requests[299].id


# -- reading


def session_with_calls(calls: int = 0) -> native.Link:
    session = new_session()
    session.attach(0.0)
    for _ in range(calls):
        session.call(0.0, METHOD, b"")
    return session


def tag(field: int, wire_type: int) -> bytes:
    return bytes([field << 3 | wire_type])


def varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def field(number: int, content: bytes) -> bytes:
    return tag(number, 2) + varint(len(content)) + content


def envelope(kind: int, message: bytes) -> bytes:
    return field(1, field(kind, message))


def test_fields_may_come_in_any_order_and_numbers_need_not_be_packed() -> None:
    attachments = tag(6, 0) + varint(3) + field(6, varint(1) + varint(0)) + tag(6, 0) + varint(200)
    request = field(3, b"body") + attachments + tag(2, 0) + varint(METHOD) + tag(1, 0) + varint(9)
    chunk = field(3, bytes(range(204))) + tag(1, 0) + varint(9)
    session = session_with_calls()
    session.receive(0.0, envelope(3, request) + envelope(13, chunk))
    event = only(session, native.REQUEST)
    assert (event.id, event.method, event.body) == (9, METHOD, b"body")
    assert b"".join(bytes(part) for part in event.attachments) == bytes(range(204))
    assert [len(part) for part in event.attachments] == [3, 1, 0, 200]


def test_fields_of_later_versions_are_skipped() -> None:
    unknown = (
        tag(15, 0) + varint(1 << 63) + tag(14, 1) + bytes(8) + tag(13, 5) + bytes(4) + field(14, b"later")
    )
    request = unknown + tag(1, 0) + varint(1) + field(3, b"body") + unknown
    session = session_with_calls()
    session.receive(0.0, field(1, unknown.replace(tag(13, 5) + bytes(4), b"") + field(3, request)))
    assert only(session, native.REQUEST).body == b"body"


def test_the_last_value_of_a_field_counts() -> None:
    request = tag(1, 0) + varint(1) + tag(1, 0) + varint(2) + field(3, b"first") + field(3, b"last")
    session = session_with_calls()
    session.receive(0.0, envelope(3, request))
    event = only(session, native.REQUEST)
    assert (event.id, event.body) == (2, b"last")


@pytest.mark.parametrize(
    "data",
    [
        b"\x12\x00",  # no frame of an Envelope
        b"\x0a\x00",  # a frame of no kind
        field(1, field(20, b"")),  # of a kind that does not exist
        field(1, field(3, b"\x08\x01") + field(6, b"\x08\x01")),  # two in one
        envelope(3, b"\x08"),  # ends within a number
        envelope(3, b"\x08" + b"\xff" * 10 + b"\x01"),  # too long a number
        envelope(3, b"\x1a\x05four"),  # a field longer than its message
        envelope(3, b"\x0d\x00\x00\x00\x00"),  # id is no fixed32
        envelope(3, b"\x08\x01\x29\x00"),  # a double of one byte
        envelope(3, b"\x0b\x0c"),  # a group
        envelope(3, b"\x00\x00"),  # a field without a number
        envelope(3, b"\x08\x01" + field(6, b"\xff")),  # packed numbers that end within one
        envelope(4, b"\x08\x01"),  # a response without an outcome
        b"\x0a" + b"\xff" * 11,  # too long a length
    ],
)
def test_malformed_frames_are_refused(data: bytes) -> None:
    session = session_with_calls()
    with pytest.raises(native.ProtocolError):
        session.receive(0.0, data)
    assert not session.take_events()


def busy_stream() -> tuple[bytes, list[bytes]]:
    """What a busy session writes, and the requests in it."""
    ends = Ends()
    ends.b.call(0.0, METHOD, b"")
    ends.exchange()
    ends.a.respond(only(ends.a, native.REQUEST).id, b"answer", [bytes(200)])
    bodies = [b"none", b"small", b"large", b"two", bytes(50_000)]
    ends.a.call(0.0, METHOD, bodies[0])
    ends.a.call(0.0, METHOD, bodies[1], [b"x" * 100])
    ends.a.call(0.0, METHOD, bodies[2], [bytes(range(256)) * 1500])
    ends.a.call(0.0, METHOD, bodies[3], [bytes(70_000), b"", bytes(5)])
    ends.a.call(0.0, METHOD, bodies[4])
    handle = ends.a.call(0.0, METHOD, b"cancelled")
    written = ends.a.take_output()
    ends.a.withdraw(0.0, handle)
    while ends.a.has_output:
        written += ends.a.take_output()
    return written, [*bodies, b"cancelled"]


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_it_does_not_matter_how_the_bytes_of_a_stream_are_cut(seed: int, in_place: bool) -> None:
    written, bodies = busy_stream()
    draw = random.Random(seed)
    session = new_session()
    session.attach(0.0)
    session.call(0.0, METHOD, b"")
    session.take_output()
    at = 0
    while at < len(written):
        size = draw.choice([1, 1, 2, 3, 10, 100, 5000, 100_000])
        session.receive(0.0, written[at : at + size], in_place)
        at += size
    events = session.take_events()
    requests = [event for event in events if event.kind == native.REQUEST]
    assert sorted(event.body for event in requests) == sorted(bodies)
    (large,) = [event for event in requests if event.body == b"large"]
    assert bytes(large.attachments[0]) == bytes(range(256)) * 1500
    assert [event.kind for event in events if event.kind != native.REQUEST] == [
        native.RESPONSE,
        native.CANCELLED,
    ]


def test_every_single_cut_of_a_short_stream() -> None:
    ends = Ends()
    ends.a.call(0.0, METHOD, b"body", [b"some bytes"], 300.0)
    written = ends.a.take_output()
    for cut in range(len(written) + 1):
        session = session_with_calls()
        session.receive(0.0, written[:cut])
        session.receive(0.0, written[cut:])
        event = only(session, native.REQUEST)
        assert (event.body, bytes(event.attachments[0])) == (b"body", b"some bytes")


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_read_as_protobuf_reads_them_or_refused(data: bytes) -> None:
    session = session_with_calls(3)
    session.take_output()
    try:
        session.receive(0.0, data)
    except native.ProtocolError:
        return
    try:
        frames = frames_in(data)
    except DecodeError:
        return  # the stream goes on within a frame
    requests = {
        frame.request.id for frame in frames if frame.HasField("request") and not frame.request.attachments
    }
    assert len(requests) == len(of_kind_request(session))


def of_kind_request(session: native.Link) -> list[native.Event]:
    return [event for event in session.take_events() if event.kind == native.REQUEST]


@pytest.mark.parametrize("seed", range(30))
def test_a_stream_with_errors_in_it_is_refused_or_survived(seed: int) -> None:
    """Bytes changed, left out, repeated. Sanitizers look at the same in `make native-fuzz`."""
    written, _ = busy_stream()
    draw = random.Random(seed)
    for _ in range(50):
        broken = bytearray(written[: draw.choice([200, 2000, len(written)])])
        for _ in range(draw.randint(1, 4)):
            at, size = draw.randrange(len(broken)), draw.randint(1, 8)
            if draw.random() < 0.5:
                broken[at] = draw.choice([0, 1, 0x7F, 0x80, 0xFF, draw.randrange(256)])
            elif draw.random() < 0.5:
                del broken[at : at + size]
            else:
                broken[at:at] = broken[at : at + size]
        session = session_with_calls(2)
        session.take_output()
        try:
            for at in range(0, len(broken), 1000):
                session.receive(0.0, bytes(broken[at : at + 1000]), draw.random() < 0.5)
        except native.ProtocolError:
            session.close()
        for event in session.take_events():
            assert 0 <= event.kind <= native.GOODBYE
        while session.has_output:
            kinds_in(session.take_output())


def test_the_events_of_a_session_can_be_told_apart() -> None:
    ends = Ends()
    ends.a.call(0.0, METHOD, b"")
    ends.exchange()
    (event,) = of_kind(ends.b, native.REQUEST)
    assert repr(event).startswith("gradwire.transport.native.Event(kind=0, id=1, method=1, deadline=None")
