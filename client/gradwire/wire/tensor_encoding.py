"""Tensors -> TensorTable."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gradwire.proto.v1 import tensor_pb2
from gradwire.torch_internals import coo_indices, coo_values, is_functorch_wrapped, is_zerotensor

from .codecs import COMPRESS_FROM, Codec
from .dtypes import NUMBERS, QUANTIZED
from .memory import contiguous_strides, flip_signs, spanned_elements
from .storage_encoding import Attachment, StorageWriter, TensorSpan

__all__ = ["TensorWriter", "size_if_simple"]

_STRIDED = torch.strided
_Tensor: Any = torch.Tensor
_BY_ROWS = (_Tensor.crow_indices, _Tensor.col_indices, _Tensor.values)
_BY_COLUMNS = (_Tensor.ccol_indices, _Tensor.row_indices, _Tensor.values)
_COMPONENTS: dict[
    torch.layout, tuple[tensor_pb2.Layout, Sequence[Callable[[torch.Tensor], torch.Tensor]]]
] = {
    torch.sparse_coo: (tensor_pb2.LAYOUT_SPARSE_COO, (coo_indices, coo_values)),
    torch.sparse_csr: (tensor_pb2.LAYOUT_SPARSE_CSR, _BY_ROWS),
    torch.sparse_csc: (tensor_pb2.LAYOUT_SPARSE_CSC, _BY_COLUMNS),
    torch.sparse_bsr: (tensor_pb2.LAYOUT_SPARSE_BSR, _BY_ROWS),
    torch.sparse_bsc: (tensor_pb2.LAYOUT_SPARSE_BSC, _BY_COLUMNS),
}
_QUANTIZATION_SCHEMES = (torch.per_tensor_affine, torch.per_tensor_symmetric)
_CHANNEL_SCHEMES = (torch.per_channel_affine, torch.per_channel_symmetric)


def size_if_simple(tensor: torch.Tensor) -> int | None:
    """The bytes to send for a simple tensor; None for any other tensor.

    A simple tensor is a plain strided tensor on the CPU that is contiguous, or repeats one element, as the
    gradient of a sum does.
    """
    if not (
        (type(tensor) is torch.Tensor or type(tensor) is torch.nn.Parameter)
        and tensor.is_cpu
        and tensor.layout is _STRIDED
        and tensor.dtype in NUMBERS
        and not (tensor.is_quantized or tensor.is_nested)
        and not (tensor.is_neg() or tensor.is_conj() or is_zerotensor(tensor))
    ):
        return None
    if tensor.is_contiguous():
        size, shape = tensor.nbytes, tensor.shape
        # Dimensions of size 0 and 1 may have any stride in a contiguous tensor.
        if not size or (1 in shape and list(tensor.stride()) != contiguous_strides(shape)):
            return None
    elif not any(tensor.stride()):
        size = tensor.itemsize
    else:
        return None
    try:
        # Raises for a tensor without a storage, such as a tensor inside torch.func.
        is_whole = tensor.storage_offset() * tensor.itemsize + size <= tensor.untyped_storage().nbytes()
    except (RuntimeError, NotImplementedError):
        return None
    return size if is_whole else None


def _reason_against(tensor: torch.Tensor) -> str | None:
    """Why a tensor cannot be sent; None if it can."""
    if type(tensor) is not torch.Tensor and type(tensor) is not torch.nn.Parameter:
        return f"a tensor of type {type(tensor).__qualname__} cannot be sent; send a plain torch.Tensor"
    if tensor.is_nested:
        return "a nested tensor cannot be sent; send tensor.unbind() instead"
    if tensor.dtype not in NUMBERS:
        return f"a tensor of dtype {tensor.dtype} cannot be sent"
    if tensor.layout is not _STRIDED:
        if tensor.layout not in _COMPONENTS:
            return f"a tensor of layout {tensor.layout} cannot be sent; send tensor.to_dense() instead"
        if tensor.is_meta:
            return "a sparse meta tensor cannot be sent"
        return None
    if is_functorch_wrapped(tensor):
        return "a tensor inside torch.func (vmap, grad, ...) has no memory of its own and cannot be sent"
    if tensor.is_quantized:
        return _reason_against_quantized(tensor)
    if not tensor.is_meta and tensor.numel() and not is_zerotensor(tensor):
        needed = spanned_elements(tensor.shape, tensor.stride()) + tensor.storage_offset()
        if needed * tensor.element_size() > tensor.untyped_storage().nbytes():
            return "the tensor's storage was resized and no longer holds its elements"
    return None


def _reason_against_quantized(tensor: torch.Tensor) -> str | None:
    if tensor.is_meta:
        return "a quantized meta tensor cannot be sent"
    try:
        scheme = tensor.qscheme()
    except RuntimeError:
        return "a quantized tensor without scale and zero point cannot be sent"
    if scheme in _QUANTIZATION_SCHEMES or scheme in _CHANNEL_SCHEMES:
        return None
    return f"a tensor quantized with {scheme} cannot be sent"


class TensorWriter:
    """Collects the tensors of one message. `finish` writes them together, since some may share memory.

    `codec` is for all strided tensors that are added without a codec.
    """

    def __init__(self, attach_from: int | None, inline_bytes: int, codec: Codec | None = None) -> None:
        self.table = tensor_pb2.TensorTable()
        self.storages = StorageWriter(self.table, attach_from, inline_bytes)
        self.tensors: list[torch.Tensor] = []
        # By id(): `tensors` keeps every tensor alive, so that no two of them have the same id.
        self._indices: dict[int, int] = {}
        self._codec = codec
        self._codecs: dict[int, Codec] = {}
        self._sizes: list[int] = []
        """The sizes of the simple tensors, in bytes."""
        self._finished = False

    def add(self, tensor: torch.Tensor, codec: Codec | None = None) -> int:
        """The tensor's index in the table. Raises TypeError, with the reason, if it cannot be sent."""
        if codec is not None:
            self._codecs.setdefault(id(tensor), codec)
        index = self._indices.get(id(tensor))
        if index is not None:
            return index
        size = size_if_simple(tensor)
        if size is None:
            reason = _reason_against(tensor)
            if reason is not None:
                raise TypeError(reason)
        else:
            self._sizes.append(size)
        index = self._indices[id(tensor)] = len(self.tensors)
        self.tensors.append(tensor)
        return index

    def finish(self) -> tuple[tensor_pb2.TensorTable, list[Attachment]]:
        """The table, and the attachments that are sent beside it."""
        if self._finished:
            raise RuntimeError("finish() was called before; an encoder is for one message")
        self._finished = True
        if self.tensors:
            starts = self._starts_if_simple()
            if starts is None:
                self._write_all()
            else:
                self._write_simple(starts)
        return self.table, self.storages.attachments

    def _starts_if_simple(self) -> list[int] | None:
        """The address of each tensor, if all tensors are simple and share no memory; else None."""
        sizes = self._sizes
        if len(sizes) < len(self.tensors):
            return None
        if (self._codec is not None or self._codecs) and max(sizes) >= COMPRESS_FROM:
            return None
        starts = [tensor.data_ptr() for tensor in self.tensors]
        end = 0
        for start, size in sorted(zip(starts, sizes, strict=True)) if len(starts) > 1 else ():
            if start < end:
                return None
            end = start + size
        return starts

    def _write_simple(self, starts: list[int]) -> None:
        """Writes simple tensors that share no memory: a fast path."""
        for tensor, start, size in zip(self.tensors, starts, self._sizes, strict=True):
            message = self._describe(tensor)
            if size != tensor.nbytes:  # the tensor repeats one element
                message.strides.extend(tensor.stride())
            message.storage = self.storages.add_view(start, size, tensor, [tensor])

    def _write_all(self) -> None:
        spans: list[TensorSpan] = []
        sparse: list[tuple[tensor_pb2.Tensor, torch.Tensor]] = []
        for tensor in self.tensors:
            message = self._describe(tensor)
            if tensor.layout is _STRIDED:
                codec = self._codecs.get(id(tensor), self._codec)
                self._write_strided(message, tensor, spans, codec)
            else:
                sparse.append((message, tensor))
        count = len(self.tensors)
        # Components come after all tensors of the user, which so have the same index in `tensors` and in the
        # table.
        for message, tensor in sparse:
            message.layout, (*of_indices, of_values) = _COMPONENTS[tensor.layout]
            if tensor.layout is torch.sparse_coo:
                message.coalesced = tensor.is_coalesced()
            detached = tensor.detach()
            # The receiver copies the indices, and refuses expanded indices, which are larger than their
            # storage.
            components = [indices_of(detached).contiguous() for indices_of in of_indices]
            for component in (*components, of_values(detached)):
                self._write_strided(self._describe(component), component, spans)
                message.components.append(count)
                count += 1
        self.storages.add_tensors(spans)

    def _describe(self, tensor: torch.Tensor) -> tensor_pb2.Tensor:
        message = self.table.tensors.add()
        message.dtype = NUMBERS[tensor.dtype]
        message.shape.extend(tensor.shape)
        if not tensor.is_cpu:
            message.device = str(tensor.device)
        if tensor.requires_grad:
            message.requires_grad = True
        return message

    def _write_strided(
        self,
        message: tensor_pb2.Tensor,
        tensor: torch.Tensor,
        spans: list[TensorSpan],
        codec: Codec | None = None,
    ) -> None:
        if tensor.is_meta:
            if list(tensor.stride()) != contiguous_strides(tensor.shape):
                message.strides.extend(tensor.stride())
            return
        if tensor.dtype in QUANTIZED:
            _write_quantization(message.quantization, tensor)
        if tensor.numel() == 0:
            if list(tensor.stride()) != contiguous_strides(tensor.shape):
                message.strides.extend(tensor.stride())
            message.storage = self.storages.add_inline(b"")
            return
        if is_zerotensor(tensor):
            # A zero tensor stands for zeros, and has no memory.
            tensor = torch.zeros(tensor.shape, dtype=tensor.dtype, device="cpu")
        if tensor.is_conj() or tensor.is_neg():
            tensor = flip_signs(tensor.detach())
        spans.append(TensorSpan(message, tensor, codec))


def _write_quantization(message: tensor_pb2.Quantization, tensor: torch.Tensor) -> None:
    if tensor.qscheme() in _QUANTIZATION_SCHEMES:
        message.scales.append(tensor.q_scale())
        message.zero_points.append(tensor.q_zero_point())
    elif tensor.qscheme() in _CHANNEL_SCHEMES:
        message.scales.extend(tensor.q_per_channel_scales().tolist())
        message.zero_points.extend(tensor.q_per_channel_zero_points().tolist())
        message.axis = tensor.q_per_channel_axis()
    else:  # pragma: no cover - why_not has refused it
        raise TypeError(f"a tensor quantized with {tensor.qscheme()} cannot be sent")
