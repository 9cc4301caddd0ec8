"""What has come in of the messages on one set of streams: chunks become attachments, attachments and
their message find each other in whatever order they arrive."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from gradwire.errors import MalformedMessage, ResourceExhausted
from gradwire.transport.base import Buffer
from gradwire.transport.frames import Chunk

__all__ = ["Inbound"]

Key = tuple[bool, int]
"""A message: (is it a reply, the request's id)."""
Deliver = Callable[[Sequence[Buffer]], None]


@dataclass(slots=True)
class _Transfer:
    buffer: Buffer
    filled: int = 0

    @property
    def complete(self) -> bool:
        return self.filled == len(self.buffer)


@dataclass(slots=True)
class _Waiting:
    transfers: Sequence[int]
    missing: set[int]
    deliver: Deliver


class Inbound:
    """Assembles the messages of one set of streams. Dropped with them."""

    _MAX_EARLY_CANCELS = 10_000

    def __init__(self, max_bytes: int) -> None:
        self._lock = threading.Lock()
        self._max_bytes = max_bytes
        self._held = 0
        self._transfers: dict[int, _Transfer] = {}
        self._waiting: dict[Key, _Waiting] = {}
        self._wanted_by: dict[int, Key] = {}
        self._dropped: set[Key] = set()

    def chunk(self, chunk: Chunk) -> None:
        """Takes a piece of an attachment; delivers the message that it completes, if any."""
        with self._lock:
            transfer = self._transfers.get(chunk.transfer)
            if transfer is None:
                if chunk.offset:
                    return  # the rest of something that was dropped
                transfer = self._start(chunk)
            end = chunk.offset + len(chunk.data)
            if chunk.offset != transfer.filled or end > len(transfer.buffer) or chunk.offset == end:
                raise MalformedMessage(
                    f"transfer {chunk.transfer}: a chunk of bytes {chunk.offset} to {end} came where "
                    f"{transfer.filled} of {len(transfer.buffer)} bytes had come before"
                )
        # Copied outside the lock: the chunks of one transfer come on one stream, one after another.
        transfer.buffer[chunk.offset : end] = np.frombuffer(chunk.data, dtype=np.uint8)
        with self._lock:
            transfer.filled = end
            key = self._wanted_by.get(chunk.transfer)
            if not transfer.complete or key is None:
                return
            self._waiting[key].missing.discard(chunk.transfer)
            deliver = self._if_whole(key)
        if deliver is not None:
            deliver()

    def message(self, key: Key, transfers: Sequence[int], deliver: Deliver) -> None:
        """Takes a message; delivers it when all its attachments are there."""
        if not transfers:
            deliver(())
            return
        with self._lock:
            if key in self._dropped:
                self._dropped.discard(key)
                self._forget(transfers)
                return
            if len(set(transfers)) != len(transfers) or any(id in self._wanted_by for id in transfers):
                raise MalformedMessage("a transfer was named as an attachment twice")
            missing = {
                id for id in transfers if (known := self._transfers.get(id)) is None or not known.complete
            }
            self._waiting[key] = _Waiting(transfers, missing, deliver)
            self._wanted_by.update(dict.fromkeys(transfers, key))
            whole = self._if_whole(key)
        if whole is not None:
            whole()

    def drop(self, key: Key, *, expected: bool) -> None:
        """Forgets a message that waits for attachments or, if it is `expected`, is still to come."""
        with self._lock:
            waiting = self._waiting.pop(key, None)
            if waiting is not None:
                self._forget(waiting.transfers)
            elif expected and len(self._dropped) < self._MAX_EARLY_CANCELS:
                self._dropped.add(key)

    def _start(self, chunk: Chunk) -> _Transfer:
        if self._held + chunk.total > self._max_bytes:
            raise ResourceExhausted(
                f"attachments of {self._held + chunk.total} bytes on their way exceed the limit of "
                f"{self._max_bytes} bytes for one link"
            )
        try:
            # Pages are only committed as they are written: a length that lies costs address space alone.
            transfer = _Transfer(np.empty(chunk.total, dtype=np.uint8))
        except (MemoryError, ValueError) as error:
            raise ResourceExhausted(f"no memory for an attachment of {chunk.total} bytes") from error
        self._held += chunk.total
        self._transfers[chunk.transfer] = transfer
        return transfer

    def _if_whole(self, key: Key) -> Callable[[], None] | None:
        waiting = self._waiting[key]
        if waiting.missing:
            return None
        del self._waiting[key]
        buffers = [self._transfers[id].buffer for id in waiting.transfers]
        self._forget(waiting.transfers)
        return lambda: waiting.deliver(buffers)

    def _forget(self, transfers: Sequence[int]) -> None:
        for id in transfers:
            self._wanted_by.pop(id, None)
            transfer = self._transfers.pop(id, None)
            if transfer is not None:
                self._held -= len(transfer.buffer)
