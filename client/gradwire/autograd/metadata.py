"""What a message says of autograd beside its tensors, in full and in short.

In full it is a protobuf message. Messages whose structure the receiver knows (`wire.plans`, `gradients`) have
it in short: a fixed head, then ids of 24 bytes each.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from struct import error as StructError

from gradwire.errors import MalformedMessage
from gradwire.proto.v1 import autograd_pb2
from gradwire.wire.ids import AutogradMessageId, ContextId, message_ids, message_protos, read_ids

__all__ = ["AutogradMetadata"]

_HEAD = Struct("<24s24sQIIIB")
"""Context, message, oldest pass; how many ids follow in `depends_on`, `builds_on` and the releases; flags."""
_HAS_MESSAGE, _HAS_HANDLE = 1, 2
_UNKNOWN_FLAGS = ~(_HAS_MESSAGE | _HAS_HANDLE)
_NO_ID = bytes(24)


class AutogradMetadata:
    """The fields of the message of the same name, which says what each of them is for (PyTorch:
    AutogradMetadata)."""

    __slots__ = ("builds_on", "context", "depends_on", "message", "oldest_pass", "segment_handle")

    def __init__(
        self, context: ContextId, message: AutogradMessageId | None = None, oldest_pass: int = 0
    ) -> None:
        self.context = context
        self.message = message
        self.oldest_pass = oldest_pass
        self.depends_on: Sequence[AutogradMessageId] = ()
        self.builds_on: Sequence[AutogradMessageId] = ()
        self.segment_handle: AutogradMessageId | None = None

    @classmethod
    def parse(cls, proto: autograd_pb2.AutogradMetadata) -> AutogradMetadata:
        message = AutogradMessageId.parse(proto.message) if proto.HasField("message") else None
        metadata = cls(ContextId.parse(proto.context), message, proto.oldest_pass)
        metadata.depends_on = message_ids(proto.depends_on)
        metadata.builds_on = message_ids(proto.builds_on)
        if proto.HasField("segment_handle"):
            metadata.segment_handle = AutogradMessageId.parse(proto.segment_handle)
        return metadata

    def write(self, proto: autograd_pb2.AutogradMetadata) -> None:
        self.context.write(proto.context)
        if self.message is not None:
            self.message.write(proto.message)
        proto.oldest_pass = self.oldest_pass
        proto.depends_on.extend(message_protos(self.depends_on))
        proto.builds_on.extend(message_protos(self.builds_on))
        if self.segment_handle is not None:
            self.segment_handle.write(proto.segment_handle)

    def in_short(self, released: Sequence[AutogradMessageId]) -> bytes:
        """It and the releases that ride on the message."""
        message, handle = self.message, self.segment_handle
        flags = (message is not None and _HAS_MESSAGE) | (handle is not None and _HAS_HANDLE)
        counts = len(self.depends_on), len(self.builds_on), len(released)
        head = _HEAD.pack(self.context, message or _NO_ID, self.oldest_pass, *counts, flags)
        if not (any(counts) or handle):
            return head
        handles = () if handle is None else (handle,)
        return b"".join((head, *handles, *self.depends_on, *self.builds_on, *released))

    @classmethod
    def from_short(cls, body: bytes, at: int) -> tuple[AutogradMetadata, list[AutogradMessageId], int]:
        """It, the releases, and where in the body they end."""
        try:
            context, message, oldest_pass, *counts, flags = _HEAD.unpack_from(body, at)
        except StructError as error:
            raise MalformedMessage(f"a body of {len(body)} bytes lacks its metadata") from error
        if flags & _UNKNOWN_FLAGS:
            raise MalformedMessage(f"metadata with unknown flags: {flags:#x}")
        metadata = cls(
            ContextId.of(context),
            AutogradMessageId.of(message) if flags & _HAS_MESSAGE else None,
            oldest_pass,
        )
        at += _HEAD.size
        has_handle = flags & _HAS_HANDLE and 1
        count = has_handle + sum(counts)
        if not count:
            return metadata, [], at
        ids = read_ids(body, at, count)
        releases_from = count - counts[2]
        builds_on_from = releases_from - counts[1]
        if has_handle:
            metadata.segment_handle = ids[0]
        metadata.depends_on = ids[has_handle:builds_on_from]
        metadata.builds_on = ids[builds_on_from:releases_from]
        return metadata, ids[releases_from:], at + count * len(_NO_ID)
