"""The short form of gradients: what both peers know of the tensors that they are for is left out.

The gradient of a tensor has its shape and dtype. So a tensor has two bits: whether it has a gradient, and
whether that repeats one element, as the gradient of a sum does. Then one element is sent, else the bytes of
all elements. Any other gradient goes in full, and so does large memory that several gradients share, as those
of a sum of two tensors do: in full it is sent once.
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
from gradwire.wire.ids import AutogradMessageId, ContextId, read_ids

__all__ = ["GradientsReader", "GradientsWriter", "ShortRequest", "short_request"]

_REQUEST = Struct("<BB24s24s")
"""The mark of a short form, flags, the pass, and the message that the gradients are for."""
_MOST_MESSAGES = 1024
_MOST_ATTACHMENTS = 1024
"""Beyond these numbers, gradients are better in full."""
_RETAIN_GRAPH, _SKIP_LEAVES, _COLLECT = 1, 2, 4
_UNKNOWN_FLAGS = ~(_RETAIN_GRAPH | _SKIP_LEAVES | _COLLECT)


class GradientsWriter:
    """Takes gradients as long as they can be said in short."""

    def __init__(self) -> None:
        self.messages: list[AutogradMessageId] = []
        self._bits: list[bytes] = []
        """For each message: which tensors have a gradient, and which of these repeat one element."""
        self._tensors: list[torch.Tensor] = []
        self._sizes: list[int] = []
        self._large: set[int] = set()
        """Where the memory of large ones begins."""

    def add(self, id: AutogradMessageId, gradients: Gradients, expected: Sequence[TensorMetadata]) -> bool:
        """Adds the gradients of a message. False if they have to be said in full."""
        present = repeated = 0
        for slot, gradient in enumerate(gradients):
            if gradient is None:
                continue
            size = wire.size_if_simple(gradient)
            shape, dtype, _ = expected[slot]
            if size is None or gradient.dtype != dtype or gradient.shape != shape or dtype not in wire.EMPTY:
                return False
            if size > wire.LARGEST_SMALL:
                address = gradient.data_ptr()
                if address in self._large:
                    return False
                self._large.add(address)
            present |= 1 << slot
            if size != gradient.nbytes:
                repeated |= 1 << slot
            self._tensors.append(gradient)
            self._sizes.append(size)
        self.messages.append(id)
        width = _bytes_for(expected)
        self._bits.append(present.to_bytes(width, "little") + repeated.to_bytes(width, "little"))
        return len(self.messages) <= _MOST_MESSAGES and len(self._large) <= _MOST_ATTACHMENTS

    def of_one(self) -> tuple[bytes, list[wire.Attachment]]:
        """The gradients of the only message, which is named elsewhere, and the attachments."""
        memory, attachments = wire.write_memory(self._tensors, self._sizes)
        return self._bits[0] + memory, attachments

    def of_all(self) -> tuple[bytes, list[wire.Attachment]]:
        """The gradients of all messages, with their ids, and the attachments."""
        memory, attachments = wire.write_memory(self._tensors, self._sizes)
        heads = [part for head in zip(self.messages, self._bits, strict=True) for part in head]
        return b"".join((*heads, memory)), attachments


class GradientsReader:
    """Reads gradients in short from a body: for each message what it is to have, then the memory of all."""

    def __init__(self, body: bytes, at: int) -> None:
        self._body = body
        self._at = at
        self._messages: list[tuple[Sequence[TensorMetadata], int]] = []
        """The tensors of each message, and which of them have a gradient, as bits."""
        self._memory: list[wire.TensorMemory] = []

    def read_message(self) -> AutogradMessageId:
        """The message that the next gradients are for."""
        (id,) = read_ids(self._body, self._at, 1)
        self._at += len(id)
        return id

    def expect(self, tensors: Sequence[TensorMetadata]) -> None:
        """The next gradients are for these tensors."""
        width = _bytes_for(tensors)
        between, end = self._at + width, self._at + 2 * width
        if end > len(self._body):
            raise MalformedMessage(f"a body of {len(self._body)} bytes lacks gradients")
        present = int.from_bytes(self._body[self._at : between], "little")
        repeated = int.from_bytes(self._body[between:end], "little")
        self._at = end
        if present >> len(tensors) or repeated & ~present:
            raise MalformedMessage(f"gradients for tensors that do not exist: there are {len(tensors)}")
        self._messages.append((tensors, present))
        for slot, (shape, dtype, _) in enumerate(tensors):
            if present >> slot & 1:
                like = wire.EMPTY.get(dtype)
                if like is None:
                    raise MalformedMessage(f"a gradient of {dtype} in short")
                one = repeated >> slot & 1
                size = dtype.itemsize if one else shape.numel() * dtype.itemsize
                self._memory.append(wire.TensorMemory(like, () if one else shape, size))

    def read(self, attachments: Sequence[wire.Buffer]) -> list[list[torch.Tensor | None]]:
        """The gradients of each message, on the devices of the tensors that they are for."""
        came = iter(wire.read_memory(self._memory, self._body, self._at, attachments))
        return [
            [
                _as_expected(next(came), expected) if present >> slot & 1 else None
                for slot, expected in enumerate(tensors)
            ]
            for tensors, present in self._messages
        ]


def _as_expected(gradient: torch.Tensor, expected: TensorMetadata) -> torch.Tensor:
    shape, _, device = expected
    if gradient.shape != shape:
        gradient = gradient.expand(shape)
    return gradient if device.type == "cpu" else gradient.to(device)


def _bytes_for(tensors: Sequence[TensorMetadata]) -> int:
    """How many bytes have a bit for each tensor."""
    return (len(tensors) + 7) // 8


def short_request(
    pass_id: AutogradMessageId,
    context: ContextId,
    gradients: GradientsWriter,
    released: Sequence[AutogradMessageId],
    *,
    retain_graph: bool,
    skip_leaves: bool,
    collect: bool,
) -> tuple[bytes, list[wire.Attachment]]:
    """A PropagateGradientsRequest for the tensors of one message, which says nothing else. `collect`: its
    `collect_into` is the context, else it has none."""
    content, attachments = gradients.of_one()
    flags = (retain_graph and _RETAIN_GRAPH) | (skip_leaves and _SKIP_LEAVES) | (collect and _COLLECT)
    head = _REQUEST.pack(wire.MARK, flags, pass_id, gradients.messages[0])
    return b"".join((head, AutogradMetadata(context).in_short(released), content)), attachments


class ShortRequest:
    """A PropagateGradientsRequest that came in short."""

    def __init__(self, body: bytes) -> None:
        try:
            _, flags, pass_id, message = _REQUEST.unpack_from(body)
        except StructError as error:
            raise MalformedMessage(f"a request of {len(body)} bytes") from error
        if flags & _UNKNOWN_FLAGS:
            raise MalformedMessage(f"a request with unknown flags: {flags:#x}")
        self.pass_id = AutogradMessageId.of(pass_id)
        self.message = AutogradMessageId.of(message)
        self.retain_graph = bool(flags & _RETAIN_GRAPH)
        self.skip_leaves = bool(flags & _SKIP_LEAVES)
        metadata, self.released, at = AutogradMetadata.from_short(body, _REQUEST.size)
        self.context = metadata.context
        self.collect_into = metadata.context if flags & _COLLECT else None
        self._reader = GradientsReader(body, at)

    def gradients(
        self, tensors: Sequence[TensorMetadata], attachments: Sequence[wire.Buffer]
    ) -> list[torch.Tensor | None]:
        """The gradients for tensors that this peer sent."""
        self._reader.expect(tensors)
        (gradients,) = self._reader.read(attachments)
        return gradients
