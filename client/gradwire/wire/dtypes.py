"""torch.dtype <-> the numbers and names of the wire.

Elements are never converted. Where they have to be copied, for example to gather a view with gaps, they are
copied as integers of the same width, their *carrier*. That keeps NaN payloads, and works for the dtypes for
which torch has no copy kernel at all (int1 ... uint7).
"""

from __future__ import annotations

import sys
from typing import Final, NamedTuple, cast

import torch

from gradwire.proto.v1 import tensor_pb2

__all__ = [
    "BY_NUMBER",
    "CARRIERS",
    "DTYPES_BY_NAME",
    "NUMBERS",
    "QUANTIZED",
    "WireType",
    "dtype_name",
]

if sys.byteorder != "little":  # pragma: no cover
    raise ImportError("gradwire sends memory as it is: only little-endian machines are supported")


class WireType(NamedTuple):
    """A dtype that can be sent."""

    dtype: torch.dtype
    itemsize: int
    plain: bool
    """Neither quantized nor complex32: `torch.empty` takes it without a warning."""
    differentiable: bool


def dtype_name(dtype: torch.dtype) -> str:
    """The name of a dtype without the prefix: float32, not torch.float32."""
    return str(dtype).removeprefix("torch.")


# All dtypes of the installed torch, without aliases such as "half". Older versions lack some narrow integers.
DTYPES_BY_NAME: Final[dict[str, torch.dtype]] = {
    dtype_name(dtype): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)
}

QUANTIZED: Final[dict[torch.dtype, torch.dtype]] = {
    torch.qint8: torch.int8,
    torch.quint8: torch.uint8,
    torch.qint32: torch.int32,
}
"""The quantized dtypes that can be sent, with the dtype of their integers."""

# complex128 is its own carrier: no integer is that wide, and copying it is two plain 64-bit moves.
CARRIERS: Final[dict[int, torch.dtype]] = {
    1: torch.uint8,
    2: torch.int16,
    4: torch.int32,
    8: torch.int64,
    16: torch.complex128,
}
"""Width in bytes -> the carrier: the dtype as which elements of that width are copied."""


def _wire_types() -> dict[int, WireType]:
    known: dict[int, WireType] = {}
    for enum_name, number in tensor_pb2.DType.items():
        dtype = DTYPES_BY_NAME.get(enum_name.removeprefix("DTYPE_").lower())
        if dtype is not None:
            known[number] = WireType(
                dtype,
                dtype.itemsize,
                plain=dtype not in QUANTIZED and dtype is not torch.complex32,
                differentiable=dtype.is_floating_point or dtype.is_complex,
            )
    return known


BY_NUMBER: Final[dict[int, WireType]] = _wire_types()
"""Number on the wire -> dtype. Numbers for which the installed torch has no dtype are absent."""

NUMBERS: Final[dict[torch.dtype, tensor_pb2.DType]] = {
    wire_type.dtype: cast(tensor_pb2.DType, number) for number, wire_type in BY_NUMBER.items()
}
"""dtype -> number on the wire."""
