"""The short form of gradients: what both peers know of the tensors that they are for is left out.

The gradient of a tensor has its shape and dtype. So a slot is a bit, and its gradient the bytes of all
elements; or of one element, where the gradient repeats that one, as the gradient of a sum does. Any other
gradient goes in full, and so does large memory that several gradients share, as those of a sum of two tensors
do: in full it is sent once.
"""

from __future__ import annotations

from collections.abc import Sequence
from struct import Struct
from struct import error as StructError

import torch

from gradwire import wire
from gradwire.autograd.gradients import Gradients, TensorMetadata
from gradwire.autograd.metadata import AutogradMetadata
from gradwire.errors import MalformedMessage
from gradwire.wire.ids import AutogradMessageId, ContextId

__all__ = ["AWAITS_END", "ShortGradients", "ShortRequest", "read_gradients", "read_heads", "short_request"]

_REQUEST = Struct("<BB16s16sQQ")
"""The mark of a short form, flags, the pass, and the gradients of one message."""
_GRADIENTS = Struct("<16sQQ")
"""The message, its slots that have a gradient, and those whose gradient repeats one element."""
_MOST_SLOTS = 64
"""As many as a number has bits."""
_MOST_GRADIENTS = 1024
"""Of all messages together, and as many messages. Each gradient may become an attachment, so thousands are
better in full."""
_RETAIN_GRAPH, _SKIP_LEAVES = 1, 2
AWAITS_END = 1
"""A flag of a response."""


class ShortGradients:
    """Takes gradients as long as they can be said in short."""

    def __init__(self) -> None:
        self.heads: list[tuple[AutogradMessageId, int, int]] = []
        """Of each message: what `_GRADIENTS` says."""
        self._tensors: list[torch.Tensor] = []
        self._sizes: list[int] = []
        self._large: set[int] = set()
        """Where the memory of large ones begins."""

    def add(self, id: AutogradMessageId, gradients: Gradients, expected: Sequence[TensorMetadata]) -> bool:
        """Adds the gradients of a message. False if they have to be said in full."""
        if len(gradients) > _MOST_SLOTS:
            return False
        slots = repeated = 0
        for slot, gradient in enumerate(gradients):
            if gradient is None:
                continue
            size = wire.size_if_simple(gradient)
            shape, dtype, _ = expected[slot]
            if size is None or gradient.dtype != dtype or gradient.shape != shape or dtype not in wire.EMPTY:
                return False
            if size > wire.LARGEST_INLINE:
                address = gradient.data_ptr()
                if address in self._large:
                    return False
                self._large.add(address)
            slots |= 1 << slot
            if size != gradient.nbytes:
                repeated |= 1 << slot
            self._tensors.append(gradient)
            self._sizes.append(size)
        self.heads.append((id, slots, repeated))
        return len(self.heads) <= _MOST_GRADIENTS and len(self._sizes) <= _MOST_GRADIENTS

    def content(self) -> tuple[bytes, list[wire.Attachment]]:
        """The bytes, and the attachments."""
        inline, attachments = wire.write_memory(self._tensors, self._sizes)
        return b"".join(inline), attachments

    def with_heads(self) -> tuple[bytes, list[wire.Attachment]]:
        """As `content`, with the heads of all messages before it."""
        content, attachments = self.content()
        return b"".join((*(_GRADIENTS.pack(*head) for head in self.heads), content)), attachments


def read_heads(body: bytes, at: int, count: int) -> tuple[list[tuple[AutogradMessageId, int, int]], int]:
    """The heads of several messages, and where they end."""
    heads = []
    try:
        for _ in range(count):
            id, slots, repeated = _GRADIENTS.unpack_from(body, at)
            heads.append((AutogradMessageId.of(id), slots, repeated))
            at += _GRADIENTS.size
    except StructError as error:
        raise MalformedMessage(f"a body of {len(body)} bytes lacks gradients") from error
    return heads, at


def read_gradients(
    reader: wire.MemoryReader, slots: int, repeated: int, expected: Sequence[TensorMetadata]
) -> list[torch.Tensor | None]:
    """The gradients for the tensors of a message, on the devices of those tensors."""
    if slots >> len(expected):
        raise MalformedMessage(f"gradients for slots that do not exist: there are {len(expected)}")
    gradients: list[torch.Tensor | None] = []
    for slot, (shape, dtype, device) in enumerate(expected):
        if not slots >> slot & 1:
            gradients.append(None)
            continue
        like = wire.EMPTY.get(dtype)
        if like is None:
            raise MalformedMessage(f"a gradient of {dtype} in short")
        if repeated >> slot & 1:
            gradient = reader.read(like, (), dtype.itemsize).expand(shape)
        else:
            gradient = reader.read(like, shape, shape.numel() * dtype.itemsize)
        gradients.append(gradient if device.type == "cpu" else gradient.to(device))
    return gradients


def short_request(
    pass_id: AutogradMessageId,
    context: ContextId,
    gradients: ShortGradients,
    released: Sequence[AutogradMessageId],
    *,
    retain_graph: bool,
    skip_leaves: bool,
) -> tuple[bytes, list[wire.Attachment]]:
    """A PropagateGradientsRequest for the tensors of one message, which says nothing else."""
    content, attachments = gradients.content()
    flags = (retain_graph and _RETAIN_GRAPH) | (skip_leaves and _SKIP_LEAVES)
    head = _REQUEST.pack(wire.MARK, flags, pass_id, *gradients.heads[0])
    return b"".join((head, AutogradMetadata(context).in_short(released), content)), attachments


class ShortRequest:
    """A PropagateGradientsRequest that came in short."""

    def __init__(self, body: bytes) -> None:
        try:
            _, flags, pass_id, message, self._slots, self._repeated = _REQUEST.unpack_from(body)
        except StructError as error:
            raise MalformedMessage(f"a request of {len(body)} bytes") from error
        self.pass_id = AutogradMessageId.of(pass_id)
        self.message = AutogradMessageId.of(message)
        self.retain_graph = bool(flags & _RETAIN_GRAPH)
        self.skip_leaves = bool(flags & _SKIP_LEAVES)
        metadata, self.released, self._at = AutogradMetadata.from_short(body, _REQUEST.size)
        self.context = metadata.context
        self._body = body

    def gradients(
        self, expected: Sequence[TensorMetadata], attachments: Sequence[wire.Buffer]
    ) -> list[torch.Tensor | None]:
        """The gradients for tensors that this peer sent."""
        reader = wire.MemoryReader(self._body, self._at, attachments)
        gradients = read_gradients(reader, self._slots, self._repeated, expected)
        reader.check_end()
        return gradients
