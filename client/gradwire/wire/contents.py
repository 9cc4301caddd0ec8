"""The bytes of storages as they came: checked here, made memory of when a tensor looks at them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy
import torch

from gradwire.errors import MalformedMessage
from gradwire.proto.v1 import tensor_pb2

from .codecs import check_encoded, decode

__all__ = ["Bytes", "Content", "Encoded", "adopt", "check_storages", "materialise"]

Bytes: TypeAlias = "memoryview | numpy.ndarray[Any, numpy.dtype[numpy.uint8]]"


class Encoded:
    """Encoded bytes of a storage, checked; as long as what they decode to."""

    __slots__ = ("_content", "_message", "_size")

    def __init__(self, message: tensor_pb2.Encoded, size: int, content: bytes | Bytes) -> None:
        check_encoded(message, size, len(content))
        self._message = message
        self._size = size
        self._content = content

    def __len__(self) -> int:
        return self._size

    @property
    def saved(self) -> int:
        return self._size - len(self._content)

    def decode(self) -> torch.Tensor:
        return decode(self._message, self._size, materialise(self._content))


Content: TypeAlias = "bytes | Bytes | Encoded"


def check_storages(table: tensor_pb2.TensorTable, attachments: Sequence[Bytes]) -> list[Content]:
    """What each storage holds. Every length is compared with the bytes that came."""
    contents: list[Content] = []
    taken: set[int] = set()
    for index, storage in enumerate(table.storages):
        content: Content
        kind = storage.WhichOneof("content")
        if kind == "attachment":
            content = _take(storage.attachment, index, attachments, taken)
        elif kind == "encoded":
            encoded = storage.encoded
            is_attached = encoded.WhichOneof("content") == "attachment"
            inner = _take(encoded.attachment, index, attachments, taken) if is_attached else encoded.inline
            content = Encoded(encoded, storage.size, inner)
        else:
            content = storage.inline
        if len(content) != storage.size:
            raise MalformedMessage(f"storage {index} says {storage.size} bytes, {len(content)} came")
        contents.append(content)
    return contents


def _take(attachment: int, index: int, attachments: Sequence[Bytes], taken: set[int]) -> Bytes:
    """The bytes of an attachment, for one storage only."""
    if attachment >= len(attachments):
        raise MalformedMessage(f"storage {index} is in attachment {attachment}, {len(attachments)} came")
    if attachment in taken:
        raise MalformedMessage(f"attachment {attachment} is used by two storages")
    taken.add(attachment)
    content = attachments[attachment]
    if isinstance(content, memoryview):
        if not content.contiguous:
            raise MalformedMessage(f"attachment {attachment} is not one run of bytes")
        content = content.cast("B")
    return content


def materialise(content: Content) -> torch.Tensor:
    """As a tensor of bytes: an attachment's own memory, a copy of what came inline, or what was decoded."""
    if isinstance(content, Encoded):
        return content.decode()
    adopted = None if isinstance(content, bytes) else adopt(content, torch.uint8)
    return _copy(content) if adopted is None else adopted


def _copy(content: bytes | Bytes) -> torch.Tensor:
    memory = torch.empty(len(content), dtype=torch.uint8, device="cpu")
    if type(content) is bytes:
        ctypes.memmove(memory.data_ptr(), content, len(content))
    elif len(content):
        memory.numpy()[:] = numpy.frombuffer(content, dtype=numpy.uint8)
    return memory


def adopt(content: Bytes, dtype: torch.dtype) -> torch.Tensor | None:
    """A tensor that looks at the memory itself. None if nobody may write to that, or its address is odd."""
    # An array keeps others from letting go of the memory, which torch does not do by itself.
    array = numpy.frombuffer(content, dtype=numpy.uint8) if isinstance(content, memoryview) else content
    if not len(array) or not array.flags.writeable or not array.flags.c_contiguous:
        return None
    if array.__array_interface__["data"][0] % 16:
        return None
    return torch.frombuffer(array, dtype=dtype)
