"""Streams between two processes of one host: frames over a unix socket, large tensors in shared memory."""

from __future__ import annotations

import array
import os
import socket
from collections import deque
from collections.abc import Iterator
from functools import partial

from gradwire.errors import MalformedMessage, ProtocolError
from gradwire.proto.v1 import link_pb2
from gradwire.transport.base import LinkSettings, ResponseFuture
from gradwire.transport.event_loop import EventLoop
from gradwire.transport.frames import LENGTH
from gradwire.transport.local_outbox import LocalOutbox
from gradwire.transport.local_reader import LocalReader
from gradwire.transport.memory_budget import Quota
from gradwire.transport.reassembly import CompleteMessage
from gradwire.transport.segments import MappedSegments, SegmentPool
from gradwire.transport.session import Session
from gradwire.transport.streams import Streams

__all__ = ["LocalStreams"]

_READ_BYTES = 256 * 1024
_MOST_DESCRIPTORS = 64
"""The most descriptors that one read accepts. The kernel drops any beyond this number."""
_HOW_TO_READ, _TRUNCATED = int(socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT), int(socket.MSG_CTRUNC)
"""Plain integers: arithmetic with enum members takes longer than a system call."""


class LocalStreams(Streams):
    """A local socket in place of a pair of gRPC streams."""

    inline_bytes = 128 * 1024

    def __init__(
        self, settings: LinkSettings, quota: Quota, connection: socket.socket, parent: Streams
    ) -> None:
        self._connection = connection
        self._max_frame_bytes = settings.max_frame_bytes
        outbox = LocalOutbox(connection, SegmentPool(settings.max_shared_bytes))
        super().__init__(settings, quota, outbox, outbox, parent=parent)
        self._outbox = outbox
        self._mapped_segments = MappedSegments(settings.max_message_bytes, outbox.return_segment)
        self._descriptors: deque[int] = deque()
        self.has_more = False
        self._frames: Iterator[bytes | None] = self._read_until_end()
        self._local_reader: LocalReader | None = None
        self._event_loop: EventLoop | None = None

    def run(self, session: Session, event_loop: EventLoop | None = None) -> None:
        """Starts writing, and reads until either peer closes. Raises if the peer broke the protocol.

        An `event_loop`, if given, does the reading; otherwise threads that wait for responses do.
        """
        receive = partial(session.receive_or_refuse, streams=self)
        self._outbox.start()
        try:
            if event_loop is not None:
                self._event_loop = event_loop
                event_loop.serve(self, receive)
            else:
                self._local_reader = LocalReader(self, receive)
                self._local_reader.run()
        finally:
            self._release()

    def _release(self) -> None:
        # Breaks reference cycles, which would keep mapped segments until the garbage collector runs.
        self._local_reader, self._event_loop, self._frames = None, None, iter(())
        for descriptor in self._descriptors:
            os.close(descriptor)
        self._descriptors.clear()
        self._outbox.finish()
        self._connection.close()
        self._mapped_segments.drop_all()

    def note_request_sent(self) -> None:
        local_reader = self._local_reader
        if local_reader is not None:
            local_reader.note_request_sent()

    def flush(self) -> None:
        self._outbox.flush()

    def flush_elsewhere(self) -> None:
        """Has the background thread flush."""
        self._outbox.flush_elsewhere()

    def flush_response(self) -> None:
        event_loop = self._event_loop
        if event_loop is None or not event_loop.will_write(self):
            self._outbox.flush()

    def may_run_inline(self) -> bool:
        readers = self._local_reader or self._event_loop
        return not self.has_unhandled_frames and readers is not None and readers.may_run_inline()

    def about_to_block(self) -> None:
        readers = self._local_reader or self._event_loop
        if readers is not None:
            readers.about_to_block()

    def read_for(self, future: ResponseFuture) -> None:
        local_reader = self._local_reader
        if local_reader is not None:
            local_reader.read_for(future)

    def read_in_background(self, future: ResponseFuture) -> None:
        local_reader = self._local_reader
        if local_reader is not None:
            local_reader.read_in_background(future)

    def fileno(self) -> int:
        return self._connection.fileno()

    def __next__(self) -> bytes | None:
        return next(self._frames)

    def take(self, frame: link_pb2.Frame, kind: str | None) -> CompleteMessage | None:
        if kind == "placed":
            placed = frame.placed
            if placed.segment:
                self.received += placed.total
                return self.reassembler.place(
                    placed.transfer, self._mapped_segments.use(placed.segment, placed.total)
                )
            self.reassembler.begin(placed.transfer, placed.total)
        elif kind == "returned":
            self._outbox.segment_pool.give_back(frame.returned.segments)
        elif kind == "segment":
            if not self._descriptors:
                raise ProtocolError("a segment was announced without its descriptor")
            self._mapped_segments.map(frame.segment.id, frame.segment.size, self._descriptors.popleft())
        elif kind == "dropped":
            self._mapped_segments.drop(frame.dropped.segments)
        else:
            return super().take(frame, kind)
        return None

    def _read_until_end(self) -> Iterator[bytes | None]:
        """The received frames, until either peer closes. None if the next frame
        has not arrived completely."""
        try:
            yield from self._read()
        except OSError:
            pass  # the connection was cut

    def _read(self) -> Iterator[bytes | None]:
        space = socket.CMSG_SPACE(_MOST_DESCRIPTORS * array.array("i").itemsize)
        received = bytearray()
        at = 0
        while True:
            # One read may bring many small frames.
            try:
                data, ancillary, flags, _ = self._connection.recvmsg(_READ_BYTES, space, _HOW_TO_READ)
            except BlockingIOError:
                yield None
                continue
            if not data:
                return
            if ancillary or flags & _TRUNCATED:
                self._keep_descriptors(ancillary, flags)
            if not received and len(data) >= 4 and LENGTH.unpack_from(data)[0] == len(data) - 4:
                self.has_more = False
                yield data[4:]
                continue
            received += data
            while len(received) - at >= 4:
                (length,) = LENGTH.unpack_from(received, at)
                if length > self._max_frame_bytes:
                    raise MalformedMessage(f"a frame of {length} bytes is too large")
                end = at + 4 + length
                if len(received) < end:
                    if length > _READ_BYTES:
                        yield from self._read_rest(received, end)
                        continue
                    break
                frame = bytes(memoryview(received)[at + 4 : end])
                at = end
                self.has_more = _is_complete(received, at)
                yield frame
            del received[:at]
            at = 0

    def _read_rest(self, received: bytearray, end: int) -> Iterator[None]:
        """Reads the rest of a large frame, which brings no descriptors."""
        have = len(received)
        received.extend(bytes(end - have))
        with memoryview(received) as view:
            while have < end:
                try:
                    count = self._connection.recv_into(view[have:end], 0, _HOW_TO_READ)
                except BlockingIOError:
                    yield None
                    continue
                if not count:
                    raise ConnectionResetError
                have += count

    def _keep_descriptors(self, ancillary: list[tuple[int, int, bytes]], flags: int) -> None:
        for level, kind, data in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                descriptors = array.array("i")
                descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
                self._descriptors.extend(descriptors)
        if flags & _TRUNCATED:
            raise MalformedMessage("too many descriptors in one read")


def _is_complete(received: bytearray, at: int) -> bool:
    """Whether the frame that begins at `at` has arrived completely."""
    have = len(received) - at
    return have >= 4 and have >= 4 + int(LENGTH.unpack_from(received, at)[0])
