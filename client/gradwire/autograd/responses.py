"""The two forms of a response: in full, as a message of the contract, and in short, to a request in short."""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from struct import error as StructError
from typing import Any

from gradwire import wire
from gradwire.autograd.metadata import AutogradMetadata
from gradwire.errors import MalformedMessage
from gradwire.proto.v1 import autograd_pb2
from gradwire.wire import Attachment
from gradwire.wire.ids import AutogradMessageId, ContextId, message_ids, message_protos

__all__ = ["AWAITS_END", "FullResponse", "Response", "ShortResponse", "read_short", "releases_of_discarded"]

_HEAD = Struct("<BBH")
"""The mark of a short form, flags, and a number. ForwardWithAutograd: the number of the structure of the
result. PropagateGradients: how many messages have contributions."""
AWAITS_END = 1
"""A flag of PropagateGradients: `awaits_end` of its response in full."""
_HAS_METADATA = 1 << 7
_NO_METADATA = AutogradMetadata(ContextId(0, 0, 0))


class FullResponse:
    __slots__ = ("_message", "attachments", "metadata")

    def __init__(
        self,
        message: autograd_pb2.ForwardWithAutogradResponse | autograd_pb2.PropagateGradientsResponse,
        attachments: Sequence[Attachment],
        metadata: AutogradMetadata | None,
    ) -> None:
        self._message = message
        self.attachments = attachments
        self.metadata = metadata
        """Of the tensors that require grad in it, if there are any."""
        if metadata is not None:
            metadata.write(message.autograd)

    def body(self, released: Sequence[AutogradMessageId]) -> bytes:
        """The body, with releases that ride on it."""
        if released:
            self._message.released.extend(message_protos(released))
        return self._message.SerializeToString()


class ShortResponse:
    __slots__ = ("_content", "_flags", "_number", "attachments", "metadata")

    def __init__(
        self,
        flags: int,
        number: int,
        metadata: AutogradMetadata | None,
        content: bytes,
        attachments: Sequence[Attachment],
    ) -> None:
        self._flags = flags
        self._number = number
        self._content = content
        self.attachments = attachments
        self.metadata = metadata

    def body(self, released: Sequence[AutogradMessageId]) -> bytes:
        """As that of `FullResponse`."""
        if self.metadata is None and not released:
            return _HEAD.pack(wire.MARK, self._flags, self._number) + self._content
        head = _HEAD.pack(wire.MARK, self._flags | _HAS_METADATA, self._number)
        return b"".join((head, (self.metadata or _NO_METADATA).in_short(released), self._content))


Response = FullResponse | ShortResponse


def read_short(
    body: bytes, known_flags: int = 0
) -> tuple[int, int, AutogradMetadata, list[AutogradMessageId], int]:
    """Flags, number, metadata and releases of a response in short, and where its content begins.
    `known_flags`: those that a response of this kind may have."""
    try:
        _, flags, number = _HEAD.unpack_from(body)
    except StructError as error:
        raise MalformedMessage(f"a response of {len(body)} bytes") from error
    if flags & ~(_HAS_METADATA | known_flags):
        raise MalformedMessage(f"a response with unknown flags: {flags:#x}")
    if not flags & _HAS_METADATA:
        return flags, number, _NO_METADATA, [], _HEAD.size
    return flags, number, *AutogradMetadata.from_short(body, _HEAD.size)


def releases_of_discarded(
    kind: type[Any], body: bytes
) -> tuple[Sequence[AutogradMessageId], list[AutogradMessageId]]:
    """The releases for a response that nobody will decode. Here: those that ride on it. At the other peer:
    the results and refs that it brings. `kind` is its message in full."""
    if wire.is_short(body):
        _, _, metadata, released, _ = read_short(body, AWAITS_END)
        return released, [] if metadata.message is None else [metadata.message]
    response = wire.parse(kind, body)
    there = [
        AutogradMessageId(ref.peer.id, ref.release_number, 0)
        for ref in wire.refs_in([response])
        if ref.release_number
    ]
    if response.HasField("autograd"):
        there.append(AutogradMessageId.parse(response.autograd.message))
    return message_ids(response.released), there
