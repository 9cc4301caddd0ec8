"""The outbox of a socket between two processes of one host.

A thread that puts a frame also writes it to the socket, along with frames that other threads put meanwhile:
no handover to a writer thread delays it. A background thread only writes frames that the socket did not
accept at once, and copies large tensors into shared memory.
"""

from __future__ import annotations

import array
import logging
import select
import socket
import threading
from collections import deque
from functools import partial
from queue import Empty, SimpleQueue

from gradwire.transport import frames
from gradwire.transport.outbox import COALESCED_BYTES, OutgoingTransfer, RoundRobin
from gradwire.transport.segments import Segment, SegmentPool

__all__ = ["LocalOutbox"]

log = logging.getLogger("gradwire.link")

_COPIED_BYTES = 4 << 20
"""How many bytes of an attachment are copied at a time. A smaller attachment is copied by the thread that
sends it, since waking the background thread would take longer."""
_CHECK_SECONDS = 1.0
_DONT_WAIT = int(socket.MSG_DONTWAIT)
"""A plain integer: arithmetic with enum members takes longer than a system call."""
_FINISH_SECONDS = 5.0


class LocalOutbox:
    """Replaces `Outbox` on a local socket."""

    def __init__(self, connection: socket.socket, segment_pool: SegmentPool) -> None:
        self._connection = connection
        self.segment_pool = segment_pool
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._frames: deque[tuple[bytes, Segment | None]] = deque()
        """The frames to write, each with the segment that it announces, if any."""
        self._unsent = memoryview(b"")
        """The unwritten rest of the current write, and in `_announced` the segment
        whose descriptor goes with it."""
        self._announced: Segment | None = None
        self._writing = True
        """Whether a thread writes or is about to. Initially True: the thread that
        calls `start` writes first."""
        self._full = False
        """Whether the socket accepted no more, so that the background thread continues writing."""
        self._transfers = RoundRobin()
        self._left_to_flush = self._left_bytes = 0
        """How many small transfers, and how many bytes, the next thread that flushes copies."""
        self._filling: dict[OutgoingTransfer, Segment] = {}
        self._closed = False
        self.written = 0
        """Bytes that were handed to the other peer, those in shared memory included."""
        self._unused: deque[int] = deque()
        """Ids of segments to return to the other peer, with the next write."""
        self._notices: SimpleQueue[None] = SimpleQueue()
        """Wakes the background thread to check for work."""
        self._thread = threading.Thread(target=self._run, name="gradwire-copy", daemon=True)

    def start(self) -> None:
        """Starts writing. Frames that were put before wait until then."""
        self._thread.start()
        self._write()

    def put(self, frame: bytes) -> None:
        """Adds a frame, unless the stream has ended: the session sends what
        matters again over the next streams.

        The frame is written when a thread calls `flush`.
        """
        if not self._closed:
            self._frames.append((frame, None))

    def flush(self) -> None:
        """Writes the frames that were put, unless another thread is about to."""
        if self._left_to_flush:
            self._copy_here()
        if not self._frames:
            return
        is_writer = False
        try:
            with self._lock:
                if self._writing:
                    return  # the thread that writes takes these frames along
                self._writing = is_writer = True
            self._write()
        except BaseException:
            # An interrupt: it is unknown how much was written. The session sends what matters again.
            if is_writer:
                self._break()
            raise

    def flush_elsewhere(self) -> None:
        """Has the background thread flush."""
        self._notices.put(None)

    def put_transfer(self, transfer: OutgoingTransfer) -> None:
        with self._lock:
            if self._closed:
                return
            size = self._left_bytes + len(transfer.source.view)
            is_next = self._left_to_flush or not (self._transfers or self._transfers.is_one_taken)
            self._transfers.put(transfer)
            if is_next and size <= _COPIED_BYTES:
                self._left_to_flush += 1
                self._left_bytes = size
                return
        self._notices.put(None)

    def drop_transfers(self, owner: tuple[bool, int] | None = None) -> None:
        """Drops the unsent attachments of a message, or of all messages."""
        with self._lock:
            self._drop(owner)

    def return_segment(self, id: int, size: int) -> None:
        """Notes that this peer no longer uses a segment. Destructors call it at any
        moment, so it must not lock."""
        self._unused.append(id)
        if size > _COPIED_BYTES:
            # Returned at once: otherwise the other peer would make a new large segment,
            # which costs more than a message.
            self._notices.put(None)

    def close(self, *, discard: bool = False) -> None:
        """Accepts no more frames. `discard`: does not write those that wait, either."""
        with self._lock:
            self._closed = True
            if discard:
                self._discard()
            last = not self._writing
            self._writing = True
        if last:
            self._write()
        self._notices.put(None)

    @property
    def closed(self) -> bool:
        return self._closed

    def finish(self) -> None:
        """Waits until no thread uses the connection any more. Called by the thread
        that read it, after its end."""
        self.close(discard=True)
        self._thread.join(_FINISH_SECONDS)
        with self._idle:
            self._idle.wait_for(lambda: not self._writing, _FINISH_SECONDS)

    # -- writing

    def _write(self) -> None:
        """Writes all frames that wait, or leaves the rest to the background thread.
        The caller has set `_writing`."""
        sent = 0
        while True:
            with self._lock:
                if sent:
                    self.written += sent
                    self._unsent, self._announced = self._unsent[sent:], None
                if not self._unsent and not self._load():
                    self._writing = False
                    if self._closed:
                        self._idle.notify_all()  # only `finish` waits, and it closes first
                        self._shut(socket.SHUT_WR)
                    return
                data, announced = self._unsent, self._announced
            try:
                sent = self._send(data, announced)
            except BlockingIOError:
                self._full = True
                self._notices.put(None)
                return
            except OSError:
                with self._lock:
                    self._closed = True
                    self._discard()
                sent = 0

    def _break(self) -> None:
        with self._lock:
            self._closed = True
            self._discard()
            self._writing = False
            self._idle.notify_all()

    def _send(self, data: memoryview, announced: Segment | None) -> int:
        if announced is None or announced.descriptor is None:
            return self._connection.send(data, _DONT_WAIT)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [announced.descriptor]))
        sent = self._connection.sendmsg([data], [rights], _DONT_WAIT)
        announced.close_descriptor()
        return sent

    def _load(self) -> bool:
        """Takes the next frames to write. Returns False if there are none. The lock is held."""
        if not self._frames:
            return False
        if self._unused:
            self._return_unused()
        frame, self._announced = self._frames.popleft()
        joined, size = [frames.LENGTH.pack(len(frame)), frame], len(frame)
        # A descriptor arrives with the bytes that it was sent with, so a frame that
        # announces one is written alone.
        while self._announced is None and self._frames and self._frames[0][1] is None:
            size += len(self._frames[0][0])
            if size > COALESCED_BYTES:
                break
            frame, _ = self._frames.popleft()
            joined += (frames.LENGTH.pack(len(frame)), frame)
        self._unsent = memoryview(b"".join(joined))
        return True

    def _return_unused(self) -> None:
        """Puts the return of unused segments before all other frames: the other peer may need
        these segments for its response."""
        unused = []
        while self._unused:
            unused.append(self._unused.popleft())
        self._frames.appendleft((frames.returned(unused), None))

    def _discard(self) -> None:
        self._frames.clear()
        self._unsent = memoryview(b"")
        self._drop(None)
        self._shut(socket.SHUT_RDWR)

    def _shut(self, how: int) -> None:
        try:
            self._connection.shutdown(how)
        except OSError:
            pass  # the other peer has closed the socket already

    # -- the background thread

    def _run(self) -> None:
        try:
            while not self._closed or self._writing:
                self._wait_for_work()
                self.flush()
                if self._full:
                    self._wait_until_writable()
                elif self._transfers:
                    self._advance()
                    self.flush()
        except Exception:
            log.exception("copying to shared memory failed")
            self.close(discard=True)
        finally:
            self.segment_pool.close()

    def _wait_for_work(self) -> None:
        """Waits for a notice, unless there is work. After a timeout, does what an
        interrupted thread left undone."""
        try:
            if self._full or (self._transfers and not self._is_copied_elsewhere()):
                self._notices.get_nowait()
            else:
                self._notices.get(timeout=_CHECK_SECONDS)
        except Empty:
            # The thread that was to copy these transfers may have been interrupted.
            self._left_to_flush = self._left_bytes = 0
            idle = self.segment_pool.trim()
            if idle:
                self.put(frames.dropped(idle))
        with self._lock:
            if self._unused and not self._closed:
                self._return_unused()

    def _is_copied_elsewhere(self) -> bool:
        """Whether another thread copies, or is about to. That thread puts a
        notice if there is more to copy."""
        return self._left_to_flush > 0 or self._transfers.is_one_taken

    def _wait_until_writable(self) -> None:
        poll = select.poll()
        poll.register(self._connection, select.POLLOUT)
        # Ending the stream shuts the socket down, which ends the poll.
        if poll.poll(1000):
            self._full = False
            self._write()

    def _copy_here(self) -> None:
        """Copies the small transfers that were left to the thread that flushes."""
        with self._lock:
            count, self._left_to_flush, self._left_bytes = self._left_to_flush, 0, 0
        try:
            for _ in range(count):
                self._advance()
        except BaseException:
            # An interrupt in the middle of a copy. The session sends what matters again over new streams.
            self.close(discard=True)
            raise
        if self._transfers:
            self._notices.put(None)  # more transfers were put meanwhile

    def _advance(self) -> None:
        """Advances one transfer: copies a piece into shared memory or, without a
        segment, puts it into a frame.

        Only one thread at a time advances transfers, since transfers must begin in order.
        """
        with self._lock:
            if not self._transfers or self._transfers.is_one_taken:
                return
            transfer = self._transfers.take()
        segment = self._filling.get(transfer)
        if segment is None and not transfer.offset:
            segment = self.segment_pool.take(len(transfer.source.view))
        if segment is None:
            chunk, done = transfer.next_chunk()
            with self._lock:
                self._transfers.put_back(transfer, done=done)
                if chunk is not None and not transfer.dropped:
                    self.put(chunk)
        else:
            written, done = transfer.take(_COPIED_BYTES, partial(segment.write, transfer.offset))
            with self._lock:
                self._transfers.put_back(transfer, done=done)
                if not done and not transfer.dropped:
                    if transfer not in self._filling:
                        self._filling[transfer] = segment
                        # Announces the transfer: later transfers may be placed before it,
                        # and yet all must begin in order.
                        self.put(frames.placed(transfer.id, 0, len(transfer.source.view)))
                    return
                self._filling.pop(transfer, None)
                if written is None or transfer.dropped:
                    self.segment_pool.give_back([segment.id])
                    return
                if segment.descriptor is not None:
                    self._frames.append((frames.segment(segment.id, segment.size), segment))
                self.put(frames.placed(transfer.id, segment.id, transfer.offset))
                self.written += transfer.offset

    def _drop(self, owner: tuple[bool, int] | None) -> None:
        for transfer in self._transfers.drop(owner):
            segment = self._filling.pop(transfer, None)
            if segment is not None:
                self.segment_pool.give_back([segment.id])
