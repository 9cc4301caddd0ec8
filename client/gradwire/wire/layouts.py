"""Values as structure and content: where the receiver knows the structure, only the content is sent.

`flatten` takes values apart, at both ends alike; what it calls the key of values is their structure, and a
`Layout` is made from nothing that the key does not say. What `flatten` cannot take apart goes in full.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import count
from struct import Struct
from struct import error as StructError
from types import EllipsisType
from typing import Any, NamedTuple

import torch

from gradwire.errors import MalformedMessage

from .storage_decoding import Buffer
from .storage_encoding import Attachment
from .tensor_contents import EMPTY, TensorMemory, read_memory, write_memory
from .tensor_encoding import size_if_simple

__all__ = ["Flat", "Layout", "PlannedValues", "flatten"]

_MOST_TOKENS = 4096
_MOST_DEPTH = 16
_MOST_CHARACTERS = 256

_CODES: dict[type, str] = {bool: "?", int: "q", float: "d"}
"""Scalars are sent with each message, since they differ from one to the next."""
_CONSTANTS = (type(None), EllipsisType, str, torch.dtype)
"""Values of these types are part of the structure."""
_CONTAINERS = (list, tuple, dict)


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
            dtype, size = value.dtype, size_if_simple(value)
            if size is None or size != value.nbytes or dtype not in EMPTY:
                raise _Unplannable  # dtype, shape and the bytes at its address are not all there is to say
            key += (torch.Tensor, dtype, value.shape, value.requires_grad)
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
        self._sizes = [tensor.nbytes for tensor in flat.tensors]
        self.slots = [index for index, tensor in enumerate(flat.tensors) if tensor.requires_grad]
        """Which tensors require grad."""
        self._tensors = [
            TensorMemory(EMPTY[tensor.dtype], tensor.shape, size)
            for tensor, size in zip(flat.tensors, self._sizes, strict=True)
        ]
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
        memory, attachments = write_memory(flat.tensors, self._sizes)
        return self._scalars.pack(*flat.scalars) + memory, attachments

    def read(self, body: bytes, at: int, attachments: Sequence[Buffer]) -> PlannedValues:
        """The values whose scalars and tensors begin at `at` in a body."""
        try:
            scalars = self._scalars.unpack_from(body, at)
        except StructError as error:
            raise MalformedMessage(f"a body of {len(body)} bytes lacks scalars") from error
        tensors = read_memory(self._tensors, body, at + self._scalars.size, attachments)
        return PlannedValues(self, tensors, scalars)

    def build(self, tensors: Sequence[torch.Tensor], scalars: Sequence[Any]) -> list[Any]:
        leaves = [*tensors, *scalars, *self._constants]
        if self._is_flat:
            return list(map(leaves.__getitem__, self._nodes))  # type: ignore[arg-type]
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
