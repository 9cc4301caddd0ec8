"""Tensors as plain memory: the same bytes viewed as another dtype, and tensors over given bytes.

Every `torch.empty` names its device. Otherwise a `with torch.device("cuda")` block of the user would decide
where the bytes go.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .dtypes import CARRIERS

__all__ = [
    "as_bytes",
    "as_carrier",
    "build",
    "contiguous_strides",
    "flip_signs",
    "is_dense",
    "is_injective",
    "spanned_elements",
]

_SCRATCH = bytearray(16)


def build(
    dtype: torch.dtype, memory: torch.Tensor, offset: int, shape: Sequence[int], strides: Sequence[int]
) -> torch.Tensor:
    """A tensor of any dtype over the storage of another tensor. `offset` counts elements of `dtype`.

    The caller has checked that all elements lie within the storage. Not made with `torch.empty`, which warns
    for complex32.
    """
    empty = torch.frombuffer(_SCRATCH, dtype=dtype, count=1)
    return empty.set_(memory.untyped_storage(), offset, shape, strides)


def as_carrier(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory viewed as its carrier, which torch copies bit for bit. Drops conj and neg flags."""
    empty = torch.empty(0, dtype=CARRIERS[tensor.element_size()], device=tensor.device)
    return empty.set_(tensor.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())


def as_bytes(tensor: torch.Tensor, start: int, size: int) -> torch.Tensor:
    """`size` bytes from address `start` on, in the storage of `tensor`."""
    storage = tensor.untyped_storage()
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(storage, start - storage.data_ptr(), (size,), (1,))


def flip_signs(tensor: torch.Tensor) -> torch.Tensor:
    """A compact copy of a conj or neg view, with the negation carried out.

    Sign bits are flipped as integers: torch's own resolve_neg may quiet a signalling NaN of a half, and its
    resolve_conj warns of complex32.
    """
    part_size = tensor.element_size() // 2 if tensor.is_complex() else tensor.element_size()
    storage = tensor.untyped_storage()
    parts = torch.empty(0, dtype=CARRIERS[part_size], device=tensor.device)
    if tensor.is_complex():
        shape = (*tensor.shape, 2)
        strides = (*(2 * stride for stride in tensor.stride()), 1)
        parts.set_(storage, 2 * tensor.storage_offset(), shape, strides)
    else:
        parts.set_(storage, tensor.storage_offset(), tensor.shape, tensor.stride())
    flipped = parts.clone(memory_format=torch.contiguous_format)
    sign = torch.iinfo(flipped.dtype).min
    if tensor.is_conj():
        flipped[..., 1] ^= sign
    if tensor.is_neg():
        flipped ^= sign
    if tensor.device.type != "cpu":
        flipped = flipped.cpu()
    shape = tuple(tensor.shape)
    return build(tensor.dtype, flipped, 0, shape, contiguous_strides(shape))


def contiguous_strides(shape: Sequence[int]) -> list[int]:
    """The strides that torch gives a contiguous tensor."""
    strides = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= size or 1
    strides.reverse()
    return strides


def spanned_elements(shape: Sequence[int], strides: Sequence[int]) -> int:
    """How many elements of memory lie from the first to the last element of a tensor that is not empty."""
    return 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))


def is_dense(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether the elements leave no gap in memory, in whatever order the dimensions lie."""
    reach = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride > reach:
            return False
        reach += (size - 1) * stride
    return True


def is_injective(shape: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether no two elements share memory, except along dimensions of stride 0.

    Conservative: it may return False for a tensor whose elements share no memory.
    """
    reach = 1
    for stride, size in sorted(zip(strides, shape, strict=True)):
        if size > 1 and stride > 0:
            if stride < reach:
                return False
            reach += (size - 1) * stride
    return True
