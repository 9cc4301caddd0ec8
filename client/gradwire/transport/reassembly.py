"""Reassembles the messages of one set of streams: joins chunks into attachments, and attachments with their
message, in whatever order they arrive."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.errors import MalformedMessage, ResourceExhausted
from gradwire.proto.v1 import link_pb2
from gradwire.transport.base import Buffer, counted_size
from gradwire.transport.buffers import Arriving, new_arriving
from gradwire.transport.frames import Chunk, RequestFrame
from gradwire.transport.memory_budget import MemoryBudget, Quota
from gradwire.wire.hashing import check_dict_keys

__all__ = ["Reassembler"]

Key = tuple[bool, int]
"""Identifies a message: (whether it is a response, the request's id)."""
Message = RequestFrame | link_pb2.Response
CompleteMessage = tuple[Message, Sequence[Buffer] | None]
"""A message with all its attachments, or with None instead of them if they exceeded the memory budget."""


_PAGE_BYTES = 4096


@dataclass(slots=True)
class _Transfer:
    total: int
    arriving: Arriving | None = None
    """The memory of an attachment that arrives in chunks, until it is complete."""
    buffer: Buffer | None = None
    """The complete attachment."""
    filled: int = 0
    orphan_bytes: int = 0
    """How many bytes count as orphaned, since no message has claimed the transfer yet."""

    @property
    def complete(self) -> bool:
        return self.buffer is not None


@dataclass(slots=True)
class _Waiting:
    message: Message
    transfers: Sequence[int]
    missing: set[int]
    size: int = 0
    """The total size of the attachments that have begun to arrive."""


class Reassembler:
    """Reassembles the messages of one set of streams, and is dropped with them.

    It relies on two orders, and enforces them: requests arrive in the order of their ids, and transfers begin
    in the order of theirs. So an id that is still to arrive can be told from one that never will, and nothing
    has to be remembered about the latter.
    """

    MAX_EXPECTED = 100_000
    """How many ids of unwanted requests and transfers that are still to arrive may be remembered."""
    MAX_BEGUN = 100_000
    """How many incomplete or unclaimed transfers there may be."""

    def __init__(
        self, max_bytes: int, quota: Quota | None = None, orphan_timeout: float | None = None
    ) -> None:
        self._lock = threading.Lock()
        self._claimed = threading.Condition(self._lock)
        self._max_bytes = max_bytes
        self._quota = quota or Quota(1 << 62, MemoryBudget())
        self._orphan_timeout = orphan_timeout
        """How long a chunk that exceeds the quota for orphans waits for its message. None: one stream carries
        both chunks and messages, so the message could not arrive during the wait."""
        self._closed = False
        self._transfers: dict[int, _Transfer] = {}
        self._waiting: dict[Key, _Waiting] = {}
        self._wanted_by: dict[int, Key] = {}
        self._last_request = 0
        self._last_begun = 0
        self._cancelled: set[int] = set()
        """Requests that were cancelled before they arrived."""
        self._unwanted: set[int] = set()
        """Transfers that are unwanted, and have not begun to arrive."""
        self._orphan_bytes = 0
        """Memory taken by attachments whose message has not arrived."""

    @property
    def held(self) -> int:
        """How many bytes of incomplete attachments have arrived."""
        with self._lock:
            return sum(transfer.filled for transfer in self._transfers.values())

    def close(self) -> None:
        """Frees everything that has arrived, even if other objects still refer to the reassembler."""
        with self._lock:
            self._closed = True
            for is_response, id in self._waiting:
                if not is_response:
                    self._quota.give_back(id)
            self._transfers.clear()
            self._waiting.clear()
            self._wanted_by.clear()
            self._orphan_bytes = 0
            self._claimed.notify_all()

    def chunk(self, chunk: Chunk) -> CompleteMessage | None:
        """Takes a piece of an attachment. Returns the message that it completes, or that
        exceeds the budget with it."""
        with self._lock:
            if self._closed:
                return None
            transfer = self._transfers.get(chunk.transfer)
            if transfer is None:
                transfer = self._begin(chunk)
                key = self._wanted_by.get(chunk.transfer)
                if transfer is not None and key is not None and not self._take(key, transfer.total):
                    return self._refuse(key)
            if transfer is None or not self._await_message(chunk):
                return None
            total, end = transfer.total, chunk.offset + len(chunk.data)
            if chunk.offset != transfer.filled or end > total or (chunk.offset == end and total):
                raise MalformedMessage(
                    f"transfer {chunk.transfer}: a chunk of bytes {chunk.offset} to {end} arrived after "
                    f"{transfer.filled} of {total} bytes"
                )
            if transfer.arriving is None:
                raise MalformedMessage(
                    f"transfer {chunk.transfer} was announced in a segment, but arrived in chunks"
                )
        # Copied outside the lock: the chunks of one transfer arrive one after another, on one stream.
        try:
            transfer.arriving.write(chunk.offset, chunk.data)
        except MemoryError as error:
            raise _no_memory(total) from error
        with self._lock:
            transfer.filled = end
            if self._transfers.get(chunk.transfer) is not transfer:
                return None  # the transfer was dropped meanwhile
            if chunk.transfer not in self._wanted_by:
                taken = -(-end // _PAGE_BYTES) * _PAGE_BYTES
                self._orphan_bytes += taken - transfer.orphan_bytes
                transfer.orphan_bytes = taken
            if end < total:
                return None
            transfer.buffer, transfer.arriving = transfer.arriving.finish(), None
            return self._completed(chunk.transfer)

    def begin(self, id: int, total: int) -> None:
        """Notes an attachment that will be placed later: other attachments may be placed before it."""
        with self._lock:
            if self._may_begin(id, total):
                self._transfers[id] = _Transfer(total)

    def place(self, id: int, buffer: Buffer) -> CompleteMessage | None:
        """Takes an attachment that arrived in one piece. Returns the message that it completes, or that
        exceeds the budget with it."""
        with self._lock:
            if self._closed:
                return None
            if id not in self._transfers and (id <= self._last_begun or not self._may_begin(id, len(buffer))):
                return None  # the attachment is unwanted
            self._transfers[id] = _Transfer(len(buffer), buffer=buffer, filled=len(buffer))
            key = self._wanted_by.get(id)
            if key is not None:
                self._grow(key, len(buffer))
                if not self._take(key, len(buffer)):
                    return self._refuse(key)
            return self._completed(id)

    def message(self, key: Key, transfers: Sequence[int], message: Message) -> CompleteMessage | None:
        """Takes a message. Returns it if all its attachments have arrived."""
        with self._lock:
            if self._is_cancelled(key):
                self._forget(transfers)  # a cancellation is sent after the last chunk, so no more will arrive
                return None
            is_response, _ = key
            # Responses are exempt from the budget, so their bodies, which
            # protobuf would copy, are not measured.
            body = 0 if is_response else counted_size(message.body)
            if body and not self._take(key, body):
                self._forget(transfers, more_to_come=True)
                return message, None
            if not transfers:
                return message, ()
            if key in self._waiting:
                raise MalformedMessage(f"a second response to request {key[1]}")
            self._check_transfers(transfers)
            missing = {
                id for id in transfers if (known := self._transfers.get(id)) is None or not known.complete
            }
            self._waiting[key] = _Waiting(message, transfers, missing)
            self._wanted_by.update(dict.fromkeys(transfers, key))
            self._claimed.notify_all()
            size = 0
            for id in transfers:
                begun = self._transfers.get(id)
                if begun is not None:
                    self._orphan_bytes -= begun.orphan_bytes
                    begun.orphan_bytes = 0
                    if begun.arriving is not None or begun.complete:
                        size += begun.total  # an attachment that is placed later is counted then
            self._grow(key, size)
            if not self._take(key, size):
                return self._refuse(key)
            return self._take_if_complete(key)

    def skip(self, key: Key, transfers: Sequence[int]) -> None:
        """Takes an unwanted message, and discards its attachments as they arrive."""
        with self._lock:
            self._is_cancelled(key)
            self._forget(transfers, more_to_come=True)

    def drop(self, key: Key) -> None:
        """Drops a message that waits for attachments, or a request that is still to arrive."""
        with self._lock:
            waiting = self._waiting.pop(key, None)
            is_response, id = key
            if waiting is not None:
                self._forget(waiting.transfers, more_to_come=is_response)
                if not is_response:
                    self._quota.give_back(id)
            elif not is_response and id > self._last_request:
                self._cancelled = self._remember_id(self._cancelled, id, self._last_request)

    # -- all with the lock held

    def _is_cancelled(self, key: Key) -> bool:
        is_response, id = key
        if is_response:
            return False
        if id <= self._last_request:
            raise MalformedMessage(f"request {id} arrived after request {self._last_request}")
        self._last_request = id
        cancelled = id in self._cancelled
        self._cancelled.discard(id)
        return cancelled

    def _begin(self, chunk: Chunk) -> _Transfer | None:
        """The transfer that begins with a chunk; None if it is unwanted."""
        if chunk.offset:
            if chunk.transfer <= self._last_begun:
                return None  # the rest of a transfer that was dropped
            raise MalformedMessage(f"transfer {chunk.transfer} lacks its first {chunk.offset} bytes")
        if not self._may_begin(chunk.transfer, chunk.total):
            return None
        try:
            transfer = _Transfer(chunk.total, new_arriving(chunk.total))
        except (MemoryError, ValueError) as error:
            raise _no_memory(chunk.total) from error
        self._transfers[chunk.transfer] = transfer
        key = self._wanted_by.get(chunk.transfer)
        if key is not None:
            self._grow(key, chunk.total)
        return transfer

    def _may_begin(self, id: int, total: int) -> bool:
        """Whether a transfer that begins is wanted."""
        if id <= self._last_begun:
            raise MalformedMessage(f"transfer {id} began twice, or out of order")
        self._last_begun = id
        if id in self._unwanted:
            self._unwanted.discard(id)
            return False
        if total > self._max_bytes:
            raise self._too_large(total)
        if len(self._transfers) >= self.MAX_BEGUN:
            raise ResourceExhausted(f"more than {self.MAX_BEGUN} attachments have begun to arrive")
        return True

    def _completed(self, id: int) -> CompleteMessage | None:
        """Marks a transfer as complete. Returns the message that this completes, if any."""
        key = self._wanted_by.get(id)
        if key is None:
            return None
        self._waiting[key].missing.discard(id)
        return self._take_if_complete(key)

    def _take(self, key: Key, size: int) -> bool:
        """Reserves memory for more of a message. Returns whether it fits; responses always do,
        since this peer requested them."""
        is_response, id = key
        return is_response or self._quota.take(id, size)

    def _refuse(self, key: Key) -> CompleteMessage:
        waiting = self._waiting.pop(key)
        self._forget(waiting.transfers, more_to_come=True)
        self._quota.give_back(key[1])
        return waiting.message, None

    def _await_message(self, chunk: Chunk) -> bool:
        """If orphaned chunks exceed the quota, waits for the message that claims this chunk, which arrives on
        the other stream. Returns False if the chunk is unwanted."""
        if chunk.transfer in self._wanted_by or self._orphan_timeout is None:
            return True
        if self._orphan_bytes + len(chunk.data) <= max(self._quota.max_bytes, _PAGE_BYTES):
            return True

        def is_known() -> bool:
            return self._closed or chunk.transfer in self._wanted_by or chunk.transfer not in self._transfers

        if not self._claimed.wait_for(is_known, self._orphan_timeout):
            raise MalformedMessage(f"transfer {chunk.transfer} belongs to no message")
        return not self._closed and chunk.transfer in self._transfers

    def _check_transfers(self, transfers: Sequence[int]) -> None:
        check_dict_keys(transfers)  # the other peer chose them
        if len(dict.fromkeys(transfers)) != len(transfers) or any(id in self._wanted_by for id in transfers):
            raise MalformedMessage("a transfer was named as an attachment twice")
        for id in transfers:
            if id in self._unwanted or (id <= self._last_begun and id not in self._transfers):
                raise MalformedMessage(f"transfer {id} was named as an attachment, but will never arrive")

    def _grow(self, key: Key, more: int) -> None:
        """Adds to the size of a message's attachments that have begun to arrive."""
        waiting = self._waiting[key]
        waiting.size += more
        if waiting.size > self._max_bytes:
            raise self._too_large(waiting.size)

    def _too_large(self, size: int) -> ResourceExhausted:
        return ResourceExhausted(
            f"attachments of {size} bytes exceed the limit of {self._max_bytes} bytes for one message"
        )

    def _take_if_complete(self, key: Key) -> CompleteMessage | None:
        waiting = self._waiting[key]
        if waiting.missing:
            return None
        del self._waiting[key]
        buffers = [self._transfers[id].buffer for id in waiting.transfers]
        self._forget(waiting.transfers)
        return waiting.message, [buffer for buffer in buffers if buffer is not None]

    def _forget(self, transfers: Sequence[int], *, more_to_come: bool = False) -> None:
        for id in transfers:
            self._wanted_by.pop(id, None)
            dropped = self._transfers.pop(id, None)
            if dropped is not None:
                self._orphan_bytes -= dropped.orphan_bytes
            if more_to_come and id > self._last_begun:
                self._unwanted = self._remember_id(self._unwanted, id, self._last_begun)
        self._claimed.notify_all()

    def _remember_id(self, ids: set[int], id: int, past: int) -> set[int]:
        """Adds an id to the ids that are still to arrive. Ids up to `past` never
        will, and may be forgotten."""
        if len(ids) >= self.MAX_EXPECTED:
            ids = {later for later in ids if later > past}
            if len(ids) >= self.MAX_EXPECTED:
                raise ResourceExhausted("too many messages were cancelled before they arrived")
        ids.add(id)
        return ids


def _no_memory(size: int) -> ResourceExhausted:
    return ResourceExhausted(f"no memory for an attachment of {size} bytes")
