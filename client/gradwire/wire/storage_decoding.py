"""Storages of a TensorTable -> memory: checked when the message arrives, decoded when a tensor views them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy
import torch

from gradwire.errors import MalformedMessage
from gradwire.proto.v1 import tensor_pb2

from .codecs import check_encoded, decode

__all__ = ["Buffer", "EncodedStorage", "StorageContent", "check_storages", "materialise", "zero_copy_tensor"]

Buffer: TypeAlias = "memoryview | numpy.ndarray[Any, numpy.dtype[numpy.uint8]]"


class EncodedStorage:
    """A storage whose bytes a codec encoded. The encoded size was checked; `len` is the decoded size."""

    __slots__ = ("_content", "_message", "_size")

    def __init__(self, message: tensor_pb2.Encoded, size: int, content: bytes | Buffer) -> None:
        check_encoded(message, size, len(content))
        self._message = message
        self._size = size
        self._content = content

    def __len__(self) -> int:
        return self._size

    @property
    def saved(self) -> int:
        """How many bytes the codec saved."""
        return self._size - len(self._content)

    def decode(self) -> torch.Tensor:
        """The decoded bytes, as a uint8 tensor."""
        return decode(self._message, self._size, materialise(self._content))


StorageContent: TypeAlias = "bytes | Buffer | EncodedStorage"


def check_storages(table: tensor_pb2.TensorTable, attachments: Sequence[Buffer]) -> list[StorageContent]:
    """The content of each storage. Raises MalformedMessage if a size is not that of the received bytes."""
    contents: list[StorageContent] = []
    used: set[int] = set()
    for index, storage in enumerate(table.storages):
        content: StorageContent
        kind = storage.WhichOneof("content")
        if kind == "attachment":
            content = _attachment(storage.attachment, index, attachments, used)
        elif kind == "encoded":
            encoded = storage.encoded
            is_attached = encoded.WhichOneof("content") == "attachment"
            inner = (
                _attachment(encoded.attachment, index, attachments, used) if is_attached else encoded.inline
            )
            content = EncodedStorage(encoded, storage.size, inner)
        else:
            content = storage.inline
        if len(content) != storage.size:
            raise MalformedMessage(f"storage {index} says {storage.size} bytes, {len(content)} were received")
        contents.append(content)
    return contents


def _attachment(attachment: int, index: int, attachments: Sequence[Buffer], used: set[int]) -> Buffer:
    """The bytes of an attachment. Raises MalformedMessage if another storage uses the same attachment."""
    if attachment >= len(attachments):
        raise MalformedMessage(
            f"storage {index} is in attachment {attachment}, {len(attachments)} were received"
        )
    if attachment in used:
        raise MalformedMessage(f"attachment {attachment} is used by two storages")
    used.add(attachment)
    content = attachments[attachment]
    if isinstance(content, memoryview):
        if not content.contiguous:
            raise MalformedMessage(f"attachment {attachment} is not one run of bytes")
        content = content.cast("B")
    return content


def materialise(content: StorageContent) -> torch.Tensor:
    """The memory of a storage as a uint8 tensor.

    It is the attachment's own memory if torch can use it, else a copy; encoded storages are decoded.
    """
    if isinstance(content, EncodedStorage):
        return content.decode()
    tensor = None if isinstance(content, bytes) else zero_copy_tensor(content, torch.uint8)
    return _copy(content) if tensor is None else tensor


def _copy(content: bytes | Buffer) -> torch.Tensor:
    memory = torch.empty(len(content), dtype=torch.uint8, device="cpu")
    if type(content) is bytes:
        ctypes.memmove(memory.data_ptr(), content, len(content))
    elif len(content):
        memory.numpy()[:] = numpy.frombuffer(content, dtype=numpy.uint8)
    return memory


def zero_copy_tensor(content: Buffer, dtype: torch.dtype) -> torch.Tensor | None:
    """A tensor over the received memory itself; None if that is read-only or not aligned to 16 bytes."""
    # The tensor refers to the array, and the array to the memory: a memoryview alone could be released
    # meanwhile.
    array = numpy.frombuffer(content, dtype=numpy.uint8) if isinstance(content, memoryview) else content
    if not len(array) or not array.flags.writeable or not array.flags.c_contiguous:
        return None
    if array.__array_interface__["data"][0] % 16:
        return None
    return torch.frombuffer(array, dtype=dtype)
