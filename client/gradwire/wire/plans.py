"""Plans: the structure of a message that repeats is described once over a link, and left out from then on.

A plan works like a prepared statement. The first calls of a function go in full, as the messages of the
contract. One of them gives its structure a number: the function and its modes, the containers among the
arguments, the dtype and shape of each tensor. Once its response has said that the number is kept, calls of
the same structure name the number, and bring only ids, scalars and the bytes of tensors. The structures of
results are numbered in the same way, for each plan by itself.

`flatten` takes values apart, at both ends alike; what it calls the key of values is their structure, and a
`Layout` is made from the key alone. What `flatten` cannot take apart goes in full.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from itertools import count
from struct import Struct
from struct import error as StructError
from types import EllipsisType
from typing import Any, NamedTuple

import torch

from gradwire.errors import MalformedMessage

from .dtypes import BY_NUMBER
from .memory import as_bytes
from .storage_decoding import Buffer, zero_copy_tensor
from .storage_encoding import Attachment
from .tensor_encoding import size_if_simple

__all__ = [
    "EMPTY",
    "LARGEST_INLINE",
    "Flat",
    "Layout",
    "MemoryReader",
    "PlannedValues",
    "flatten",
    "write_memory",
]

LARGEST_INLINE = 64 * 1024
_MOST_INLINE = 1024 * 1024
"""Tensors of more bytes, and those for which a message would have more of them, are attachments. Both ends
rely on these numbers."""
_MOST_TOKENS = 4096
_MOST_DEPTH = 16
_MOST_CHARACTERS = 256

_CODES: dict[type, str] = {bool: "?", int: "q", float: "d"}
"""Scalars are sent with each message, since they differ from one to the next."""
_CONSTANTS = (type(None), EllipsisType, str, torch.dtype)
"""Values of these types are part of the structure."""
_CONTAINERS = (list, tuple, dict)

EMPTY = {
    wire_type.dtype: torch.frombuffer(bytearray(16), dtype=wire_type.dtype, count=1)[:0]
    for wire_type in BY_NUMBER.values()
    if wire_type.plain
}
"""An empty tensor of each dtype. Its `new_empty` takes half the time of `torch.empty` with a dtype and a
device, and heeds no ``with torch.device(...)`` block of the user either."""


class _Unplannable(Exception):
    """Something can only be said in full."""


# -- taking values apart


class Flat(NamedTuple):
    """Values that were taken apart."""

    key: list[Any]
    """Their structure: tokens in the order of the values, containers before what is in them. A tensor is
    `torch.Tensor`, its dtype, its shape and whether it requires grad; a scalar is its type; a constant is
    None and the constant; a list, tuple or dict is its type and its length or keys."""
    tensors: list[torch.Tensor]
    scalars: list[Any]


def flatten(values: Sequence[object]) -> Flat | None:
    """Takes values apart; None if something in them can only be said in full."""
    if len(values) > _MOST_TOKENS:
        return None
    flat = Flat([], [], [])
    try:
        _flatten(values, flat, 1)
    except _Unplannable:
        return None
    if len(flat.tensors) > 1 and _share_memory(flat.tensors):
        return None  # which the same tensor twice does, too
    return flat if len(flat.key) <= _MOST_TOKENS else None


def _flatten(values: Any, flat: Flat, depth: int) -> None:
    key, tensors, scalars = flat
    for value in values:
        kind = type(value)
        if kind is torch.Tensor or kind is torch.nn.Parameter:
            if not _is_plain(value):
                raise _Unplannable
            key += (torch.Tensor, value.dtype, value.shape, value.requires_grad)
            tensors.append(value)
        elif kind in _CODES:
            if kind is int and not -(2**63) <= value < 2**63:
                raise _Unplannable
            key.append(kind)
            scalars.append(value)
        elif kind in _CONSTANTS:
            if kind is str and len(value) > _MOST_CHARACTERS:
                raise _Unplannable
            key += (None, value)
        else:
            # Large ones are given up before their items are looked at, which would take long.
            if depth == _MOST_DEPTH or kind not in _CONTAINERS or len(key) + len(value) > _MOST_TOKENS:
                raise _Unplannable
            if kind is not dict:
                key += (kind, len(value))
                _flatten(value, flat, depth + 1)
            elif all(type(name) is str and len(name) <= _MOST_CHARACTERS for name in value):
                key += (kind, tuple(value))
                _flatten(value.values(), flat, depth + 1)
            else:
                raise _Unplannable


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether dtype, shape and the bytes at its address are all there is to say of a tensor."""
    size = size_if_simple(tensor)
    return size is not None and size == tensor.nbytes and tensor.dtype in EMPTY


def _share_memory(tensors: Sequence[torch.Tensor]) -> bool:
    end = 0
    for start, size in sorted([(tensor.data_ptr(), tensor.nbytes) for tensor in tensors]):
        if start < end:
            return True
        end = start + size
    return False


# -- structures


class _Container(NamedTuple):
    kind: type
    names: Sequence[str]
    """The keys of a dict."""
    nodes: list[_Node]


_Node = int | _Container
"""A container, or the place of a value among all tensors, then all scalars, then all constants."""


class Layout:
    """The structure of some values, as both ends of a link know it."""

    def __init__(self, values: int, flat: Flat) -> None:
        """`values`: how many were taken apart."""
        self.sizes = [tensor.nbytes for tensor in flat.tensors]
        self.slots = [index for index, tensor in enumerate(flat.tensors) if tensor.requires_grad]
        """Which tensors require grad."""
        self._likes = [EMPTY[tensor.dtype] for tensor in flat.tensors]
        self._shapes = [tensor.shape for tensor in flat.tensors]
        self._scalars = Struct("<" + "".join(_CODES[type(scalar)] for scalar in flat.scalars))
        self._constants: list[object] = []
        places = count(), count(len(flat.tensors)), count(len(flat.tensors) + len(flat.scalars))
        self._nodes = self._nodes_of(iter(flat.key), values, *places)
        self._is_flat = all(isinstance(node, int) for node in self._nodes)

    def _nodes_of(
        self,
        key: Iterator[Any],
        values: int,
        tensors: Iterator[int],
        scalars: Iterator[int],
        constants: Iterator[int],
    ) -> list[_Node]:
        nodes: list[_Node] = []
        for _ in range(values):
            token = next(key)
            if token is torch.Tensor:
                next(key), next(key), next(key)
                nodes.append(next(tensors))
            elif token is None:
                self._constants.append(next(key))
                nodes.append(next(constants))
            elif token in _CODES:
                nodes.append(next(scalars))
            else:
                names = next(key)
                size = len(names) if token is dict else names
                inner = self._nodes_of(key, size, tensors, scalars, constants)
                nodes.append(_Container(token, names if token is dict else (), inner))
        return nodes

    def write(self, flat: Flat) -> tuple[bytes, list[Attachment]]:
        """What a message says of values of this structure."""
        inline, attachments = write_memory(flat.tensors, self.sizes)
        return b"".join((self._scalars.pack(*flat.scalars), *inline)), attachments

    def read(self, body: bytes, at: int, attachments: Sequence[Buffer]) -> PlannedValues:
        """The values whose scalars and tensors begin at `at` in a body."""
        try:
            scalars = self._scalars.unpack_from(body, at)
        except StructError as error:
            raise MalformedMessage(f"a body of {len(body)} bytes lacks scalars") from error
        reader = MemoryReader(body, at + self._scalars.size, attachments)
        tensors = list(map(reader.read, self._likes, self._shapes, self.sizes))
        reader.check_end()
        return PlannedValues(self, tensors, scalars)

    def build(self, tensors: Sequence[torch.Tensor], scalars: Sequence[Any]) -> list[Any]:
        leaves = [*tensors, *scalars, *self._constants]
        if self._is_flat:
            return [leaves[node] for node in self._nodes]  # type: ignore[index]
        return _build(self._nodes, leaves)


class PlannedValues:
    """Values that came by a plan. What a `Decoder` is for values that came in full."""

    __slots__ = ("_layout", "_scalars", "slots", "tensors")
    is_shared = False
    """Values that share memory go in full."""

    def __init__(self, layout: Layout, tensors: list[torch.Tensor], scalars: Sequence[Any]) -> None:
        self._layout = layout
        self._scalars = scalars
        self.tensors = tensors
        """May be replaced before `values` is called."""
        self.slots: Sequence[int] = layout.slots
        """Which of them required grad at the sender."""

    def keep_requires_grad(self) -> None:
        """As `Decoder.keep_requires_grad`."""
        for slot in self.slots:
            self.tensors[slot].requires_grad_()

    def values(self) -> list[Any]:
        return self._layout.build(self.tensors, self._scalars)


def _build(nodes: Sequence[_Node], leaves: Sequence[Any]) -> list[Any]:
    values: list[Any] = []
    for node in nodes:
        if isinstance(node, int):
            values.append(leaves[node])
        else:
            inner = _build(node.nodes, leaves)
            values.append(
                dict(zip(node.names, inner, strict=True)) if node.kind is dict else node.kind(inner)
            )
    return values


# -- the memory of tensors


def write_memory(
    tensors: Sequence[torch.Tensor], sizes: Sequence[int]
) -> tuple[list[bytes], list[Attachment]]:
    """The bytes of tensors, which are contiguous: those of small ones in order, as they stand at the end of a
    body, and the others as attachments."""
    inline: list[bytes] = []
    attachments: list[Attachment] = []
    left = _MOST_INLINE
    for tensor, size in zip(tensors, sizes, strict=True):
        if size <= LARGEST_INLINE and size <= left:
            left -= size
            inline.append(ctypes.string_at(tensor.data_ptr(), size))
        else:
            # The view refers to the array, and the array to the storage, so the view stays valid.
            view = as_bytes(tensor, tensor.data_ptr(), size).numpy().data
            attachments.append(Attachment(view, [tensor]))
    return inline, attachments


class MemoryReader:
    """Reads what `write_memory` wrote."""

    __slots__ = ("_at", "_attachments", "_body", "_left", "_used")

    def __init__(self, body: bytes, at: int, attachments: Sequence[Buffer]) -> None:
        self._body = body
        self._at = at
        self._attachments = attachments
        self._left = _MOST_INLINE
        self._used = 0

    def read(self, like: torch.Tensor, shape: Sequence[int], size: int) -> torch.Tensor:
        """The next tensor, which has the dtype of `like` and `size` bytes."""
        if size > LARGEST_INLINE or size > self._left:
            return self._attached(like, shape, size)
        self._left -= size
        end = self._at + size
        if end > len(self._body):
            raise MalformedMessage(f"a body of {len(self._body)} bytes lacks bytes of tensors")
        # Copied into memory of torch, which is aligned, and which the user may resize.
        tensor = like.new_empty(shape)
        ctypes.memmove(tensor.data_ptr(), self._body[self._at : end], size)
        self._at = end
        return tensor

    def _attached(self, like: torch.Tensor, shape: Sequence[int], size: int) -> torch.Tensor:
        if self._used == len(self._attachments) or len(self._attachments[self._used]) != size:
            raise MalformedMessage(f"attachment {self._used} does not have the {size} bytes of its tensor")
        content = self._attachments[self._used]
        self._used += 1
        tensor = zero_copy_tensor(content, like.dtype)
        if tensor is None:
            tensor = like.new_empty(shape)
            ctypes.memmove(tensor.data_ptr(), bytes(content), size)
            return tensor
        # Resized in place: autograd forbids in-place operations on a view that a recv node returns.
        return tensor if len(shape) == 1 else tensor.resize_(shape)

    def check_end(self) -> None:
        """Raises if there is more than was read."""
        if self._at != len(self._body) or self._used != len(self._attachments):
            raise MalformedMessage("a message has more bytes or attachments than its structure says")
