"""Making the memory of tensors smaller for the wire.

Who sends chooses the codec; the message says what decoding needs, and every number in it is compared with the
bytes that came before memory is allocated. A codec that cannot help, or would change more than its rounding,
returns None, and the memory travels as it is.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache
from typing import Any, Final, NamedTuple, Protocol

import torch

from gradwire.errors import CodecUnavailable, MalformedMessage
from gradwire.proto.v1 import tensor_pb2

from .dtypes import BY_NUMBER, NUMBERS

__all__ = [
    "CODECS",
    "COMPRESS_FROM",
    "Codec",
    "Encoded",
    "Residual",
    "check_encoded",
    "decode",
    "find_codec",
    "require_codec",
    "supported_codecs",
]

CODECS: Final[dict[str, tensor_pb2.Codec]] = {
    "fp16": tensor_pb2.CODEC_FP16,
    "bf16": tensor_pb2.CODEC_BF16,
    "int8": tensor_pb2.CODEC_INT8,
    "zstd": tensor_pb2.CODEC_ZSTD,
}
"""Their names, and the wire's numbers."""

COMPRESS_FROM: Final = 4 * 1024
"""Storages of fewer bytes travel as they are: a round trip costs more than they do."""

_MAX_GROWTH = 16
"""How many times their own length encoded bytes may decode to."""
_WORTHWHILE = 0.95
"""What is not made smaller than this is sent as it is."""
_BLOCK = 256
_LARGEST_BLOCK = 1 << 16
_PIECE = _BLOCK << 10
"""Elements that are quantized at a time, so that what is computed on the way stays in the cache."""
_SCALE_BYTES = 4
_ZSTD_LEVEL = 1

# Complex numbers count as two real ones.
_REAL: Final = {
    torch.float64: torch.float64,
    torch.float32: torch.float32,
    torch.float16: torch.float16,
    torch.bfloat16: torch.bfloat16,
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
_WIDE = (torch.float32, torch.float64)
_NARROW = (torch.float16, torch.bfloat16)


class Encoded(NamedTuple):
    """Memory made smaller."""

    message: tensor_pb2.Encoded
    """What decoding needs; not where the content is."""
    content: torch.Tensor
    """Bytes."""


class Residual(Protocol):
    """What earlier rounding of the same logical tensor left out."""

    def take(self) -> torch.Tensor | None:
        """Removes and returns it; None if there is none."""

    def put(self, left_out: torch.Tensor) -> None:
        """Keeps what this rounding left out."""


class Codec(ABC):
    """One way to make memory smaller."""

    @abstractmethod
    def encode(self, memory: torch.Tensor, dtype: torch.dtype | None) -> Encoded | None:
        """`memory` is bytes on the CPU. `dtype` is that of its elements; None if not known, or not the same
        for all tensors that look at it. None is returned for what should travel as it is."""


class _Narrow(Codec):
    def __init__(self, narrow: torch.dtype) -> None:
        self._narrow = narrow

    def encode(self, memory: torch.Tensor, dtype: torch.dtype | None) -> Encoded | None:
        real = _REAL.get(dtype) if dtype is not None else None
        if real not in _WIDE:
            return None
        values = memory.view(real)
        narrow = values.to(self._narrow)
        largest = torch.finfo(self._narrow).max
        lowest, highest = values.aminmax()
        # Not the other way round: comparisons with NaN are false.
        if not (lowest >= -largest and highest <= largest) and not torch.equal(
            narrow.isfinite(), values.isfinite()
        ):
            return None  # a number beyond the range would become infinite
        message = tensor_pb2.Encoded()
        message.narrowed.dtype = NUMBERS[real]
        message.narrowed.narrow = NUMBERS[self._narrow]
        return Encoded(message, narrow.view(torch.uint8))


class _Blockwise(Codec):
    def __init__(self, residual: Residual | None = None) -> None:
        self._residual = residual

    def encode(self, memory: torch.Tensor, dtype: torch.dtype | None) -> Encoded | None:
        real = _REAL.get(dtype) if dtype is not None else None
        if real is None:
            return None
        values = memory.view(real)
        carried = None if self._residual is None else self._residual.take()
        left_out = None if self._residual is None else torch.empty_like(values, dtype=_working(real))
        content = _quantize(values, carried, left_out)
        if self._residual is not None:
            # Where it cannot be quantized it travels exactly, and what was owed is owed still.
            owed = carried if content is None else left_out
            if owed is not None:
                self._residual.put(owed)
        if content is None:
            return None
        message = tensor_pb2.Encoded()
        message.blockwise.dtype = NUMBERS[real]
        message.blockwise.block = _BLOCK
        return Encoded(message, content)


def _quantize(
    values: torch.Tensor, carried: torch.Tensor | None, left_out: torch.Tensor | None
) -> torch.Tensor | None:
    """Scales and integers; None if a number is not finite, or too large for a scale.

    `carried` is added first. What rounding leaves out is written to `left_out`.
    """
    count = values.numel()
    scale_bytes = -(-count // _BLOCK) * _SCALE_BYTES
    content = torch.empty(scale_bytes + count, dtype=torch.uint8, device="cpu")
    scales = content[:scale_bytes].view(torch.float32)
    integers = content[scale_bytes:].view(torch.int8)
    for start in range(0, count, _PIECE):
        end = min(start + _PIECE, count)
        piece = values[start:end].to(_working(values.dtype))
        if carried is not None:
            piece = piece + carried[start:end]
        blocks = _in_blocks(piece)
        scale = (blocks.abs().amax(1) / 127).float()
        if not scale.isfinite().all():
            return None
        divisor = torch.where(scale > 0, scale, 1).to(blocks.dtype)
        # Scales of denormal numbers are themselves rounded, hence the bounds.
        rounded = (blocks / divisor[:, None]).round_().clamp_(-127, 127)
        scales[start // _BLOCK :][: len(scale)] = scale
        integers[start:end] = rounded.view(-1)[: end - start]
        if left_out is not None:
            decoded = (rounded * scale.to(blocks.dtype)[:, None]).to(values.dtype)
            left_out[start:end] = piece - decoded.view(-1)[: end - start]
    return content


def _in_blocks(piece: torch.Tensor) -> torch.Tensor:
    missing = -piece.numel() % _BLOCK
    if missing:
        piece = torch.nn.functional.pad(piece, (0, missing))
    return piece.view(-1, _BLOCK)


def _working(real: torch.dtype) -> torch.dtype:
    """The type in which elements are scaled."""
    return torch.float64 if real is torch.float64 else torch.float32


class _Zstandard(Codec):
    def encode(self, memory: torch.Tensor, dtype: torch.dtype | None) -> Encoded | None:
        size = memory.numel()
        real = None if dtype is None else _REAL.get(dtype, dtype)
        width = 1 if real is None else real.itemsize
        message = tensor_pb2.Encoded()
        message.zstandard.width = width
        grouped = memory.view(-1, width).t().contiguous().view(-1) if width > 1 else memory
        frame = _zstandard().ZstdCompressor(level=_ZSTD_LEVEL).compress(grouped.numpy())
        if len(frame) >= _WORTHWHILE * size:
            return None
        content = bytearray(frame.ljust(-(-size // _MAX_GROWTH), b"\0"))
        return Encoded(message, torch.frombuffer(content, dtype=torch.uint8))


@cache
def _zstandard() -> Any:
    """The module; raises ImportError where it is not installed."""
    import zstandard

    return zstandard


@cache
def supported_codecs() -> tuple[tensor_pb2.Codec, ...]:
    """What can be encoded and decoded here."""
    try:
        _zstandard()
    except ImportError:
        return tuple(number for name, number in CODECS.items() if name != "zstd")
    return tuple(CODECS.values())


def require_codec(name: str) -> tensor_pb2.Codec:
    """The number of a codec that this process has."""
    number = CODECS.get(name)
    if number is None:
        raise ValueError(f"no codec is called {name!r}; there are {', '.join(CODECS)}")
    if number not in supported_codecs():
        raise CodecUnavailable(f"codec {name!r} needs a package: pip install 'gradwire[{name}]'")
    return number


def find_codec(number: int, residual: Residual | None = None) -> Codec | None:
    """The codec of that number; None if it is CODEC_NONE, or not available here."""
    if number == tensor_pb2.CODEC_INT8:
        return _Blockwise(residual)
    return _STATELESS.get(number) if number in supported_codecs() else None


_STATELESS: dict[int, Codec] = {
    tensor_pb2.CODEC_FP16: _Narrow(torch.float16),
    tensor_pb2.CODEC_BF16: _Narrow(torch.bfloat16),
    tensor_pb2.CODEC_ZSTD: _Zstandard(),
}


def check_encoded(message: tensor_pb2.Encoded, size: int, available: int) -> None:
    """Raises MalformedMessage unless that many bytes can decode to `size`. Allocates nothing."""
    kind = message.WhichOneof("codec")
    if not 0 < size <= _MAX_GROWTH * available:
        raise MalformedMessage(f"{available} encoded bytes for {size}: at most {_MAX_GROWTH} times as many")
    if kind == "narrowed":
        count = _count(message.narrowed.dtype, _WIDE, size)
        narrow = BY_NUMBER.get(message.narrowed.narrow)
        if narrow is None or narrow.dtype not in _NARROW:
            raise MalformedMessage(f"elements narrowed to dtype {message.narrowed.narrow}")
        expected = count * narrow.itemsize
    elif kind == "blockwise":
        count = _count(message.blockwise.dtype, tuple(set(_REAL.values())), size)
        block = message.blockwise.block
        if not 1 <= block <= _LARGEST_BLOCK:
            raise MalformedMessage(f"blocks of {block} elements")
        expected = -(-count // block) * _SCALE_BYTES + count
    elif kind == "zstandard":
        if size % max(message.zstandard.width, 1):
            raise MalformedMessage(f"{size} bytes in groups of {message.zstandard.width}")
        return
    else:
        raise MalformedMessage("bytes in an encoding that is not known here")
    if available != expected:
        raise MalformedMessage(f"{available} encoded bytes where {expected} are needed")


def _count(number: int, allowed: tuple[torch.dtype, ...], size: int) -> int:
    wire_type = BY_NUMBER.get(number)
    if wire_type is None or wire_type.dtype not in allowed or size % wire_type.itemsize:
        raise MalformedMessage(f"{size} encoded bytes of dtype {number}")
    return size // wire_type.itemsize


def decode(message: tensor_pb2.Encoded, size: int, content: torch.Tensor) -> torch.Tensor:
    """The `size` bytes that were encoded; `check_encoded` has been there."""
    kind = message.WhichOneof("codec")
    if kind == "narrowed":
        narrow = content.view(BY_NUMBER[message.narrowed.narrow].dtype)
        return narrow.to(BY_NUMBER[message.narrowed.dtype].dtype).view(torch.uint8)
    if kind == "blockwise":
        real = BY_NUMBER[message.blockwise.dtype].dtype
        return _dequantize(content, real, size // real.itemsize, message.blockwise.block)
    return _decompress(message.zstandard.width, size, content)


def _dequantize(content: torch.Tensor, real: torch.dtype, count: int, block: int) -> torch.Tensor:
    scale_bytes = -(-count // block) * _SCALE_BYTES
    scales = content[:scale_bytes].view(torch.float32).to(_working(real))
    integers = content[scale_bytes:].view(torch.int8)
    decoded = torch.empty(count, dtype=real, device="cpu")
    whole = count // block
    torch.mul(integers[: whole * block].view(whole, block), scales[:whole, None], out=_rows(decoded, block))
    decoded[whole * block :] = integers[whole * block :] * scales[whole:]
    return decoded.view(torch.uint8)


def _rows(decoded: torch.Tensor, block: int) -> torch.Tensor:
    whole = decoded.numel() // block
    return decoded[: whole * block].view(whole, block)


def _decompress(width: int, size: int, content: torch.Tensor) -> torch.Tensor:
    try:
        zstandard = _zstandard()
    except ImportError:
        raise MalformedMessage(
            "a storage came compressed with zstd, which this process did not say that it takes"
        ) from None
    frame = content.numpy()
    try:
        # From the frame's own header, before anything is allocated for it.
        if zstandard.frame_content_size(frame) != size:
            raise MalformedMessage(f"a Zstandard frame that does not decode to {size} bytes")
        grouped = zstandard.ZstdDecompressor().decompress(frame)
    except zstandard.ZstdError as error:
        raise MalformedMessage(f"no valid Zstandard frame: {error}") from error
    if len(grouped) != size:
        raise MalformedMessage(f"a Zstandard frame of {len(grouped)} bytes where {size} are needed")
    memory = torch.frombuffer(bytearray(grouped), dtype=torch.uint8)
    return memory.view(width, -1).t().contiguous().view(-1) if width > 1 else memory
