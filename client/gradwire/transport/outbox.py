"""The frames that wait to be written to a stream: small ones go first and together, transfers alternate."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from gradwire.errors import GradwireError, InternalError
from gradwire.transport import frames
from gradwire.transport.base import Sendable

__all__ = ["COALESCED_BYTES", "Outbox", "Outgoing", "OutgoingTransfer", "RoundRobin"]

log = logging.getLogger("gradwire.link")

T = TypeVar("T")

COALESCED_BYTES = 256 * 1024
"""Small frames are joined into one write of up to this many bytes."""


class OutgoingTransfer:
    """An attachment that is being sent, piece by piece."""

    __slots__ = ("chunk_bytes", "dropped", "id", "offset", "on_failed", "owner", "source")

    def __init__(
        self,
        id: int,
        source: Sendable,
        owner: tuple[bool, int],
        chunk_bytes: int,
        on_failed: Callable[[OutgoingTransfer, GradwireError], None],
    ) -> None:
        self.id = id
        self.source = source
        self.owner = owner
        """The message that the attachment belongs to: (whether it is a response, the request's id)."""
        self.chunk_bytes = chunk_bytes
        self.on_failed = on_failed
        self.dropped = False
        """Whether the rest of the attachment is no longer wanted."""
        self.offset = 0

    def next_chunk(self) -> tuple[bytes | None, bool]:
        """The next chunk, and whether it is the last. None instead of a chunk if
        the attachment cannot be sent."""
        return self.take(
            self.chunk_bytes,
            lambda piece: frames.chunk(self.id, self.offset, len(self.source.view), piece),
        )

    def take(self, at_most: int, use: Callable[[memoryview], T]) -> tuple[T | None, bool]:
        """What `use` returns for the next piece, and whether it is the last. None if
        the attachment cannot be sent."""
        try:
            view = self.source.view
            piece = view[self.offset : self.offset + at_most]
            made = use(piece)
            self.offset += len(piece)
            done = self.offset >= len(view)
            if done:
                # A modified attachment must never be completed. The receiver waits for the last piece, so
                # withholding that piece keeps torn data from being used.
                self.source.check_unmodified()
            return made, done
        except GradwireError as error:
            self.on_failed(self, error)
        except Exception as error:
            # An exception here would end the stream, and also the next one, which
            # would send the same attachment.
            log.exception("an attachment could not be read")
            self.on_failed(self, InternalError(f"an attachment could not be read: {error!r}"))
        return None, True


class RoundRobin:
    """Transfers that alternate: they begin in the order in which they were put.

    The lock of the owning outbox guards it.
    """

    def __init__(self) -> None:
        self._waiting: deque[OutgoingTransfer] = deque()
        self._taken: OutgoingTransfer | None = None

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def is_one_taken(self) -> bool:
        return self._taken is not None

    def put(self, transfer: OutgoingTransfer) -> None:
        self._waiting.append(transfer)

    def take(self) -> OutgoingTransfer:
        """The transfer to advance next. `put_back` must follow."""
        self._taken = self._waiting.popleft()
        return self._taken

    def put_back(self, transfer: OutgoingTransfer, *, done: bool) -> None:
        self._taken = None
        if not done and not transfer.dropped:
            self._waiting.append(transfer)

    def drop(self, owner: tuple[bool, int] | None) -> list[OutgoingTransfer]:
        """Removes the transfers of a message, or all. Returns those that were waiting."""
        dropped = [transfer for transfer in self._waiting if owner in (None, transfer.owner)]
        if dropped:
            self._waiting = deque(transfer for transfer in self._waiting if transfer not in dropped)
        if self._taken is not None and owner in (None, self._taken.owner):
            self._taken.dropped = True
        return dropped


class Outgoing(Protocol):
    """The outbox interface that a session writes to."""

    @property
    def written(self) -> int: ...

    @property
    def closed(self) -> bool: ...

    def put(self, frame: bytes) -> None: ...

    def put_transfer(self, transfer: OutgoingTransfer) -> None: ...

    def drop_transfers(self, owner: tuple[bool, int] | None = None) -> None: ...

    def close(self, *, discard: bool = False) -> None: ...


class Outbox:
    """An iterator over the writes to one stream. Ends when the outbox is closed and empty.

    Transfers begin in the order in which they were put, and alternate from then on.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._frames: deque[bytes] = deque()
        self._transfers = RoundRobin()
        self._closed = False
        self.written = 0
        """Bytes that were handed to the stream."""

    def put(self, frame: bytes) -> None:
        """Adds a frame, unless the stream has ended: the session sends what matters
        again over the next streams."""
        with self._changed:
            if not self._closed:
                self._frames.append(frame)
                self._changed.notify()

    def put_transfer(self, transfer: OutgoingTransfer) -> None:
        with self._changed:
            if not self._closed:
                self._transfers.put(transfer)
                self._changed.notify()

    def drop_transfers(self, owner: tuple[bool, int] | None = None) -> None:
        """Drops the unwritten attachments of a message, or of all messages."""
        with self._changed:
            self._transfers.drop(owner)

    def close(self, *, discard: bool = False) -> None:
        """Accepts no more frames. `discard`: does not write those that wait, either."""
        with self._changed:
            self._closed = True
            if discard:
                self._frames.clear()
                self.drop_transfers()
            self._changed.notify_all()

    @property
    def closed(self) -> bool:
        return self._closed

    def __iter__(self) -> Iterator[bytes]:
        return self

    def __next__(self) -> bytes:
        data = self._next()
        self.written += len(data)  # only one thread writes a stream
        return data

    def _next(self) -> bytes:
        while True:
            with self._changed:
                # Woken by put and close; ending a stream always closes its outbox.
                while not (self._frames or self._transfers or self._closed):
                    self._changed.wait()
                if self._frames:
                    return self._coalesced()
                if not self._transfers:
                    raise StopIteration
                transfer = self._transfers.take()
            data, done = transfer.next_chunk()
            with self._changed:
                self._transfers.put_back(transfer, done=done)
            if data is not None and not transfer.dropped:
                return data

    def _coalesced(self) -> bytes:
        first = self._frames.popleft()
        if not self._frames:
            return first
        joined, size = [first], len(first)
        while self._frames and size + len(self._frames[0]) <= COALESCED_BYTES:
            joined.append(self._frames.popleft())
            size += len(joined[-1])
        return b"".join(joined)
