"""The memory of tensors -> storages of a TensorTable: decides which bytes are sent.

A tensor is a view; what is sent is memory. The rules, in the order in which they are tried:

- A tensor without gaps is sent as the bytes from its first to its last element, strides kept, not copied.
- Tensors that share elements are sent as one storage, from the first to the last byte of all of them, so that
  they share memory at the receiver in the same way. If some bytes in between belong to none of the tensors, a
  copy is sent that has zeros there.
- Any other tensor with gaps is sent as a compact copy.

A codec encodes the memory of a tensor that shares no memory as elements of the tensor's dtype. Memory that
several tensors view has no known dtype, and lossy codecs do not take it: it stays shared, and exact.

So only bytes that belong to a sent tensor leave the process: the rest of a batch, or of the file that a
tensor was sliced from, is never sent.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from operator import attrgetter
from typing import Any

import numpy
import torch

from gradwire.errors import Unencodable
from gradwire.proto.v1 import tensor_pb2
from gradwire.torch_internals import version_of

from .codecs import COMPRESS_FROM, Codec
from .memory import as_bytes, as_carrier, contiguous_strides, is_dense, is_injective, spanned_elements

__all__ = ["Attachment", "StorageWriter", "TensorSpan"]

# More tensors than this in overlapping memory are sent as one storage, without comparing each pair of them
# for shared elements.
_MAX_COMPARED = 64


class Attachment:
    """Bytes that are sent beside the message. Keeps the tensors alive whose own memory they are."""

    __slots__ = ("_owners", "_versions", "size", "view")

    def __init__(self, view: memoryview, owners: Sequence[torch.Tensor] = ()) -> None:
        self.view = view
        self.size = view.nbytes
        self._owners = [tensor for tensor in owners if not tensor.is_inference()]
        self._versions = [version_of(tensor) for tensor in self._owners]

    def check_unmodified(self) -> None:
        """Raises Unencodable if a tensor was modified in place since it was encoded. Called after the last
        byte was sent.

        Tensors made in inference mode, copies, and numpy arrays have no version counter to compare.
        """
        for tensor, version in zip(self._owners, self._versions, strict=True):
            if version_of(tensor) != version:
                raise Unencodable(
                    f"a tensor of shape {tuple(tensor.shape)} was modified in place while being sent; "
                    "wait for the call before writing to it, or send a clone"
                )


class TensorSpan:
    """A tensor that is not empty, and the memory from its first to its last element."""

    __slots__ = ("codec", "dense", "end", "itemsize", "message", "shape", "start", "strides", "tensor")

    def __init__(self, message: tensor_pb2.Tensor, tensor: torch.Tensor, codec: Codec | None = None) -> None:
        self.message = message
        self.tensor = tensor
        self.codec = codec
        self.itemsize = tensor.itemsize
        self.shape = tuple(tensor.shape)
        self.strides = tensor.stride()
        self.start = tensor.data_ptr()
        if tensor.is_contiguous():
            self.end = self.start + tensor.nbytes
            self.dense = True
        else:
            self.end = self.start + spanned_elements(self.shape, self.strides) * self.itemsize
            self.dense = is_dense(self.shape, self.strides)

    def without_repeats(self, carrier: torch.Tensor) -> torch.Tensor:
        """The carrier of the tensor narrowed to one element along dimensions of stride 0, which only repeat
        it."""
        for dim in range(len(self.shape) - 1, -1, -1):
            if self.strides[dim] == 0 and self.shape[dim] > 1:
                carrier = carrier.narrow(dim, 0, 1)
        return carrier


_START = attrgetter("start")


class StorageWriter:
    """Adds storages to one table, and collects the attachments."""

    def __init__(self, table: tensor_pb2.TensorTable, attach_from: int | None, inline_bytes: int) -> None:
        self._storages = table.storages
        self._attach_from = attach_from
        self._inline_bytes_left = inline_bytes
        """How many more bytes the message may hold before large storages are sent beside it."""
        self.attachments: list[Attachment] = []
        self.count = 0
        self.saved = 0
        """How many bytes the codecs saved."""

    def add_inline(self, content: bytes) -> int:
        """Adds a storage whose bytes are in the message. Returns the storage's index."""
        storage = self._storages.add()
        storage.size = len(content)
        storage.inline = content
        self._inline_bytes_left -= len(content)
        self.count += 1
        return self.count - 1

    def add_attachment(self, view: memoryview, owners: Sequence[torch.Tensor] = ()) -> int:
        """Adds a storage whose bytes are sent beside the message. Returns the storage's index."""
        storage = self._storages.add()
        storage.size = view.nbytes
        storage.attachment = len(self.attachments)
        self.attachments.append(Attachment(view, owners))
        self.count += 1
        return self.count - 1

    def is_attached(self, size: int) -> bool:
        """Whether a storage of that size becomes an attachment."""
        return self._attach_from is not None and size >= self._attach_from and size > self._inline_bytes_left

    def add_copy(
        self, compact: torch.Tensor, codec: Codec | None = None, dtype: torch.dtype | None = None
    ) -> int:
        """Adds the memory of a contiguous CPU tensor that is a copy, so that no other code writes to it."""
        size = compact.numel() * compact.element_size()
        if codec is not None and size >= COMPRESS_FROM:
            storage = self._add_encoded(as_bytes(compact, compact.data_ptr(), size), codec, dtype)
            if storage is not None:
                return storage
        if not self.is_attached(size):
            return self.add_inline(ctypes.string_at(compact.data_ptr(), size))
        return self.add_attachment(as_bytes(compact, compact.data_ptr(), size).numpy().data)

    def _add_encoded(self, memory: torch.Tensor, codec: Codec, dtype: torch.dtype | None) -> int | None:
        """Adds memory encoded by a codec; None if the codec leaves it unencoded."""
        encoded = codec.encode(memory, dtype)
        if encoded is None:
            return None
        content = encoded.content
        storage = self._storages.add()
        storage.size = memory.numel()
        storage.encoded.CopyFrom(encoded.message)
        if self.is_attached(content.numel()):
            storage.encoded.attachment = len(self.attachments)
            self.attachments.append(Attachment(content.numpy().data))
        else:
            storage.encoded.inline = content.numpy().tobytes()
            self._inline_bytes_left -= content.numel()
        self.saved += memory.numel() - content.numel()
        self.count += 1
        return self.count - 1

    def add_view(self, start: int, size: int, owner: torch.Tensor, covered_by: Sequence[torch.Tensor]) -> int:
        """Adds a range of the storage of a CPU tensor without copying it. `covered_by`: the tensors in the
        range."""
        if not self.is_attached(size):
            return self.add_inline(ctypes.string_at(start, size))
        # The view refers to the array, and the array to the storage, so the view stays valid.
        return self.add_attachment(as_bytes(owner, start, size).numpy().data, covered_by)

    def add_array(self, array: numpy.ndarray[Any, Any]) -> int:
        """Adds the elements of a numpy array in row-major order."""
        if not self.is_attached(array.nbytes):
            return self.add_inline(array.tobytes())
        flat = numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)
        return self.add_attachment(flat.data)

    def add_tensors(self, spans: list[TensorSpan]) -> None:
        """Adds the storages of all tensors of the message, and writes where each tensor lies in them."""
        for group in _overlapping_groups(spans):
            if len(group) == 1:
                self._add_alone(group[0])
            else:
                for sharing in _sharing_groups(group):
                    if len(sharing) == 1:
                        self._add_alone(sharing[0])
                    else:
                        self._add_together(sharing)

    def _add_alone(self, span: TensorSpan) -> None:
        if span.dense:
            span.message.storage = self._add_memory(span.start, span.end, [span])
            _write_strides(span.message, span.shape, span.strides)
        elif is_injective(span.shape, span.strides):
            compact = span.without_repeats(as_carrier(span.tensor))
            kept = compact.shape
            compact = compact.to("cpu", copy=True, memory_format=torch.contiguous_format)
            span.message.storage = self.add_copy(compact, span.codec, span.tensor.dtype)
            strides = [
                stride if size == original else 0
                for stride, size, original in zip(contiguous_strides(kept), kept, span.shape, strict=True)
            ]
            _write_strides(span.message, span.shape, strides)
        else:
            self._add_together([span])

    def _add_together(self, spans: list[TensorSpan]) -> None:
        start = _aligned_start(spans)
        end = max(span.end for span in spans)
        if _covers(spans, start, end):
            storage = self._add_memory(start, end, spans)
        else:
            buffer = torch.zeros(end - start, dtype=torch.uint8, device="cpu")
            for span in spans:
                source = as_carrier(span.tensor)
                target = torch.empty(0, dtype=source.dtype, device="cpu").set_(
                    buffer.untyped_storage(),
                    (span.start - start) // span.itemsize,
                    span.shape,
                    span.strides,
                )
                span.without_repeats(target).copy_(span.without_repeats(source))
            storage = self.add_copy(buffer, spans[0].codec)
        for span in spans:
            span.message.storage = storage
            span.message.offset = (span.start - start) // span.itemsize
            _write_strides(span.message, span.shape, span.strides)

    def _add_memory(self, start: int, end: int, spans: list[TensorSpan]) -> int:
        """Adds the memory from `start` to `end`, every byte of which belongs to one of the tensors."""
        size = end - start
        tensor = spans[0].tensor
        codec = spans[0].codec
        dtype = tensor.dtype if len(spans) == 1 else None
        if not tensor.is_cpu:
            # .cpu() waits for the device, so that the results of all earlier computations are sent.
            return self.add_copy(as_bytes(tensor, start, size).cpu(), codec, dtype)
        owner = _tensor_spanning(spans, start, end)
        if owner is None:
            content = ctypes.string_at(start, size)
            return (
                self.add_attachment(memoryview(content))
                if self.is_attached(size)
                else self.add_inline(content)
            )
        if codec is not None and size >= COMPRESS_FROM:
            storage = self._add_encoded(as_bytes(owner, start, size), codec, dtype)
            if storage is not None:
                return storage
        return self.add_view(start, size, owner, [span.tensor for span in spans])


def _tensor_spanning(spans: list[TensorSpan], start: int, end: int) -> torch.Tensor | None:
    """A tensor whose storage holds all memory from `start` to `end`.

    None if several storages view one memory, such as that of a numpy array, and none of them holds all of it.
    """
    for span in spans:
        storage = span.tensor.untyped_storage()
        begin = storage.data_ptr()
        if begin <= start and end <= begin + storage.nbytes():
            return span.tensor
    return None


def _write_strides(message: tensor_pb2.Tensor, shape: Sequence[int], strides: Sequence[int]) -> None:
    if list(strides) != contiguous_strides(shape):
        message.strides.extend(strides)


def _overlapping_groups(spans: list[TensorSpan]) -> Iterator[list[TensorSpan]]:
    """Groups of tensors whose spans overlap in memory."""
    if len(spans) < 2:
        if spans:
            yield spans
        return
    spans = sorted(spans, key=_START)
    if not all(span.tensor.is_cpu for span in spans):
        # Equal addresses on different devices are different memory.
        spans.sort(key=lambda span: str(span.tensor.device))
    group = [spans[0]]
    end = spans[0].end
    for span in spans[1:]:
        if span.start < end and span.tensor.device == group[0].tensor.device:
            group.append(span)
            end = max(end, span.end)
        else:
            yield group
            group = [span]
            end = span.end
    yield group


def _sharing_groups(group: list[TensorSpan]) -> Iterator[list[TensorSpan]]:
    """Splits tensors whose spans overlap into groups that share elements.

    The spans of the columns x[:, 0] and x[:, 1] overlap, but they share no elements. As one storage they
    would cost as much as all of x.
    """
    if all(span.dense for span in group) or len(group) > _MAX_COMPARED:
        yield group
        return
    pending = list(group)
    while pending:
        found = [pending.pop(0)]
        for member in found:
            sharing = [other for other in pending if _share_elements(member, other)]
            pending = [other for other in pending if other not in sharing]
            found.extend(sharing)
        yield found


class _Address:
    """Describes the memory of a tensor to numpy, which does not read it."""

    def __init__(self, span: TensorSpan) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (span.start, True),
            "shape": span.shape,
            "strides": tuple(stride * span.itemsize for stride in span.strides),
            "typestr": f"|V{span.itemsize}",
        }


def _share_elements(first: TensorSpan, second: TensorSpan) -> bool:
    if first.start >= second.end or second.start >= first.end:
        return False
    if first.dense and second.dense:
        return True
    try:
        return numpy.shares_memory(
            numpy.asarray(_Address(first)),
            numpy.asarray(_Address(second)),
            max_work=10_000,  # type: ignore[arg-type]
        )
    except (numpy.exceptions.TooHardError, ValueError):
        # numpy solves a Diophantine equation. If that is too hard, it is safe to assume that they share
        # elements.
        return True


def _covers(spans: list[TensorSpan], start: int, end: int) -> bool:
    """Whether the tensors without gaps together cover every byte from `start` to `end`."""
    covered_to = start
    for span in sorted(spans, key=_START):
        if span.dense and span.start <= covered_to:
            covered_to = max(covered_to, span.end)
    return covered_to >= end


def _aligned_start(spans: list[TensorSpan]) -> int:
    """The address at or before the first tensor from which the offset of each tensor is a whole number of its
    elements."""
    first = min(span.start for span in spans)
    for start in range(first, first - 16, -1):
        if all((span.start - start) % span.itemsize == 0 for span in spans):
            return start
    shapes = ", ".join(str(span.shape) for span in spans)
    raise Unencodable(f"tensors of shapes {shapes} share memory at offsets that no storage can express")
