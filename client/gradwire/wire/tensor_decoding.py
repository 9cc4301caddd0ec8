"""TensorTable -> tensors.

There are two passes. The first compares every number of the message with the received bytes, and allocates
nothing. The second builds the tensors. Only the values of the indices of sparse tensors are checked in the
second pass.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import torch

from gradwire.errors import MalformedMessage, ResourceExhausted
from gradwire.proto.v1 import tensor_pb2
from gradwire.torch_internals import (
    make_per_channel_quantized,
    make_per_tensor_quantized,
    make_unchecked_compressed,
    make_unchecked_coo,
    validate_compressed,
    validate_coo,
)

from .dtypes import BY_NUMBER, CARRIERS, QUANTIZED, WireType
from .limits import Limits
from .memory import build, contiguous_strides, spanned_elements
from .storage_decoding import Buffer, EncodedStorage, check_storages, materialise, zero_copy_tensor

__all__ = ["TensorReader"]

# The largest size that torch can represent.
_LARGEST = 2**63 - 1
_SPARSE_LAYOUTS = {
    tensor_pb2.LAYOUT_SPARSE_COO: torch.sparse_coo,
    tensor_pb2.LAYOUT_SPARSE_CSR: torch.sparse_csr,
    tensor_pb2.LAYOUT_SPARSE_CSC: torch.sparse_csc,
    tensor_pb2.LAYOUT_SPARSE_BSR: torch.sparse_bsr,
    tensor_pb2.LAYOUT_SPARSE_BSC: torch.sparse_bsc,
}
_CPU = torch.device("cpu")
_INDEX_TYPES = (torch.int32, torch.int64)


class _Strided(NamedTuple):
    """A strided tensor whose fields have been checked."""

    wire_type: WireType
    shape: list[int]
    strides: list[int] | None
    """None for a contiguous tensor."""
    offset: int
    size: int
    """The bytes of all elements, without gaps."""
    storage: int | None
    """None for a meta tensor."""
    quantization: tensor_pb2.Quantization | None


class TensorReader:
    """Checks one table, and builds its tensors.

    `tensors` are in the order of the table: first the tensors of the sender, then the components of sparse
    tensors.
    """

    def __init__(self, table: tensor_pb2.TensorTable, attachments: Sequence[Buffer], limits: Limits) -> None:
        self._limits = limits
        self._contents = check_storages(table, attachments)
        self.saved = 0
        """Bytes that codecs spared."""
        for content in self._contents:
            if isinstance(content, EncodedStorage):
                self.saved += content.saved
        self._memory: dict[int, torch.Tensor] = {}
        self.is_shared = False
        """Whether several tensors view the same storage."""
        messages = table.tensors[:]
        if len(messages) == 1:
            only = self._check_simple(messages[0])
            if only is not None:
                self.tensors = [self._build_strided(only, None)]
                self.requires_grad = [messages[0].requires_grad]
                self.devices = ["cpu"]
                return
        if len(messages) > limits.max_tensors:
            raise MalformedMessage(
                f"{len(messages)} tensors were received, at most {limits.max_tensors} are taken"
            )
        checked: list[_Strided | None] = []
        uses = [0] * len(self._contents)
        for index, message in enumerate(messages):
            strided = self._check_simple(message)
            if strided is None:
                if not 0 <= message.layout <= 1:
                    values = _check_sparse(message, index, messages, limits)
                    self._check_span(
                        message.shape[:], prod(message.shape), self._storage_capacity(values), index
                    )
                else:
                    strided = self._check_strided(message, index)
            checked.append(strided)
            if strided is not None and strided.storage is not None:
                uses[strided.storage] += 1

        self.is_shared = any(count > 1 for count in uses)
        # Strided tensors are built first: the components of a sparse tensor come after it in the table.
        built = [None if strided is None else self._build_strided(strided, uses) for strided in checked]
        self.tensors = [
            _build_sparse(messages[index], index, built) if tensor is None else tensor
            for index, tensor in enumerate(built)
        ]
        self.requires_grad = [message.requires_grad for message in messages]
        self.devices = [message.device or "cpu" for message in messages]

    def memory(self, storage: int, needed: int) -> torch.Tensor:
        """The memory of a storage of `needed` bytes; the same memory each time. For numpy arrays."""
        if storage >= len(self._contents):
            raise MalformedMessage(f"storage {storage} is missing, there are {len(self._contents)}")
        if len(self._contents[storage]) != needed:
            raise MalformedMessage(
                f"storage {storage} has {len(self._contents[storage])} bytes where {needed} are needed"
            )
        return self._materialise(storage)

    def _check_simple(self, message: tensor_pb2.Tensor) -> _Strided | None:
        """A fast path for a contiguous tensor that fills its storage; None if the full check is needed."""
        if (
            not 0 <= message.layout <= 1
            or message.device
            or message.offset
            or message.strides
            or message.components
        ):
            return None
        wire_type = BY_NUMBER.get(message.dtype)
        storage = message.storage
        if wire_type is None or not wire_type.plain or storage >= len(self._contents):
            return None
        if message.HasField("quantization") or (message.requires_grad and not wire_type.differentiable):
            return None
        shape = message.shape[:]
        elements = prod(shape)
        size = elements * wire_type.itemsize
        if size != len(self._contents[storage]) or (
            shape and (min(shape) < 1 or len(shape) > self._limits.max_dims)
        ):
            return None
        return _Strided(wire_type, shape, None, 0, size, storage, None)

    def _check_strided(self, message: tensor_pb2.Tensor, index: int) -> _Strided:
        wire_type = BY_NUMBER.get(message.dtype)
        if wire_type is None:
            raise MalformedMessage(f"tensor {index} has dtype {message.dtype}, which is not known here")
        if message.requires_grad and not wire_type.differentiable:
            raise MalformedMessage(f"tensor {index} of {wire_type.dtype} cannot require grad")
        shape = message.shape[:]
        elements = check_shape(shape, f"tensor {index}", self._limits)
        strides: list[int] | None = None
        if message.strides:
            strides = message.strides[:]
            if len(strides) != len(shape):
                raise MalformedMessage(
                    f"tensor {index} has {len(shape)} dimensions and {len(strides)} strides"
                )
            if min(strides) < 0 or max(strides) > _LARGEST >> 1:
                raise MalformedMessage(f"tensor {index} has strides {strides}")
        if message.components:
            raise MalformedMessage(f"tensor {index} is strided and has components")
        size = elements * wire_type.itemsize
        reach = (
            size if strides is None or not elements else spanned_elements(shape, strides) * wire_type.itemsize
        )
        quantization = message.quantization if message.HasField("quantization") else None
        if (quantization is not None) != (wire_type.dtype in QUANTIZED):
            raise MalformedMessage(
                f"tensor {index} of {wire_type.dtype}: quantization is missing or not allowed"
            )
        if quantization is not None:
            _check_quantization(quantization, shape, index)
        if message.device == "meta":
            if quantization is not None or reach > _LARGEST >> 1 or message.offset:
                raise MalformedMessage(f"tensor {index} is not a valid meta tensor")
            self._check_span(shape, elements, 0, index)
            return _Strided(wire_type, shape, strides, 0, size, None, None)
        storage = message.storage
        if storage >= len(self._contents):
            raise MalformedMessage(f"tensor {index} views storage {storage}, there are {len(self._contents)}")
        available = len(self._contents[storage])
        if message.offset * wire_type.itemsize + reach > available:
            raise MalformedMessage(
                f"tensor {index} needs {reach} bytes from element {message.offset} on, "
                f"storage {storage} has {available}"
            )
        self._check_span(shape, elements, available // wire_type.itemsize, index)
        return _Strided(wire_type, shape, strides, message.offset, size, storage, quantization)

    def _storage_capacity(self, message: tensor_pb2.Tensor) -> int:
        """How many elements of a tensor's dtype its storage holds."""
        wire_type = BY_NUMBER.get(message.dtype)
        if wire_type is None or message.storage >= len(self._contents):
            return 0  # the check of that tensor itself will refuse it
        return len(self._contents[message.storage]) // wire_type.itemsize

    def _check_span(self, shape: list[int], elements: int, received: int, index: int) -> None:
        """Raises ResourceExhausted if a tensor has more elements than the limit. `received`: how many
        elements the received bytes hold, which are always allowed."""
        limit = self._limits.max_tensor_elements
        if elements > max(limit, received):
            raise ResourceExhausted(
                f"tensor {index} of shape {shape} spans {elements} elements, and the bytes of {received} "
                f"were received; at most {limit} may be spanned so (max_tensor_elements)"
            )

    def _build_strided(self, strided: _Strided, uses: list[int] | None) -> torch.Tensor:
        """Builds a tensor. `uses`: how many tensors view each storage; None if this is the only tensor."""
        wire_type, shape, strides, offset, size, storage, quantization = strided
        if storage is None:
            return _build_meta(wire_type, shape, strides)
        if strides is None and wire_type.plain and (uses is None or uses[storage] == 1):
            content = self._contents[storage]
            if len(content) == size:
                if isinstance(content, bytes):
                    # Copied into memory of torch, which is aligned, and which the user may resize.
                    tensor = torch.empty(*shape or ((),), dtype=wire_type.dtype, device=_CPU)
                    ctypes.memmove(tensor.data_ptr(), content, size)
                    return tensor
                received = None
                if not isinstance(content, EncodedStorage):
                    received = zero_copy_tensor(content, wire_type.dtype)
                if received is not None:
                    # Resized in place: autograd forbids in-place operations on a view that a recv node
                    # returns.
                    return received if len(shape) == 1 else received.resize_(shape)
        memory = self._materialise(storage)
        strides = contiguous_strides(shape) if strides is None else strides
        if quantization is not None:
            return _build_quantized(wire_type.dtype, quantization, memory, offset, shape, strides)
        return build(wire_type.dtype, memory, offset, shape, strides)

    def _materialise(self, storage: int) -> torch.Tensor:
        """The memory of a storage; the same for all tensors that view it."""
        memory = self._memory.get(storage)
        if memory is None:
            memory = self._memory[storage] = materialise(self._contents[storage])
        return memory


def check_shape(shape: list[int], what: str, limits: Limits) -> int:
    """The number of elements. Raises MalformedMessage for too many dimensions, or impossible sizes."""
    if len(shape) > limits.max_dims:
        raise MalformedMessage(f"{what} has {len(shape)} dimensions, at most {limits.max_dims} are taken")
    elements = 1
    largest = 1
    for size in shape:
        if size < 0:
            raise MalformedMessage(f"{what} has shape {shape}")
        elements *= size
        largest *= size or 1
    # An empty tensor of shape (0, 2**62, 2**62) has strides that torch cannot represent.
    if largest > _LARGEST >> 5:
        raise MalformedMessage(f"{what} has shape {shape}")
    return elements


def _build_meta(wire_type: WireType, shape: list[int], strides: list[int] | None) -> torch.Tensor:
    strides = contiguous_strides(shape) if strides is None else strides
    # Made with the carrier's dtype, because torch warns when a complex32 tensor is made.
    carrier = CARRIERS[wire_type.itemsize]
    return torch.empty_strided(shape, strides, dtype=carrier, device="meta").view(wire_type.dtype)


def _check_quantization(message: tensor_pb2.Quantization, shape: list[int], index: int) -> None:
    if message.HasField("axis"):
        if message.axis >= len(shape):
            raise MalformedMessage(f"tensor {index} is quantized along axis {message.axis} of {len(shape)}")
        expected = shape[message.axis]
    else:
        expected = 1
    if len(message.scales) != expected or len(message.zero_points) != expected:
        raise MalformedMessage(
            f"tensor {index} has {len(message.scales)} scales and {len(message.zero_points)} zero points "
            f"where {expected} are needed"
        )


def _build_quantized(
    dtype: torch.dtype,
    message: tensor_pb2.Quantization,
    memory: torch.Tensor,
    offset: int,
    shape: list[int],
    strides: list[int],
) -> torch.Tensor:
    try:
        empty = _despite_warning(lambda: _quantized_empty(dtype, message, shape))
    except RuntimeError as error:
        raise MalformedMessage(f"torch refuses the quantization: {error}") from error
    return empty.set_(memory.untyped_storage(), offset, shape, strides)


def _despite_warning(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Calls `make` again if it raised a warning.

    torch warns once per process that compressed sparse tensors are beta, and that quantized tensors are
    deprecated. If a filter turns that warning into an error, it would look as if the message were malformed.
    The second call does not warn. (`warnings.catch_warnings` changes the filters of all threads, so a library
    must not use it.)
    """
    try:
        return make()
    except UserWarning:
        return make()


def _quantized_empty(dtype: torch.dtype, message: tensor_pb2.Quantization, shape: list[int]) -> torch.Tensor:
    integers = QUANTIZED[dtype]
    if not message.HasField("axis"):
        one = torch.empty(1, dtype=integers, device="cpu")
        return make_per_tensor_quantized(one, message.scales[0], message.zero_points[0])
    thin = [size if dim == message.axis else min(size, 1) for dim, size in enumerate(shape)]
    return make_per_channel_quantized(
        torch.empty(thin, dtype=integers, device="cpu"),
        torch.tensor(list(message.scales), dtype=torch.float64, device="cpu"),
        torch.tensor(list(message.zero_points), dtype=torch.int64, device="cpu"),
        message.axis,
    )


def _check_sparse(
    message: tensor_pb2.Tensor, index: int, messages: list[tensor_pb2.Tensor], limits: Limits
) -> tensor_pb2.Tensor:
    """Checks a sparse tensor. Returns the entry of its values."""
    layout = _SPARSE_LAYOUTS.get(message.layout)
    if layout is None:
        raise MalformedMessage(f"tensor {index} has layout {message.layout}, which is not known here")
    if len(message.components) != (2 if layout is torch.sparse_coo else 3):
        raise MalformedMessage(f"tensor {index} of {layout} has {len(message.components)} components")
    for component in message.components:
        if component >= len(messages):
            raise MalformedMessage(
                f"tensor {index} has component {component}, there are {len(messages)} tensors"
            )
        # All components are strided, so there are no cycles.
        if not 0 <= messages[component].layout <= 1 or messages[component].device == "meta":
            raise MalformedMessage(f"tensor {index} has component {component}, which is not strided")
    wire_type = BY_NUMBER.get(message.dtype)
    if wire_type is None or messages[message.components[-1]].dtype != message.dtype or not wire_type.plain:
        raise MalformedMessage(
            f"tensor {index} has dtype {message.dtype}, its values another dtype or an unknown one"
        )
    if message.requires_grad and not wire_type.differentiable:
        raise MalformedMessage(f"tensor {index} of {wire_type.dtype} cannot require grad")
    if len(message.shape) > limits.max_dims:
        raise MalformedMessage(f"tensor {index} has {len(message.shape)} dimensions")
    elements = 1
    for size in message.shape:
        if size < 0:
            raise MalformedMessage(f"tensor {index} has shape {list(message.shape)}")
        elements *= size or 1
    if elements > _LARGEST >> 5:
        raise MalformedMessage(f"tensor {index} has shape {list(message.shape)}")
    return messages[message.components[-1]]


def _build_sparse(message: tensor_pb2.Tensor, index: int, built: list[torch.Tensor | None]) -> torch.Tensor:
    components = [built[component] for component in message.components]
    *indices, values = [component for component in components if component is not None]
    layout = _SPARSE_LAYOUTS[message.layout]
    shape = message.shape[:]
    if any(part.dtype not in _INDEX_TYPES or part.is_quantized for part in indices):
        raise MalformedMessage(f"tensor {index} has indices that are not integers")
    # The indices are copied before they are checked, so that nothing can change them afterwards: neither
    # another tensor over the same bytes nor a sender in whose shared memory they lie. Wrong indices could
    # address any memory.
    if any(part.nbytes > part.untyped_storage().nbytes() for part in indices):
        raise MalformedMessage(f"tensor {index} has indices that are larger than their storage")
    indices = [part.clone(memory_format=torch.contiguous_format) for part in indices]
    if layout in (torch.sparse_bsr, torch.sparse_bsc):
        # torch's own check accepts blocks of size 0, and to_dense() divides by that size, which ends the
        # process.
        first = indices[0].dim()
        if values.dim() < first + 2 or 0 in values.shape[first : first + 2]:
            raise MalformedMessage(f"tensor {index} has blocks of shape {list(values.shape[first:])}")
    # Checked by separate functions: the check_invariants argument of the constructors changes a setting of
    # the whole process while they run, which other threads would see.
    try:
        if layout is torch.sparse_coo:
            validate_coo(indices[0], values, shape, message.coalesced)
            return make_unchecked_coo(
                indices[0], values, shape, dtype=values.dtype, layout=layout, is_coalesced=message.coalesced
            )
        validate_compressed(indices[0], indices[1], values, shape, layout)
        return _despite_warning(
            lambda: make_unchecked_compressed(
                indices[0], indices[1], values, shape, dtype=values.dtype, layout=layout
            )
        )
    except (RuntimeError, IndexError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise MalformedMessage(f"tensor {index} is no valid {layout} tensor: {reason}") from error
