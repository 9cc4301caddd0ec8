"""Large attachments over a unix socket: what a session writes there, and what it accepts.

The other end of the socket is the test itself, which reads and writes frames with the generated code.
"""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import socket
import time
from collections.abc import Iterator

import pytest
from tests.unit.transport.native.wiring import METHOD, new_session

from gradwire.proto.v1 import link_pb2
from gradwire.transport import native

SECONDS = 20.0
LARGE = 300_000
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


class OtherEnd:
    """A session on a unix socket, and the socket's other end."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(SECONDS)
        theirs.setblocking(False)
        self.socket = ours
        self.session = new_session()
        self.session.connect(theirs.detach(), False, self, 1 << 30)
        self.descriptors: list[int] = []
        self._frames: list[link_pb2.Frame] = []
        self._partial = b""

    def close(self) -> None:
        self.session.end()
        self.session.disconnect()
        self.session.take_events()
        self.socket.close()
        for descriptor in self.descriptors:
            os.close(descriptor)

    def call(self, *attachments: bytes) -> int:
        return self.session.call(0.0, METHOD, b"body", attachments, None, False, False)

    def frame(self) -> link_pb2.Frame:
        """The next frame that the session writes."""
        while not self._frames:
            self.session.flush()
            data, descriptors, _, _ = socket.recv_fds(self.socket, 1 << 20, 10)
            assert data, "the session closed the socket"
            self.descriptors += descriptors
            self._partial += data
            try:
                self._frames += link_pb2.Envelope.FromString(self._partial).frames
                # Byte for byte as the generated code writes them.
                again = b"".join(
                    link_pb2.Envelope(frames=[frame]).SerializeToString() for frame in self._frames
                )
                assert again == self._partial
                self._partial = b""
            except ValueError:
                pass  # it ends within a frame
        return self._frames.pop(0)

    def send(self, *frames: link_pb2.Frame, descriptors: list[int] | None = None) -> None:
        data = link_pb2.Envelope(frames=frames).SerializeToString()
        socket.send_fds(self.socket, [data], descriptors or [])

    def events(self, *kinds: int) -> list[native.Event]:
        """Waits until something of one of these kinds has happened; returns what has happened by then."""
        seen: list[native.Event] = []
        give_up_at = time.monotonic() + SECONDS
        handle = self.session.call(0.0, METHOD, b"waits", [], None, False, False)
        while not any(event.kind in kinds for event in seen):
            assert time.monotonic() < give_up_at, seen
            self.session.wait(handle, 0.05)
            seen += self.session.take_events()
        self.session.withdraw(0.0, handle)
        return seen

    def broken(self) -> str:
        (event,) = [event for event in self.events(native.BROKEN) if event.kind == native.BROKEN]
        return event.body.decode()

    def segment(self, id: int, size: int, content: bytes = b"", seals: int = SEALS) -> None:
        """Announces a segment of this end."""
        descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, size)
        os.pwrite(descriptor, content, 0)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        self.send(link_pb2.Frame(segment=link_pb2.Segment(id=id, size=size)), descriptors=[descriptor])
        os.close(descriptor)


@pytest.fixture
def end() -> Iterator[OtherEnd]:
    end = OtherEnd()
    yield end
    end.close()


def request(*sizes: int, id: int = 1) -> link_pb2.Frame:
    return link_pb2.Frame(request=link_pb2.Request(id=id, method=METHOD, body=b"r", attachments=sizes))


def placed(segment: int, size: int, message: int = 1, *, of_response: bool = False) -> link_pb2.Frame:
    return link_pb2.Frame(
        placed=link_pb2.Placed(message=message, of_response=of_response, segment=segment, size=size)
    )


def test_a_large_attachment_lies_in_a_segment_of_which_the_descriptor_comes_once(end: OtherEnd) -> None:
    contents = [bytes([number]) * LARGE for number in (1, 2)]
    handle = end.call(contents[0])
    assert end.frame().request.attachments == [LARGE]
    segment, place = end.frame().segment, end.frame().placed
    assert (place.message, place.of_response, place.segment, place.size) == (1, False, segment.id, LARGE)
    (descriptor,) = end.descriptors
    assert os.fstat(descriptor).st_size == segment.size >= LARGE
    assert fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS == SEALS
    with mmap.mmap(descriptor, segment.size) as memory:
        assert memory[:LARGE] == contents[0]
        # Returned, it is used again, and not announced again.
        end.send(link_pb2.Frame(returned=link_pb2.Returned(segments=[segment.id])))
        end.send(link_pb2.Frame(response=link_pb2.Response(id=1, body=b"done")))
        assert [event.id for event in end.events(native.RESPONSE)] == [handle]
        end.call(contents[1])
        kinds = []
        while not kinds or kinds[-1] != "placed":
            frame = end.frame()
            kinds.append(frame.WhichOneof("kind"))
        assert "segment" not in kinds
        assert frame.placed.segment == segment.id
        assert memory[:LARGE] == contents[1]
    assert len(end.descriptors) == 1


def test_a_segment_that_was_not_returned_is_not_used_for_something_else(end: OtherEnd) -> None:
    end.call(bytes(LARGE))
    end.call(bytes(LARGE))
    segments = set()
    while len(segments) < 2:
        frame = end.frame()
        if frame.WhichOneof("kind") == "placed":
            assert frame.placed.segment not in segments
            segments.add(frame.placed.segment)


def test_an_attachment_is_used_in_place_and_returned_when_it_is_gone(end: OtherEnd) -> None:
    content = bytes(range(256)) * 40_000  # beyond 4 MB: returned without waiting for other output
    end.segment(7, 16 << 20, content)
    end.send(request(len(content)), placed(7, len(content)))
    (event,) = [event for event in end.events(native.REQUEST) if event.kind == native.REQUEST]
    (block,) = event.attachments
    view = memoryview(block)[5:]
    assert view[:-5] == content[5:-5]
    del event, block
    gc.collect()
    assert view[0] == 5  # still there
    del view
    frames = iter(end.frame, None)
    assert next(frame.returned.segments for frame in frames if frame.WhichOneof("kind") == "returned") == [7]
    # It may be filled again now.
    end.segment(8, 1 << 20)
    end.send(request(100, id=2), placed(7, 100, 2))
    assert [event.id for event in end.events(native.REQUEST) if event.kind == native.REQUEST] == [2]


def test_an_attachment_of_a_request_that_nobody_waits_for_is_returned(end: OtherEnd) -> None:
    end.segment(1, 8 << 20)
    end.send(link_pb2.Frame(cancel=link_pb2.Cancel(id=1)), request(5 << 20), placed(1, 5 << 20))
    end.send(request(id=2))
    assert [event.id for event in end.events(native.REQUEST)] == [2]
    frames = iter(end.frame, None)
    assert next(frame.returned.segments for frame in frames if frame.WhichOneof("kind") == "returned") == [1]


@pytest.mark.parametrize(
    ("frames", "complaint"),
    [
        ([link_pb2.Frame(segment=link_pb2.Segment(id=1, size=4096))], "without its descriptor"),
        ([request(100), placed(9, 100)], "does not fit in segment 9"),
        ([link_pb2.Frame(returned=link_pb2.Returned(segments=[5]))], "was returned, but is not in use"),
        ([link_pb2.Frame(freed=link_pb2.Freed(segments=[5]))], "was freed, but is in use, or not known"),
    ],
)
def test_frames_about_segments_that_do_not_exist_break_the_link(
    end: OtherEnd, frames: list[link_pb2.Frame], complaint: str
) -> None:
    end.send(*frames)
    assert complaint in end.broken()


@pytest.mark.parametrize(
    ("frames", "complaint"),
    [
        ([request(100), placed(1, 5000)], "does not fit in segment 1"),
        ([request(100), placed(1, 0)], "does not fit in segment 1"),
        ([request(100), placed(1, 99)], "another size than the message announced"),
        ([request(100, 100), placed(1, 100), placed(1, 100)], "filled while it was in use"),
        ([request(100), placed(1, 100), link_pb2.Frame(freed=link_pb2.Freed(segments=[1]))], "in use"),
        (
            [
                request(5000),
                link_pb2.Frame(chunk=link_pb2.Chunk(message=1, data=bytes(10))),
                placed(1, 100),
            ],
            "begins before the one before it is complete",
        ),
    ],
)
def test_segments_that_are_not_what_the_message_says_break_the_link(
    end: OtherEnd, frames: list[link_pb2.Frame], complaint: str
) -> None:
    end.segment(1, 4096)
    end.send(*frames)
    assert complaint in end.broken()


@pytest.mark.parametrize(
    ("size", "said", "seals"),
    [
        (4096, 4096, 0),
        (4096, 4096, fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL),
        (4096, 8192, SEALS),
        (0, 0, SEALS),
    ],
)
def test_memory_that_could_shrink_or_is_not_as_large_breaks_the_link(
    end: OtherEnd, size: int, said: int, seals: int
) -> None:
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, size)
    if seals:
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    end.send(link_pb2.Frame(segment=link_pb2.Segment(id=1, size=said)), descriptors=[descriptor])
    os.close(descriptor)
    assert f"segment 1 is not {said} bytes of sealed memory" in end.broken()


def test_a_descriptor_that_is_no_memory_breaks_the_link(end: OtherEnd) -> None:
    reading, writing = os.pipe()
    end.send(link_pb2.Frame(segment=link_pb2.Segment(id=1, size=4096)), descriptors=[reading])
    os.close(reading)
    os.close(writing)
    assert "sealed memory" in end.broken()


@pytest.mark.parametrize("count", [3, 50, 200])
def test_descriptors_that_nobody_announces_are_closed(count: int) -> None:
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    end = OtherEnd()
    end.send(link_pb2.Frame(cancel=link_pb2.Cancel(id=1)), descriptors=[0] * count)
    if count == 3:
        end.send(request(id=2))
        end.events(native.REQUEST)
    else:
        assert "descriptors" in end.broken()
    end.close()
    del end
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) <= before
