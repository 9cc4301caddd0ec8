"""What waits to be written to a socket between two processes of one host.

Whoever has something to say writes it to the socket itself, and what others say meanwhile along with it: no
thread stands between. Only what the socket does not take at once, and large tensors that have to be copied
into shared memory, are left to a thread of its own.
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
"""How much of an attachment is copied at a turn. What is no larger is copied by the thread that sends it: to
wake another takes longer."""
_CHECK_SECONDS = 1.0
_DONT_WAIT = int(socket.MSG_DONTWAIT)
"""As a plain number: what is computed with the members of an enum takes longer than a system call."""
_FINISH_SECONDS = 5.0


class LocalOutbox:
    """Takes the place of an `Outbox`."""

    def __init__(self, connection: socket.socket, segment_pool: SegmentPool) -> None:
        self._connection = connection
        self.segment_pool = segment_pool
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._frames: deque[tuple[bytes, Segment | None]] = deque()
        """Each with the segment that it announces, if any."""
        self._unsent = memoryview(b"")
        """The rest of what is being written, and the segment whose descriptor goes with it."""
        self._announced: Segment | None = None
        self._writing = True
        """Whether some thread writes, or will: before the start, the one that starts it."""
        self._full = False
        """Whether the socket took no more, so that it is up to the thread of its own."""
        self._transfers = RoundRobin()
        self._left_to_flush = self._left_bytes = 0
        """How many of them, small ones, whoever flushes next copies."""
        self._filling: dict[OutgoingTransfer, Segment] = {}
        self._closed = False
        self.written = 0
        """Bytes that were handed to the other end, those in shared memory included."""
        self._unused: deque[int] = deque()
        """Segments to return, with the next that is written."""
        self._notices: SimpleQueue[None] = SimpleQueue()
        """For the thread of its own, to have a look at what there is to do."""
        self._thread = threading.Thread(target=self._run, name="gradwire-copy", daemon=True)

    def start(self) -> None:
        """Nothing is written before this."""
        self._thread.start()
        self._write()

    def put(self, frame: bytes) -> None:
        """Adds a frame, unless the stream has ended: what matters is sent again over the next.

        It is written when somebody calls `flush`.
        """
        if not self._closed:
            self._frames.append((frame, None))

    def flush(self) -> None:
        """Writes what was put, if nobody is about to."""
        if self._left_to_flush:
            self._copy_here()
        if not self._frames:
            return
        is_writer = False
        try:
            with self._lock:
                if self._writing:
                    return  # whoever writes takes it along
                self._writing = is_writer = True
            self._write()
        except BaseException:
            # The user interrupts, and it cannot be told how much was written. What matters is sent again.
            if is_writer:
                self._break()
            raise

    def flush_elsewhere(self) -> None:
        """Has the thread of its own do so."""
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
        """Forgets what has not been handed over of a message's attachments, or of all."""
        with self._lock:
            self._drop(owner)

    def return_segment(self, id: int, size: int) -> None:
        """Nothing here uses it any more. Called by destructors, at any moment: only leaves a note."""
        self._unused.append(id)
        if size > _COPIED_BYTES:
            # For want of it the other end would make a new one, which takes longer than a message.
            self._notices.put(None)

    def close(self, *, discard: bool = False) -> None:
        """No more will be put. `discard`: nor will what waits be written."""
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
        """Waits until no thread uses the connection any more. For the one who reads it, when that is over."""
        self.close(discard=True)
        self._thread.join(_FINISH_SECONDS)
        with self._idle:
            self._idle.wait_for(lambda: not self._writing, _FINISH_SECONDS)

    # -- writing

    def _write(self) -> None:
        """For the one who has set `_writing`: writes all that waits, or leaves it to the own thread."""
        sent = 0
        while True:
            with self._lock:
                if sent:
                    self.written += sent
                    self._unsent, self._announced = self._unsent[sent:], None
                if not self._unsent and not self._load():
                    self._writing = False
                    if self._closed:
                        self._idle.notify_all()  # nobody waits for it before
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
        """Takes what is to be written next. False if there is nothing. With the lock held."""
        if not self._frames:
            return False
        if self._unused:
            self._return_unused()
        frame, self._announced = self._frames.popleft()
        joined, size = [frames.LENGTH.pack(len(frame)), frame], len(frame)
        # A descriptor arrives with the bytes that it was sent with, so what announces one goes alone.
        while self._announced is None and self._frames and self._frames[0][1] is None:
            size += len(self._frames[0][0])
            if size > COALESCED_BYTES:
                break
            frame, _ = self._frames.popleft()
            joined += (frames.LENGTH.pack(len(frame)), frame)
        self._unsent = memoryview(b"".join(joined))
        return True

    def _return_unused(self) -> None:
        """Ahead of all else: what is asked for may be answered in the very same segments."""
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
            pass  # the other end was faster

    # -- the thread of its own

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
        """Waits for a notice, unless there is work. If there is none, sees to what nobody has done."""
        try:
            if self._full or (self._transfers and not self._is_copied_elsewhere()):
                self._notices.get_nowait()
            else:
                self._notices.get(timeout=_CHECK_SECONDS)
        except Empty:
            # Should whoever was to copy them have been interrupted.
            self._left_to_flush = self._left_bytes = 0
            idle = self.segment_pool.trim()
            if idle:
                self.put(frames.dropped(idle))
        with self._lock:
            if self._unused and not self._closed:
                self._return_unused()

    def _is_copied_elsewhere(self) -> bool:
        """Whether another thread copies, or is about to. It tells if there is more."""
        return self._left_to_flush > 0 or self._transfers.is_one_taken

    def _wait_until_writable(self) -> None:
        poll = select.poll()
        poll.register(self._connection, select.POLLOUT)
        # Whoever ends the stream shuts the socket down, which ends the wait.
        if poll.poll(1000):
            self._full = False
            self._write()

    def _copy_here(self) -> None:
        """Copies what is left to the thread that flushes."""
        with self._lock:
            count, self._left_to_flush, self._left_bytes = self._left_to_flush, 0, 0
        try:
            for _ in range(count):
                self._advance()
        except BaseException:
            # The user interrupts amid a copy. What matters is sent again over new streams.
            self.close(discard=True)
            raise
        if self._transfers:
            self._notices.put(None)  # more came meanwhile

    def _advance(self) -> None:
        """One turn of one transfer: a piece is copied into shared memory or, without, put into a frame.

        One thread at a time: they begin in order.
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
                        # Others may be there before it, and yet all begin in order.
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
