"""State <-> JSON with exact Python types: an int stays an int, a tuple a tuple, an int key an int key.

A type that JSON does not have is an object whose key starts with a dollar: ``{"$tuple": [1, 2]}``. Tensors
are stored in files, and referred to: ``{"$tensor": ["00000.safetensors", "model.0.weight"]}``.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from gradwire.errors import CheckpointError
from gradwire.torch_internals import coo_indices, coo_values, validate_compressed, validate_coo
from gradwire.wire.dtypes import DTYPES_BY_NAME, dtype_name

__all__ = ["Json", "decode", "encode", "encoded_dict"]

Json = Any
"""A value that `json` writes and reads."""
PutTensor = Callable[[torch.Tensor, str], Json]
GetTensor = Callable[[Mapping[str, Json]], torch.Tensor]

_BYTES_ASIDE_FROM = 1024
"""Bytes objects of at least this length are stored with the tensors, and not in the manifest."""

_COMPRESSED: dict[torch.layout, tuple[str, str]] = {
    torch.sparse_csr: ("crow_indices", "col_indices"),
    torch.sparse_bsr: ("crow_indices", "col_indices"),
    torch.sparse_csc: ("ccol_indices", "row_indices"),
    torch.sparse_bsc: ("ccol_indices", "row_indices"),
}
_BLOCKS = (torch.sparse_bsr, torch.sparse_bsc)
_LAYOUTS = {str(layout).removeprefix("torch."): layout for layout in _COMPRESSED}


def encode(value: object, where: str, put: PutTensor) -> Json:
    """Encodes a value as JSON. `put` stores each tensor and returns its reference. `where` names the value in
    errors and files."""
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        # float() is needed for numpy's float64, which is a subclass of float.
        return float(value) if math.isfinite(value) else {"$float": repr(float(value))}
    if isinstance(value, torch.Tensor):
        return _encode_tensor(value, where, put)
    if type(value) is list:
        return [encode(item, f"{where}.{index}", put) for index, item in enumerate(value)]
    if type(value) is tuple:
        return {"$tuple": [encode(item, f"{where}.{index}", put) for index, item in enumerate(value)]}
    if isinstance(value, torch.Size):
        return {"$size": list(value)}
    if isinstance(value, set | frozenset):
        tag = "$set" if isinstance(value, set) else "$frozenset"
        return {tag: [encode(item, f"{where}.{index}", put) for index, item in enumerate(value)]}
    if isinstance(value, Mapping):
        return encoded_dict((key, encode(item, f"{where}.{key}", put)) for key, item in value.items())
    if isinstance(value, bytes):
        if len(value) < _BYTES_ASIDE_FROM:
            return {"$bytes": base64.b64encode(value).decode("ascii")}
        return {"$bytes": put(torch.frombuffer(bytearray(value), dtype=torch.uint8), where)}
    if isinstance(value, complex):
        return {"$complex": [encode(value.real, where, put), encode(value.imag, where, put)]}
    if isinstance(value, torch.dtype):
        return {"$dtype": dtype_name(value)}
    if isinstance(value, torch.device):
        return {"$device": str(value)}
    raise CheckpointError(
        f"{where} is a {type(value).__qualname__}, which a checkpoint cannot hold; it holds tensors, "
        "numbers, text, None, and lists, tuples, sets and dicts of them"
    )


def encoded_dict(items: Iterable[tuple[object, Json]]) -> Json:
    """Encodes a dict whose values are encoded already."""
    pairs = list(items)
    if all(isinstance(key, str) and not key.startswith("$") for key, _ in pairs):
        return dict(pairs)
    return {"$dict": [[encode(key, "a key", _no_tensor), value] for key, value in pairs]}


def _no_tensor(tensor: torch.Tensor, where: str) -> Json:
    raise CheckpointError(f"{where} of a dict is a tensor, which a checkpoint cannot hold")


def _encode_tensor(tensor: torch.Tensor, where: str, put: PutTensor) -> Json:
    tensor = tensor.detach()
    if tensor.is_quantized or tensor.is_nested or tensor.device.type == "meta":
        kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else "meta"
        raise CheckpointError(f"{where} is a {kind} tensor, which a checkpoint cannot hold")
    if tensor.layout is torch.strided:
        return put(tensor, where)
    shape = list(tensor.shape)
    if tensor.layout is torch.sparse_coo:
        parts = {"indices": put(coo_indices(tensor), f"{where}.indices")}
        parts["values"] = put(coo_values(tensor), f"{where}.values")
        return {"$sparse_coo": {**parts, "shape": shape, "coalesced": tensor.is_coalesced()}}
    if tensor.layout in _COMPRESSED:
        parts = {
            "compressed": put(getattr(tensor, _COMPRESSED[tensor.layout][0])(), f"{where}.compressed"),
            "plain": put(getattr(tensor, _COMPRESSED[tensor.layout][1])(), f"{where}.plain"),
            "values": put(tensor.values(), f"{where}.values"),
        }
        return {"$sparse": {**parts, "shape": shape, "layout": str(tensor.layout).removeprefix("torch.")}}
    raise CheckpointError(f"{where} has the layout {tensor.layout}, which a checkpoint cannot hold")


def decode(encoded: Json, get: GetTensor) -> Any:
    """The value that was encoded. `get` returns the tensor of a reference."""
    if isinstance(encoded, list):
        return [decode(item, get) for item in encoded]
    if not isinstance(encoded, dict):
        return encoded
    tag = next(iter(encoded), "")
    if not tag.startswith("$"):
        return {key: decode(item, get) for key, item in encoded.items()}
    content = encoded[tag]
    match tag:
        case "$tensor":
            return get(encoded)
        case "$float":
            return float(content)
        case "$tuple":
            return tuple(decode(item, get) for item in content)
        case "$dict":
            return {decode(key, get): decode(item, get) for key, item in content}
        case "$set":
            return {decode(item, get) for item in content}
        case "$frozenset":
            return frozenset(decode(item, get) for item in content)
        case "$size":
            return torch.Size(content)
        case "$bytes":
            return base64.b64decode(content) if isinstance(content, str) else get(content).numpy().tobytes()
        case "$complex":
            return complex(decode(content[0], get), decode(content[1], get))
        case "$dtype" if content in DTYPES_BY_NAME:
            return DTYPES_BY_NAME[content]
        case "$device":
            return torch.device(content)
        case "$sparse_coo":
            indices, elements, shape = get(content["indices"]), get(content["values"]), content["shape"]
            # Wrong indices could address any memory. The constructor's own check is a setting of the whole
            # process while it runs, which other threads would see.
            validate_coo(indices, elements, shape, content["coalesced"])
            return torch.sparse_coo_tensor(
                indices, elements, shape, is_coalesced=content["coalesced"], check_invariants=False
            )
        case "$sparse" if content["layout"] in _LAYOUTS:
            compressed, plain = get(content["compressed"]), get(content["plain"])
            elements, shape, layout = get(content["values"]), content["shape"], _LAYOUTS[content["layout"]]
            blocks = elements.shape[compressed.dim() : compressed.dim() + 2]
            if layout in _BLOCKS and 0 in blocks:  # to_dense() divides by it
                raise CheckpointError(f"the manifest has a sparse tensor with blocks of shape {list(blocks)}")
            validate_compressed(compressed, plain, elements, shape, layout)
            return torch.sparse_compressed_tensor(
                compressed, plain, elements, shape, layout=layout, check_invariants=False
            )
    raise CheckpointError(f"the manifest has {tag} {content!r:.80}, which this version does not know")
