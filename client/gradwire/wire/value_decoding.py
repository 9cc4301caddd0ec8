"""Value messages -> Python values."""

from __future__ import annotations

import dataclasses
import enum
import re
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy
import torch

from gradwire.errors import MalformedMessage, TypeMismatch, WireError
from gradwire.proto.v1 import tensor_pb2, value_pb2

from .dtypes import DTYPES_BY_NAME
from .hashing import check_dict_keys, check_set_items, unhashable
from .limits import Limits
from .storage_decoding import Buffer
from .tensor_decoding import TensorReader, check_shape
from .types import TypeRegistry, default_types, is_named_tuple

__all__ = ["Decoder"]

# numpy's own parser of dtype strings accepts far more, such as structured types.
_ARRAY_DTYPE = re.compile(
    r"\|b1|\|[iu]1|[<>][iu][248]|[<>]f[248]|[<>]c(8|16)"
    r"|\|S[1-9][0-9]{0,8}|[<>]U[1-9][0-9]{0,7}"
    r"|[<>][mM]8(\[[0-9]{0,9}(Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as|generic)\])?"
)
Container = TypeVar("Container", set[Any], frozenset[Any], dict[Any, Any])
_DEVICE = re.compile(r"[a-z_]{1,32}(:[0-9]{1,4})?")


class Decoder:
    """Turns the messages that an Encoder made back into values.

    The constructor checks and builds all tensors; `value` decodes one value. `tensors` starts with the
    tensors of the sender, in the sender's order; the components of sparse tensors come at the end. They do
    not require grad yet: `slots` says which tensors did at the sender, and `devices` on which devices they
    were. Entries of `tensors` may be replaced before `value` is called. The memory of writable
    attachments is used without copying.

    Raises MalformedMessage for a message that is not valid, and TypeMismatch for a dataclass, named tuple or
    enum that is not registered here, or has other fields.
    """

    def __init__(
        self,
        table: tensor_pb2.TensorTable,
        attachments: Sequence[Buffer] = (),
        *,
        limits: Limits = Limits(),  # noqa: B008 - frozen
        types: TypeRegistry | None = None,
        resolve_ref: Callable[[value_pb2.RemoteRef], object] | None = None,
    ) -> None:
        self._limits = limits
        self._types = default_types if types is None else types
        self._resolve_ref = resolve_ref
        self._reader = TensorReader(table, attachments, limits)
        self.tensors = self._reader.tensors
        self.slots = [index for index, is_wanted in enumerate(self._reader.requires_grad) if is_wanted]
        """Which tensors required grad at the sender."""
        self.devices = self._reader.devices
        self.is_shared = self._reader.is_shared
        """Whether several tensors view the same storage."""
        self.saved = self._reader.saved
        """Bytes that codecs spared."""

    def keep_requires_grad(self) -> None:
        """Makes the tensors that required grad at the sender require grad here, as leaves."""
        for slot in self.slots:
            self.tensors[slot].requires_grad_()

    def value(self, message: value_pb2.Value, path: str = "value") -> object:
        """The value of one message. `path` names the value in errors."""
        try:
            return self._value(message, 1)
        except (MalformedMessage, TypeMismatch) as error:
            raise type(error)(f"{path}: {error}") from error.__cause__

    def _value(self, message: value_pb2.Value, depth: int) -> Any:
        if depth > self._limits.max_depth:
            raise MalformedMessage(f"nested more than {self._limits.max_depth} levels deep")
        kind = message.WhichOneof("kind")
        if kind is None:
            raise MalformedMessage("a value of an unknown kind")
        if kind in _DIRECT:
            return getattr(message, kind)
        read: Callable[[Any, int], Any] = getattr(self, f"_{kind}")
        return read(getattr(message, kind), depth)

    def _singleton(self, singleton: int, depth: int) -> Any:
        if singleton == value_pb2.SINGLETON_NONE:
            return None
        if singleton == value_pb2.SINGLETON_ELLIPSIS:
            return ...
        raise MalformedMessage(f"singleton {singleton} is not known here")

    def _big_integer(self, content: bytes, depth: int) -> int:
        return int.from_bytes(content, "little", signed=True)

    def _complex(self, message: value_pb2.Complex, depth: int) -> complex:
        return complex(message.real, message.imaginary)

    def _list(self, message: value_pb2.List, depth: int) -> list[Any]:
        depth += 1
        return [self._value(item, depth) for item in message.items]

    def _tuple(self, message: value_pb2.List, depth: int) -> tuple[Any, ...]:
        return tuple(self._list(message, depth))

    def _set(self, message: value_pb2.List, depth: int) -> set[Any]:
        items = self._list(message, depth)
        check_set_items(items)
        return _make_hashed(set, items)

    def _frozen_set(self, message: value_pb2.List, depth: int) -> frozenset[Any]:
        items = self._list(message, depth)
        check_set_items(items)
        return _make_hashed(frozenset, items)

    def _dict(self, message: value_pb2.Dict, depth: int) -> dict[Any, Any]:
        depth += 1
        entries = [
            (self._value(entry.key, depth), self._value(entry.value, depth)) for entry in message.entries
        ]
        check_dict_keys([key for key, _ in entries])
        return _make_hashed(dict, entries)

    def _slice(self, message: value_pb2.Slice, depth: int) -> slice:
        depth += 1
        return slice(
            self._value(message.start, depth),
            self._value(message.stop, depth),
            self._value(message.step, depth),
        )

    def _dtype(self, name: str, depth: int) -> torch.dtype:
        dtype = DTYPES_BY_NAME.get(name)
        if dtype is None:
            raise MalformedMessage(f"torch.{name} is not known here")
        return dtype

    def _device(self, text: str, depth: int) -> torch.device:
        if not _DEVICE.fullmatch(text):
            raise MalformedMessage(f"{text!r} is no device")
        try:
            return torch.device(text)
        except (RuntimeError, ValueError) as error:
            raise MalformedMessage(f"{text!r} is no device that torch knows here") from error

    def _size(self, message: value_pb2.Size, depth: int) -> torch.Size:
        return torch.Size(message.sizes)

    def _tensor(self, index: int, depth: int) -> torch.Tensor:
        if index >= len(self.tensors):
            raise MalformedMessage(f"tensor {index} is missing, there are {len(self.tensors)}")
        return self.tensors[index]

    def _array(self, message: value_pb2.NumpyArray, depth: int) -> Any:
        if not _ARRAY_DTYPE.fullmatch(message.dtype):
            raise MalformedMessage(f"{message.dtype!r} is no numpy dtype that may be sent")
        shape = message.shape[:]
        if message.scalar and shape:
            raise MalformedMessage(f"a numpy scalar of shape {shape}")
        elements = check_shape(shape, "a numpy array", self._limits)
        try:
            dtype = numpy.dtype(message.dtype)
            memory = self._reader.memory(message.storage, elements * dtype.itemsize)
            # numpy takes at most 64 dimensions, older versions 32.
            array: numpy.ndarray[Any, Any] = numpy.ndarray(shape, dtype, memory.numpy())
        except MalformedMessage:
            raise
        except (TypeError, ValueError, OverflowError) as error:
            raise MalformedMessage(f"numpy refuses an array of {message.dtype} and shape {shape}") from error
        if not message.scalar:
            return array
        try:
            return array[()]
        except ValueError as error:
            raise MalformedMessage(f"a numpy scalar of {message.dtype} that is no valid text") from error

    def _record(self, message: value_pb2.Record, depth: int) -> Any:
        cls = self._type_of(message.type)
        depth += 1
        values = {field.name: self._value(field.value, depth) for field in message.fields}
        if len(values) != len(message.fields):
            raise MalformedMessage(f"a field of {message.type!r} comes twice")
        if is_named_tuple(cls):
            names = cls._fields  # type: ignore[attr-defined]
            if set(names) != values.keys():
                raise TypeMismatch(
                    f"{message.type!r} has fields {list(names)} at the receiving end, and {list(values)} "
                    "were received"
                )
            return cls._make(values[name] for name in names)  # type: ignore[attr-defined]
        if issubclass(cls, enum.Enum):
            raise TypeMismatch(f"{message.type!r} is an enum at the receiving end, a record was received")
        fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
        unknown = values.keys() - fields.keys()
        if unknown:
            raise TypeMismatch(f"{message.type!r} has no fields {sorted(unknown)} at the receiving end")
        try:
            instance = cls(**{name: item for name, item in values.items() if fields[name].init})
            for name, item in values.items():
                if not fields[name].init:
                    object.__setattr__(instance, name, item)
        except WireError:
            raise
        except Exception as error:
            # The constructor of the user's class may raise anything for values that it does not take.
            raise TypeMismatch(
                f"{message.type!r} cannot be made of {list(values)} at the receiving end: "
                f"{type(error).__name__}: {error}"
            ) from error
        return instance

    def _enum_member(self, message: value_pb2.EnumMember, depth: int) -> enum.Enum:
        cls = self._type_of(message.type)
        if not issubclass(cls, enum.Enum):
            raise TypeMismatch(f"{message.type!r} is no enum at the receiving end")
        try:
            if issubclass(cls, enum.Flag):
                flags = cls(0)
                for name in message.member.split("|") if message.member else ():
                    flags |= cls[name]
                return flags
            return cls[message.member]
        except (KeyError, ValueError) as error:
            raise TypeMismatch(
                f"{message.type!r} has no member {message.member!r} at the receiving end"
            ) from error

    def _type_of(self, name: str) -> type:
        try:
            return self._types.type_of(name)
        except LookupError as error:
            raise TypeMismatch(str(error)) from None

    def _ref(self, message: value_pb2.RemoteRef, depth: int) -> object:
        if self._resolve_ref is None:
            raise MalformedMessage("a RemoteRef was received where none is expected")
        return self._resolve_ref(message)


# Kinds whose Python value is the value of the protobuf field.
_DIRECT = frozenset({"boolean", "integer", "real", "text", "binary"})


def _make_hashed(make: Callable[[list[Any]], Container], items: list[Any]) -> Container:
    try:
        made = make(items)
    except Exception as error:
        raise unhashable(error) from error
    if len(made) != len(items):
        raise MalformedMessage("a key or an item of a set comes twice")
    return made
