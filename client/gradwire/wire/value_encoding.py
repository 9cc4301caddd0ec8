"""Python values -> Value messages."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Iterable
from types import EllipsisType
from typing import Any, cast

import numpy
import torch

from gradwire.errors import Unencodable
from gradwire.proto.v1 import tensor_pb2, value_pb2

from .codecs import Codec
from .dtypes import DTYPES_BY_NAME, dtype_name
from .limits import MAX_DEPTH
from .storage_encoding import Attachment
from .tensor_encoding import TensorWriter
from .types import TypeRegistry, default_types, is_named_tuple

__all__ = ["ATTACH_FROM", "Encoder"]

_ARRAY_KINDS = frozenset("biufcmMUS")


class _Refused(Exception):
    """Why a value cannot be encoded, and the path to it from the outermost value, the innermost step first.

    The containers add their steps while the exception passes through them, so that values that can be encoded
    pay nothing for the path.
    """

    def __init__(self, reason: str) -> None:
        self.reason = reason
        self.steps: list[str] = []

    def within(self, step: str) -> _Refused:
        self.steps.append(step)
        return self


ATTACH_FROM = 64 * 1024
"""Storages of at least this many bytes may be sent beside a message instead of in it."""


class Encoder:
    """Turns the values of one message into protobuf. Tensors are collected in one table.

    Storages of at least `attach_from` bytes become attachments if they no longer fit into the first
    `inline_bytes` of the message; attachments are the tensors' own memory. With ``attach_from=None``
    everything is in the message. `ref_of` returns the ref for an object that stays in this process, and None
    for a value to be sent. A `codec` makes large tensors smaller.
    """

    def __init__(
        self,
        *,
        attach_from: int | None = ATTACH_FROM,
        inline_bytes: int = 0,
        codec: Codec | None = None,
        types: TypeRegistry | None = None,
        ref_of: Callable[[object], value_pb2.RemoteRef | None] | None = None,
    ) -> None:
        self._types = default_types if types is None else types
        self._ref_of = ref_of
        self._writer = TensorWriter(attach_from, inline_bytes, codec)
        self._arrays: dict[int, tuple[numpy.ndarray[Any, Any], int]] = {}
        self.tensors = self._writer.tensors
        """The tensors found so far; they have the same index here and in the table."""

    def value(self, obj: object, path: str) -> value_pb2.Value:
        """The message for one value. Raises Unencodable, which names the path to what cannot be encoded."""
        message = value_pb2.Value()
        try:
            self._fill(message, obj, 1)
        except _Refused as refused:
            full_path = path + "".join(reversed(refused.steps))
            raise Unencodable(f"{full_path}: {refused.reason}") from refused.__cause__
        return message

    def tensor(self, tensor: torch.Tensor, path: str = "tensor", codec: Codec | None = None) -> int:
        """The index of a tensor in the table. A tensor that is added several times is in the table once.

        `codec` takes the place of the encoder's codec for this tensor.
        """
        try:
            return self._writer.add(tensor, codec)
        except TypeError as error:
            raise Unencodable(f"{path}: {error}") from None

    @property
    def saved(self) -> int:
        """How many bytes the codecs saved. Known after `finish`."""
        return self._writer.storages.saved

    def finish(self) -> tuple[tensor_pb2.TensorTable, list[Attachment]]:
        """The table of all tensors, and the attachments of the message. Called once, at the end."""
        return self._writer.finish()

    def _fill(self, message: value_pb2.Value, obj: Any, depth: int) -> None:
        if depth > MAX_DEPTH:
            raise _Refused(f"nested more than {MAX_DEPTH} levels deep; does a container hold itself?")
        fill = _FILLERS.get(type(obj))
        if fill is None:
            ref = None if self._ref_of is None else self._ref_of(obj)
            if ref is not None:
                message.ref.CopyFrom(ref)
                return
            fill = _filler_for(obj)
        fill(self, message, obj, depth)

    def _none(self, message: value_pb2.Value, obj: None, depth: int) -> None:
        message.singleton = value_pb2.SINGLETON_NONE

    def _ellipsis(self, message: value_pb2.Value, obj: EllipsisType, depth: int) -> None:
        message.singleton = value_pb2.SINGLETON_ELLIPSIS

    def _boolean(self, message: value_pb2.Value, obj: bool, depth: int) -> None:
        message.boolean = obj

    def _integer(self, message: value_pb2.Value, obj: int, depth: int) -> None:
        if -(2**63) <= obj < 2**63:
            message.integer = obj
        else:
            message.big_integer = obj.to_bytes(obj.bit_length() // 8 + 1, "little", signed=True)

    def _real(self, message: value_pb2.Value, obj: float, depth: int) -> None:
        message.real = obj

    def _complex(self, message: value_pb2.Value, obj: complex, depth: int) -> None:
        message.complex.SetInParent()
        message.complex.real = obj.real
        message.complex.imaginary = obj.imag

    def _text(self, message: value_pb2.Value, obj: str, depth: int) -> None:
        try:
            message.text = obj
        except UnicodeEncodeError as error:
            raise _Refused(f"the str has a lone surrogate at index {error.start}, so is no text") from None

    def _binary(self, message: value_pb2.Value, obj: bytes, depth: int) -> None:
        message.binary = obj

    def _list(self, message: value_pb2.Value, obj: list[object], depth: int) -> None:
        self._items(message.list, obj, depth)

    def _tuple(self, message: value_pb2.Value, obj: tuple[object, ...], depth: int) -> None:
        self._items(message.tuple, obj, depth)

    def _set(self, message: value_pb2.Value, obj: set[object], depth: int) -> None:
        self._items(message.set, obj, depth)

    def _frozen_set(self, message: value_pb2.Value, obj: frozenset[object], depth: int) -> None:
        self._items(message.frozen_set, obj, depth)

    def _items(self, message: value_pb2.List, items: Iterable[object], depth: int) -> None:
        message.SetInParent()
        add = message.items.add
        index = 0
        try:
            for item in items:
                self._fill(add(), item, depth + 1)
                index += 1
        except _Refused as refused:
            is_ordered = isinstance(items, list | tuple)
            raise refused.within(f"[{index}]" if is_ordered else "{...}") from refused.__cause__

    def _dict(self, message: value_pb2.Value, obj: dict[object, object], depth: int) -> None:
        message.dict.SetInParent()
        add = message.dict.entries.add
        for key, item in obj.items():
            entry = add()
            try:
                self._fill(entry.key, key, depth + 1)
            except _Refused as refused:
                raise refused.within(f".keys()[{_quoted(key)}]") from refused.__cause__
            try:
                self._fill(entry.value, item, depth + 1)
            except _Refused as refused:
                raise refused.within(f"[{_quoted(key)}]") from refused.__cause__

    def _slice(self, message: value_pb2.Value, obj: slice, depth: int) -> None:
        for name in ("start", "stop", "step"):
            try:
                self._fill(getattr(message.slice, name), getattr(obj, name), depth + 1)
            except _Refused as refused:
                raise refused.within(f".{name}") from refused.__cause__

    def _dtype(self, message: value_pb2.Value, obj: torch.dtype, depth: int) -> None:
        name = dtype_name(obj)
        if name not in DTYPES_BY_NAME:
            raise _Refused(f"{obj} cannot be sent")
        message.dtype = name

    def _device(self, message: value_pb2.Value, obj: torch.device, depth: int) -> None:
        message.device = str(obj)

    def _size(self, message: value_pb2.Value, obj: torch.Size, depth: int) -> None:
        message.size.SetInParent()
        message.size.sizes.extend(obj)

    def _tensor(self, message: value_pb2.Value, obj: torch.Tensor, depth: int) -> None:
        try:
            message.tensor = self._writer.add(obj)
        except TypeError as error:
            raise _Refused(str(error)) from None

    def _array(self, message: value_pb2.Value, obj: numpy.ndarray[Any, Any], depth: int) -> None:
        dtype = obj.dtype
        if dtype.kind not in _ARRAY_KINDS or not dtype.itemsize:
            raise _Refused(f"a numpy array of dtype {dtype} cannot be sent")
        if dtype.char in "gG":
            raise _Refused(f"a numpy array of {dtype} cannot be sent: its form depends on the machine")
        # Keeps the array alive, so that no other array gets its id while the message is encoded.
        _, storage = self._arrays.get(id(obj)) or self._arrays.setdefault(
            id(obj), (obj, self._writer.storages.add_array(obj))
        )
        message.array.dtype = dtype.str
        message.array.shape.extend(obj.shape)
        message.array.storage = storage

    def _scalar(self, message: value_pb2.Value, obj: numpy.generic, depth: int) -> None:
        if isinstance(obj, numpy.str_ | numpy.bytes_) and obj[-1:] in ("\0", b"\0"):
            raise _Refused("a numpy string that ends in NUL cannot be sent: numpy drops it; use str or bytes")
        self._array(message, numpy.asarray(obj), depth)
        message.array.scalar = True

    def _enum(self, message: value_pb2.Value, obj: enum.Enum, depth: int) -> None:
        cls = type(obj)
        message.enum_member.type = self._name_of(cls)
        if isinstance(obj, enum.Flag):
            members = [member for member in cls if member.value and obj & cast(Any, member) == member]
            if cls(sum(cast(int, member.value) for member in members)) != obj:
                raise _Refused(f"{obj!r} has bits without a name")
            message.enum_member.member = "|".join(member.name for member in members)
        else:
            message.enum_member.member = obj.name

    def _named_tuple(self, message: value_pb2.Value, obj: Any, depth: int) -> None:
        self._record(message.record, type(obj), zip(obj._fields, obj, strict=True), depth)

    def _dataclass(self, message: value_pb2.Value, obj: Any, depth: int) -> None:
        names = [field.name for field in dataclasses.fields(obj)]
        try:
            values = [(name, getattr(obj, name)) for name in names]
        except AttributeError as error:
            raise _Refused(f"a field is not set: {error}") from None
        self._record(message.record, type(obj), values, depth)

    def _record(
        self, message: value_pb2.Record, cls: type, values: Iterable[tuple[str, object]], depth: int
    ) -> None:
        message.type = self._name_of(cls)
        for name, item in values:
            field = message.fields.add()
            field.name = name
            try:
                self._fill(field.value, item, depth + 1)
            except _Refused as refused:
                raise refused.within(f".{name}") from refused.__cause__

    def _name_of(self, cls: type) -> str:
        try:
            return self._types.name_of(cls)
        except LookupError as error:
            raise _Refused(str(error)) from None

    def _ref(self, message: value_pb2.Value, obj: Any, depth: int) -> None:
        message.ref.CopyFrom(obj.__gradwire_ref__())


Filler = Callable[[Encoder, value_pb2.Value, Any, int], None]

_FILLERS: dict[type, Filler] = {
    type(None): Encoder._none,
    EllipsisType: Encoder._ellipsis,
    bool: Encoder._boolean,
    int: Encoder._integer,
    float: Encoder._real,
    complex: Encoder._complex,
    str: Encoder._text,
    bytes: Encoder._binary,
    list: Encoder._list,
    tuple: Encoder._tuple,
    set: Encoder._set,
    frozenset: Encoder._frozen_set,
    dict: Encoder._dict,
    slice: Encoder._slice,
    torch.dtype: Encoder._dtype,
    torch.device: Encoder._device,
    torch.Size: Encoder._size,
    torch.Tensor: Encoder._tensor,
    torch.nn.Parameter: Encoder._tensor,
    numpy.ndarray: Encoder._array,
}


def _filler_for(obj: object) -> Filler:
    """The filler for an object whose type is not in `_FILLERS`. The more specific kinds are tried first."""
    cls = type(obj)
    if hasattr(cls, "__gradwire_ref__"):
        return Encoder._ref
    if isinstance(obj, enum.Enum):
        return Encoder._enum
    if isinstance(obj, torch.Tensor):
        return Encoder._tensor
    if isinstance(obj, numpy.generic):
        return Encoder._scalar
    if dataclasses.is_dataclass(cls):
        return Encoder._dataclass
    if is_named_tuple(cls):
        return Encoder._named_tuple
    if isinstance(obj, dict):
        return Encoder._dict
    if isinstance(obj, tuple) and cls.__module__ == "torch.return_types":
        return Encoder._tuple
    for base in _FILLERS:
        if isinstance(obj, base):
            raise _Refused(
                f"a value of type {cls.__module__}.{cls.__qualname__}, a subclass of {base.__qualname__}, "
                f"cannot be sent; convert it to {base.__qualname__}"
            )
    raise _Refused(f"a value of type {cls.__module__}.{cls.__qualname__} cannot be sent")


def _quoted(key: object) -> str:
    """A key as it would be written in Python, if that is short: args[0]["mask"]."""
    if isinstance(key, str):
        text = '"' + key.encode("utf-8", "backslashreplace").decode() + '"'
    elif isinstance(key, int | float | complex | bytes | tuple | enum.Enum | None):
        text = repr(key)
    else:
        text = f"<{type(key).__qualname__}>"
    return text if len(text) <= 60 else text[:57] + "..."
