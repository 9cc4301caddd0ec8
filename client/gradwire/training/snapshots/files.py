"""Tensors <-> safetensors files, which are hashed while they are written, and memory-mapped to be read.

The safetensors package is not used, because it needs all tensors of a file in memory at once, knows fewer
dtypes, and returns no hash. Every tool that reads safetensors can read these files.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from gradwire.errors import CheckpointError
from gradwire.torch_internals import storage_id
from gradwire.wire.dtypes import DTYPES_BY_NAME, dtype_name

__all__ = ["FileEntry", "Shard", "TensorFile", "write_synced"]

Advance = Callable[[int], None]
"""Called with the number of bytes that were written or read."""

_CHUNK_BYTES = 4 << 20
_MAX_HEADER_BYTES = 100_000_000
"""The format's own limit."""

_FORMAT_NAMES: Final[dict[torch.dtype, str]] = {
    DTYPES_BY_NAME[name]: code
    for name, code in {
        "float64": "F64",
        "float32": "F32",
        "float16": "F16",
        "bfloat16": "BF16",
        "int64": "I64",
        "int32": "I32",
        "int16": "I16",
        "int8": "I8",
        "uint64": "U64",
        "uint32": "U32",
        "uint16": "U16",
        "uint8": "U8",
        "bool": "BOOL",
        "complex64": "C64",
        "float8_e4m3fn": "F8_E4M3",
        "float8_e5m2": "F8_E5M2",
        "float8_e8m0fnu": "F8_E8M0",
        "float8_e4m3fnuz": "F8_E4M3FNUZ",
        "float8_e5m2fnuz": "F8_E5M2FNUZ",
    }.items()
    if name in DTYPES_BY_NAME
}
_FORMAT_DTYPES: Final = {code: dtype for dtype, code in _FORMAT_NAMES.items()}


class FileEntry(NamedTuple):
    """The entry of a file in the manifest."""

    size: int
    sha256: str


class Shard:
    """Tensors that will be written to one file. Until then it only refers to them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.bytes = 0
        self._tensors: dict[str, torch.Tensor] = {}
        self._known: dict[tuple[object, ...], dict[str, Any]] = {}

    @property
    def is_empty(self) -> bool:
        return not self._tensors

    def add(self, tensor: torch.Tensor, where: str) -> dict[str, Any]:
        """Adds a dense tensor, and returns its reference for the manifest. The same memory is stored once."""
        key = (
            storage_id(tensor),
            tensor.storage_offset(),
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            tensor.is_conj(),
            tensor.is_neg(),
        )
        if key in self._known:
            return self._known[key]
        name = where
        while name in self._tensors or name == "__metadata__":
            name += "'"
        self._tensors[name] = tensor
        self.bytes += tensor.numel() * tensor.itemsize
        reference: dict[str, Any] = {"$tensor": [self.name, name]}
        if tensor.dtype not in _FORMAT_NAMES:
            # Stored as plain bytes, because safetensors has no name for the dtype; the manifest has dtype and
            # shape.
            reference |= {"dtype": dtype_name(tensor.dtype), "shape": list(tensor.shape)}
        self._known[key] = reference
        return reference

    def write(self, folder: Path, advance: Advance) -> FileEntry:
        """Writes the file, and waits until it is on the disk."""
        # Tensors with wide elements come first, so that each tensor begins at a multiple of its element size.
        tensors = sorted(self._tensors.items(), key=lambda item: -item[1].itemsize)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name, tensor in tensors:
            begin, end = end, end + tensor.numel() * tensor.itemsize
            code = _FORMAT_NAMES.get(tensor.dtype)
            shape = [end - begin] if code is None else list(tensor.shape)
            header[name] = {"dtype": code or "U8", "shape": shape, "data_offsets": [begin, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        digest = hashlib.sha256()
        with open(folder / self.name, "xb", buffering=0) as file:
            _write(file.fileno(), memoryview(len(text).to_bytes(8, "little") + text), digest.update)
            for name, tensor in tensors:
                _write(file.fileno(), _memory(tensor, name), digest.update, advance)
            os.fsync(file.fileno())
        return FileEntry(8 + len(text) + end, digest.hexdigest())


def _memory(tensor: torch.Tensor, name: str) -> memoryview:
    try:
        dense = tensor.resolve_conj().resolve_neg().to("cpu").contiguous()
    except (RuntimeError, NotImplementedError) as error:
        raise CheckpointError(f"{name} ({tensor.dtype}) cannot be read from memory: {error}") from error
    size = dense.numel() * dense.itemsize
    if not size:
        return memoryview(b"")
    # Through the storage, because torch cannot view some dtypes as bytes.
    flat = torch.empty(0, dtype=torch.uint8)
    flat.set_(dense.untyped_storage(), int(dense.storage_offset()) * dense.itemsize, (size,), (1,))
    return flat.numpy().data


def _write(
    descriptor: int, memory: memoryview, hash: Callable[[memoryview], None], advance: Advance | None = None
) -> None:
    for begin in range(0, len(memory), _CHUNK_BYTES):
        chunk = memory[begin : begin + _CHUNK_BYTES]
        hash(chunk)
        while chunk:
            written = os.write(descriptor, chunk)
            chunk = chunk[written:]
            if advance is not None:
                advance(written)


def write_synced(path: Path, content: bytes) -> None:
    """Writes a small file, and waits until it is on the disk."""
    with open(path, "wb", buffering=0) as file:
        _write(file.fileno(), memoryview(content), lambda _: None)
        os.fsync(file.fileno())


class TensorFile:
    """A file of tensors, open for reading. It stays readable if another process deletes it meanwhile."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._map: mmap.mmap | None = None
        self._header: Mapping[str, Any] = {}
        self._data = 0

    def check(self, expected: FileEntry, advance: Advance) -> None:
        """Raises CheckpointError unless the file's size and hash are those in the manifest."""
        size = os.fstat(self._descriptor).st_size
        if size != expected.size:
            raise CheckpointError(
                f"{self.path} is damaged: it has {size} bytes, and was written with {expected.size}"
            )
        digest = hashlib.sha256()
        offset = 0
        while chunk := os.pread(self._descriptor, _CHUNK_BYTES, offset):
            digest.update(chunk)
            offset += len(chunk)
            advance(len(chunk))
        if digest.hexdigest() != expected.sha256:
            raise CheckpointError(f"{self.path} is damaged: its sha256 is not that of the manifest")
        # A private mapping: changes to the tensors are not written to the file.
        self._map = mmap.mmap(self._descriptor, size, access=mmap.ACCESS_COPY)
        try:
            length = int.from_bytes(self._map[:8], "little")
            if length > min(size - 8, _MAX_HEADER_BYTES):
                raise ValueError("the header is longer than the file")
            self._header = json.loads(self._map[8 : 8 + length])
            self._data = 8 + length
        except ValueError as error:
            raise CheckpointError(f"{self.path} is no safetensors file: {error}") from error

    def tensor(self, reference: Mapping[str, Any], *, copy: bool) -> torch.Tensor:
        """A tensor of the file: with `copy` in memory of its own, else a view of the mapped file."""
        name = reference["$tensor"][1]
        try:
            entry = self._header[name]
            begin, end = entry["data_offsets"]
            dtype = DTYPES_BY_NAME[reference["dtype"]] if "dtype" in reference else None
            shape = torch.Size(reference.get("shape", entry["shape"]))
            dtype = dtype or _FORMAT_DTYPES[entry["dtype"]]
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(f"{self.path} lacks {name}, or this torch lacks its dtype") from error
        if self._map is None or end - begin != math.prod(shape) * dtype.itemsize:
            raise CheckpointError(f"{self.path}: {name} does not have the bytes of its shape {tuple(shape)}")
        if begin == end:
            return torch.empty(shape, dtype=dtype)
        if self._data + end > len(self._map) or begin < 0:
            raise CheckpointError(f"{self.path}: {name} reaches beyond the end of the file")
        raw = torch.frombuffer(self._map, dtype=torch.uint8, count=end - begin, offset=self._data + begin)
        if copy:
            raw = raw.clone()
        # Through the storage, because torch cannot view bytes as some dtypes, nor copy those.
        tensor = torch.empty(0, dtype=dtype)
        start = int(raw.storage_offset()) // dtype.itemsize
        tensor.set_(raw.untyped_storage(), start, shape, torch.empty(shape, device="meta").stride())
        return tensor

    def shape(self, reference: Mapping[str, Any]) -> tuple[int, ...]:
        name = reference["$tensor"][1]
        return tuple(reference.get("shape") or self._header.get(name, {}).get("shape", ()))

    def close(self) -> None:
        """Closes the file. Tensors that are views of the file stay valid: they keep the mapping alive."""
        os.close(self._descriptor)
        self._map = None
