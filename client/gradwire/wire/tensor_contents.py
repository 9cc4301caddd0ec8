"""The bytes of tensors whose structure the receiver knows: all that a message in short says of them.

The bytes of small tensors are put together: at the end of the body, or, if they are many, in the first
attachment. Each large tensor is an attachment of its own.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch

from gradwire.errors import MalformedMessage

from .dtypes import BY_NUMBER
from .memory import as_bytes
from .storage_decoding import Buffer, zero_copy_tensor
from .storage_encoding import Attachment

__all__ = ["EMPTY", "LARGEST_SMALL", "TensorMemory", "read_memory", "write_memory"]

# Both ends rely on these numbers.
LARGEST_SMALL = 64 * 1024
"""The bytes of a small tensor, at most."""
_MOST_IN_BODY = 64 * 1024
"""How many bytes of small tensors are in the body, at most."""

EMPTY = {
    wire_type.dtype: torch.frombuffer(bytearray(16), dtype=wire_type.dtype, count=1)[:0]
    for wire_type in BY_NUMBER.values()
    if wire_type.plain
}
"""An empty tensor of each dtype. Its `new_empty` takes half the time of `torch.empty` with a dtype and a
device, and heeds no ``with torch.device(...)`` block of the user either."""


class TensorMemory(NamedTuple):
    """What the receiver knows of a tensor that comes."""

    like: torch.Tensor
    """Of `EMPTY`: has its dtype."""
    shape: Sequence[int]
    size: int
    """In bytes."""


def write_memory(tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> tuple[bytes, list[Attachment]]:
    """What a body ends with, and the attachments. The tensors are contiguous, and have these sizes in
    bytes."""
    small: list[bytes] = []
    attachments: list[Attachment] = []
    for tensor, size in zip(tensors, sizes, strict=True):
        if size <= LARGEST_SMALL:
            small.append(ctypes.string_at(tensor.data_ptr(), size))
        else:
            # The view refers to the array, and the array to the storage, so the view stays valid.
            view = as_bytes(tensor, tensor.data_ptr(), size).numpy().data
            attachments.append(Attachment(view, [tensor]))
    together = b"".join(small)
    if len(together) > _MOST_IN_BODY:
        return b"", [Attachment(memoryview(together)), *attachments]
    return together, attachments


def read_memory(
    expected: Sequence[TensorMemory], body: bytes, at: int, attachments: Sequence[Buffer]
) -> list[torch.Tensor]:
    """The tensors, whose bytes begin at `at` in the body. Raises unless there is just what is expected."""
    together = sum([size for _, _, size in expected if size <= LARGEST_SMALL])
    source, used = body, 0
    if together > _MOST_IN_BODY:
        if len(body) != at or not attachments:
            raise MalformedMessage("small tensors are not in the first attachment")
        source, at, used = bytes(attachments[0]), 0, 1
    if len(source) - at != together:
        raise MalformedMessage(f"{len(source) - at} bytes of small tensors, not {together}")
    tensors: list[torch.Tensor] = []
    for like, shape, size in expected:
        if size <= LARGEST_SMALL:
            # Copied into memory of torch, which is aligned, and which the user may resize.
            tensor = like.new_empty(shape)
            ctypes.memmove(tensor.data_ptr(), source[at : at + size], size)
            at += size
        else:
            if used == len(attachments) or len(attachments[used]) != size:
                raise MalformedMessage(f"attachment {used} does not have the {size} bytes of its tensor")
            tensor = _attached(like, shape, size, attachments[used])
            used += 1
        tensors.append(tensor)
    if used != len(attachments):
        raise MalformedMessage(f"{len(attachments)} attachments, not {used}")
    return tensors


def _attached(like: torch.Tensor, shape: Sequence[int], size: int, content: Buffer) -> torch.Tensor:
    tensor = zero_copy_tensor(content, like.dtype)
    if tensor is None:
        tensor = like.new_empty(shape)
        ctypes.memmove(tensor.data_ptr(), bytes(content), size)
        return tensor
    # Resized in place: autograd forbids in-place operations on a view that a recv node returns.
    return tensor if len(shape) == 1 else tensor.resize_(shape)
