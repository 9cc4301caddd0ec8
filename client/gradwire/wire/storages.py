"""Which bytes travel.

A tensor is a view; what is sent is memory. The rules, in the order in which they are tried:

- A tensor without gaps is sent as the bytes from its first to its last element, strides kept, not copied.
- Tensors that share elements are sent as one storage from the first to the last byte of all of them, so
  that they share memory at the receiver in the same way. Where no tensor covers some byte of it, a copy is
  sent that has zeros there.
- Any other tensor with gaps is sent as a compact copy.

With a codec, the memory of a tensor that shares with no other is encoded as elements of its dtype. Memory
that several look at is only bytes to it, which no lossy codec takes: what is shared stays shared, and exact.

So no byte ever leaves the process that no sent tensor covers: the rest of a batch, or of the file that a
tensor was sliced from, stays here.
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
from .memory import as_bytes, as_carrier, contiguous_strides, is_dense, is_injective, span

__all__ = ["Attachment", "Region", "StorageWriter"]

# With more tensors than this in interleaved memory, which of them really share elements is not worked out
# pair by pair: they are sent as one storage.
_MOST_COMPARED = 64


class Attachment:
    """Bytes that travel beside the message. Holds on to the tensors whose own memory they are."""

    __slots__ = ("_owners", "_versions", "size", "view")

    def __init__(self, view: memoryview, owners: Sequence[torch.Tensor] = ()) -> None:
        self.view = view
        self.size = view.nbytes
        self._owners = [tensor for tensor in owners if not tensor.is_inference()]
        self._versions = [version_of(tensor) for tensor in self._owners]

    def check_unmodified(self) -> None:
        """Raises where a tensor was modified in place since it was encoded. For when the last byte is out.

        Tensors made in inference mode, copies, and numpy arrays have no version to compare.
        """
        for tensor, version in zip(self._owners, self._versions, strict=True):
            if version_of(tensor) != version:
                raise Unencodable(
                    f"a tensor of shape {tuple(tensor.shape)} was modified in place while being sent; "
                    "wait for the call before writing to it, or send a clone"
                )


class Region:
    """A tensor that has elements, and the memory from the first to the last of them."""

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
            self.end = self.start + span(self.shape, self.strides) * self.itemsize
            self.dense = is_dense(self.shape, self.strides)

    def one_of_each(self, carrier: torch.Tensor) -> torch.Tensor:
        """A view without the dimensions of stride 0, which only repeat what is there."""
        for dim in range(len(self.shape) - 1, -1, -1):
            if self.strides[dim] == 0 and self.shape[dim] > 1:
                carrier = carrier.narrow(dim, 0, 1)
        return carrier


_START = attrgetter("start")


class StorageWriter:
    """Fills the storages of one table, and collects the attachments."""

    def __init__(self, table: tensor_pb2.TensorTable, attach_from: int | None, inline_bytes: int) -> None:
        self._storages = table.storages
        self._attach_from = attach_from
        self._room = inline_bytes
        """How much more the message may hold before what is large travels beside it."""
        self.attachments: list[Attachment] = []
        self.count = 0
        self.saved = 0
        """Bytes that codecs spared."""

    def inline(self, content: bytes) -> int:
        """Adds bytes that travel in the message. Returns the storage's index."""
        storage = self._storages.add()
        storage.size = len(content)
        storage.inline = content
        self._room -= len(content)
        self.count += 1
        return self.count - 1

    def attach(self, view: memoryview, owners: Sequence[torch.Tensor] = ()) -> int:
        """Adds bytes that travel beside the message. Returns the storage's index."""
        storage = self._storages.add()
        storage.size = view.nbytes
        storage.attachment = len(self.attachments)
        self.attachments.append(Attachment(view, owners))
        self.count += 1
        return self.count - 1

    def is_attached(self, size: int) -> bool:
        """Whether a storage of that size travels as an attachment."""
        return self._attach_from is not None and size >= self._attach_from and size > self._room

    def copied(
        self, compact: torch.Tensor, codec: Codec | None = None, dtype: torch.dtype | None = None
    ) -> int:
        """Adds the memory of a contiguous CPU tensor that nobody else will write to."""
        size = compact.numel() * compact.element_size()
        if codec is not None and size >= COMPRESS_FROM:
            storage = self._encoded(as_bytes(compact, compact.data_ptr(), size), codec, dtype)
            if storage is not None:
                return storage
        if not self.is_attached(size):
            return self.inline(ctypes.string_at(compact.data_ptr(), size))
        return self.attach(as_bytes(compact, compact.data_ptr(), size).numpy().data)

    def _encoded(self, memory: torch.Tensor, codec: Codec, dtype: torch.dtype | None) -> int | None:
        """Adds memory made smaller, which is a copy of it; None if it had better go as it is."""
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
            self._room -= content.numel()
        self.saved += memory.numel() - content.numel()
        self.count += 1
        return self.count - 1

    def extent(self, start: int, size: int, owner: torch.Tensor, covered_by: Sequence[torch.Tensor]) -> int:
        """Adds memory as it lies in the storage of a tensor on the CPU, all of it covered by tensors."""
        if not self.is_attached(size):
            return self.inline(ctypes.string_at(start, size))
        # The array holds on to the storage: the view stays valid for as long as anybody has it.
        return self.attach(as_bytes(owner, start, size).numpy().data, covered_by)

    def array(self, array: numpy.ndarray[Any, Any]) -> int:
        """Adds the elements of a numpy array in row-major order."""
        if not self.is_attached(array.nbytes):
            return self.inline(array.tobytes())
        flat = numpy.ascontiguousarray(array).reshape(-1).view(numpy.uint8)
        return self.attach(flat.data)

    def place(self, regions: list[Region]) -> None:
        """Decides the storages of all tensors of the message, and writes where each tensor lies in them."""
        for group in _interleaved(regions):
            if len(group) == 1:
                self._place_alone(group[0])
            else:
                for sharing in _sharing(group):
                    if len(sharing) == 1:
                        self._place_alone(sharing[0])
                    else:
                        self._place_together(sharing)

    def _place_alone(self, region: Region) -> None:
        if region.dense:
            region.message.storage = self._extent_of(region.start, region.end, [region])
            _write_strides(region.message, region.shape, region.strides)
        elif is_injective(region.shape, region.strides):
            compact = region.one_of_each(as_carrier(region.tensor))
            kept = compact.shape
            compact = compact.to("cpu", copy=True, memory_format=torch.contiguous_format)
            region.message.storage = self.copied(compact, region.codec, region.tensor.dtype)
            strides = [
                stride if size == original else 0
                for stride, size, original in zip(contiguous_strides(kept), kept, region.shape, strict=True)
            ]
            _write_strides(region.message, region.shape, strides)
        else:
            self._place_together([region])

    def _place_together(self, regions: list[Region]) -> None:
        start = _aligned_start(regions)
        end = max(region.end for region in regions)
        if _covers(regions, start, end):
            storage = self._extent_of(start, end, regions)
        else:
            buffer = torch.zeros(end - start, dtype=torch.uint8, device="cpu")
            for region in regions:
                source = as_carrier(region.tensor)
                target = torch.empty(0, dtype=source.dtype, device="cpu").set_(
                    buffer.untyped_storage(),
                    (region.start - start) // region.itemsize,
                    region.shape,
                    region.strides,
                )
                region.one_of_each(target).copy_(region.one_of_each(source))
            storage = self.copied(buffer, regions[0].codec)
        for region in regions:
            region.message.storage = storage
            region.message.offset = (region.start - start) // region.itemsize
            _write_strides(region.message, region.shape, region.strides)

    def _extent_of(self, start: int, end: int, regions: list[Region]) -> int:
        """Adds memory as it lies, all of it covered by these tensors."""
        size = end - start
        tensor = regions[0].tensor
        codec = regions[0].codec
        dtype = tensor.dtype if len(regions) == 1 else None
        if not tensor.is_cpu:
            # .cpu() waits for the device, so what was computed before the call is what is sent.
            return self.copied(as_bytes(tensor, start, size).cpu(), codec, dtype)
        owner = _spanning(regions, start, end)
        if owner is None:
            content = ctypes.string_at(start, size)
            return self.attach(memoryview(content)) if self.is_attached(size) else self.inline(content)
        if codec is not None and size >= COMPRESS_FROM:
            storage = self._encoded(as_bytes(owner, start, size), codec, dtype)
            if storage is not None:
                return storage
        return self.extent(start, size, owner, [region.tensor for region in regions])


def _spanning(regions: list[Region], start: int, end: int) -> torch.Tensor | None:
    """The tensor whose storage has all of some memory.

    None where several storages lie over one memory (say, of numpy's), none of which spans it.
    """
    for region in regions:
        storage = region.tensor.untyped_storage()
        begin = storage.data_ptr()
        if begin <= start and end <= begin + storage.nbytes():
            return region.tensor
    return None


def _write_strides(message: tensor_pb2.Tensor, shape: Sequence[int], strides: Sequence[int]) -> None:
    if list(strides) != contiguous_strides(shape):
        message.strides.extend(strides)


def _interleaved(regions: list[Region]) -> Iterator[list[Region]]:
    """Groups of tensors whose memory, from the first to the last element, overlaps."""
    if len(regions) < 2:
        if regions:
            yield regions
        return
    regions = sorted(regions, key=_START)
    if not all(region.tensor.is_cpu for region in regions):
        # Addresses of different devices may be equal without meaning the same.
        regions.sort(key=lambda region: str(region.tensor.device))
    group = [regions[0]]
    end = regions[0].end
    for region in regions[1:]:
        if region.start < end and region.tensor.device == group[0].tensor.device:
            group.append(region)
            end = max(end, region.end)
        else:
            yield group
            group = [region]
            end = region.end
    yield group


def _sharing(group: list[Region]) -> Iterator[list[Region]]:
    """Splits a group into those that really share elements.

    The columns x[:, 0] and x[:, 1] interleave but share nothing. Sent as one storage they would cost as much
    as all of x.
    """
    if all(region.dense for region in group) or len(group) > _MOST_COMPARED:
        yield group
        return
    pending = list(group)
    while pending:
        found = [pending.pop(0)]
        for one in found:
            touching = [other for other in pending if _share_elements(one, other)]
            pending = [other for other in pending if other not in touching]
            found.extend(touching)
        yield found


class _Address:
    """Memory described to numpy, which never looks into it."""

    def __init__(self, region: Region) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (region.start, True),
            "shape": region.shape,
            "strides": tuple(stride * region.itemsize for stride in region.strides),
            "typestr": f"|V{region.itemsize}",
        }


def _share_elements(one: Region, other: Region) -> bool:
    if one.start >= other.end or other.start >= one.end:
        return False
    if one.dense and other.dense:
        return True
    try:
        return numpy.shares_memory(
            numpy.asarray(_Address(one)),
            numpy.asarray(_Address(other)),
            max_work=10_000,  # type: ignore[arg-type]
        )
    except (numpy.exceptions.TooHardError, ValueError):
        # numpy solves a Diophantine equation. Where that is too hard, keeping them together is always right.
        return True


def _covers(regions: list[Region], start: int, end: int) -> bool:
    """Whether tensors without gaps cover every byte."""
    reach = start
    for region in sorted(regions, key=_START):
        if region.dense and region.start <= reach:
            reach = max(reach, region.end)
    return reach >= end


def _aligned_start(regions: list[Region]) -> int:
    """The address, at or before the first tensor, from which each is a whole number of elements away."""
    first = min(region.start for region in regions)
    for start in range(first, first - 16, -1):
        if all((region.start - start) % region.itemsize == 0 for region in regions):
            return start
    shapes = ", ".join(str(region.shape) for region in regions)
    raise Unencodable(f"tensors of shapes {shapes} share memory at offsets that no storage can express")
