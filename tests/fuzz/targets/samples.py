"""Real values and tensors, of which corpora are made."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, NamedTuple

import numpy
import torch

from gradwire.wire import TypeRegistry

__all__ = ["TYPES", "tensors", "touch", "values"]


@dataclasses.dataclass
class Point:
    x: float
    y: float = 0.0
    tags: tuple[str, ...] = dataclasses.field(default=(), init=False)


class Pair(NamedTuple):
    left: object
    right: object


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Rights(enum.Flag):
    READ = 1
    WRITE = 2


TYPES = TypeRegistry()
for _type in (Point, Pair, Colour, Rights):
    TYPES.register(_type)


def _quantized() -> list[torch.Tensor]:
    plain = torch.arange(8.0).reshape(2, 4)
    per_channel = torch.quantize_per_channel(
        plain, torch.tensor([0.5, 0.25]), torch.tensor([1, 2]), 0, torch.qint8
    )
    return [torch.quantize_per_tensor(plain, 0.5, 3, torch.quint8), per_channel]


def _sparse() -> list[torch.Tensor]:
    dense = torch.eye(4)
    dense[1, 2] = 5.0
    return [
        dense.to_sparse_coo(),
        dense.to_sparse_csr(),
        dense.to_sparse_csc(),
        dense.to_sparse_bsr((2, 2)),
        dense.to_sparse_bsc((2, 2)),
    ]


def tensors() -> dict[str, list[torch.Tensor]]:
    grid = torch.arange(24.0).reshape(2, 3, 4)
    return {
        "one": [torch.arange(6.0).reshape(2, 3)],
        "grad": [torch.arange(6.0).requires_grad_()],
        "scalar": [torch.tensor(2.5, dtype=torch.float64)],
        "empty": [torch.empty(0, 3)],
        "views": [grid[0], grid[1].t(), grid[:, ::2, 1:3], grid.expand(5, 2, 3, 4)],
        "expanded": [torch.ones(1).expand(1000, 3)],
        "integers": [
            torch.arange(4, dtype=dtype) for dtype in (torch.int8, torch.int32, torch.int64, torch.uint8)
        ],
        "narrow": [torch.ones(3, dtype=dtype) for dtype in (torch.float16, torch.bfloat16, torch.bool)],
        "complex": [torch.tensor([1 + 2j, 3 - 1j]), torch.tensor([1 + 2j]).conj()],
        "meta": [torch.empty(3, 4, device="meta")],
        "sparse": _sparse(),
        "quantized": _quantized(),
        "large": [torch.arange(1000, dtype=torch.int64)],
    }


def values() -> dict[str, Any]:
    return {
        "scalars": [None, ..., True, -5, 2**80, 1.5, 1 - 2j, "text", b"bytes"],
        "containers": [[1, [2, (3, "x")]], {"a": 1, (1, 2): {3.0}}, frozenset({1, "b"}), slice(1, None, 2)],
        "torch": [torch.float32, torch.device("cpu"), torch.Size([2, 3])],
        "tensors": {"x": torch.arange(6.0).reshape(2, 3), "y": [torch.ones(2, dtype=torch.int64)]},
        "sparse": torch.eye(3).to_sparse_csr(),
        "arrays": [
            numpy.arange(6, dtype="<i4").reshape(2, 3),
            numpy.float64(0.5),
            numpy.array(["ab", "c"]),
            numpy.array(["2020-01-01"], dtype="M8[D]"),
            numpy.array([True, False]),
        ],
        "records": [Point(1.0, 2.0), Pair(1, "r"), Colour.RED, Rights.READ | Rights.WRITE],
        "many": set(range(100)),
    }


def touch(tensor: torch.Tensor) -> None:
    """Reads all elements, as whoever gets the tensor will: wrong indices and sizes would lead elsewhere."""
    if tensor.device.type != "cpu" or tensor.numel() > 1 << 20:
        return
    try:
        if tensor.layout is not torch.strided:
            tensor = tensor.to_dense()
        if tensor.is_quantized:
            tensor = tensor.dequantize()
        tensor.clone()
        repr(tensor.sum())
    except (RuntimeError, NotImplementedError, TypeError):
        pass  # torch cannot do that with all dtypes
