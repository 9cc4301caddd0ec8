"""Making the memory of tensors smaller for the wire.

The sender chooses the codec. The message says what decoding needs, and every number in it is compared with
the received bytes before memory is allocated. A codec returns None for memory that it cannot make smaller, or
that it would change by more than rounding; such memory is sent unencoded.
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
"""The names of the codecs, and their numbers on the wire."""

COMPRESS_FROM: Final = 4 * 1024
"""Storages of fewer bytes are sent unencoded: a round trip costs more than their bytes do."""

_MAX_GROWTH = 16
"""The largest ratio of decoded bytes to encoded bytes that a receiver takes."""
_WORTHWHILE = 0.95
"""Memory is sent unencoded if its encoded size is not below this fraction of its size."""
_BLOCK = 256
_LARGEST_BLOCK = 1 << 16
_PIECE = _BLOCK << 10
"""How many elements are quantized at a time, so that the intermediate tensors stay in the cache."""
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
    """Memory that a codec made smaller."""

    message: tensor_pb2.Encoded
    """The parameters for decoding. The caller adds where the content is."""
    content: torch.Tensor
    """The encoded bytes, as a uint8 tensor."""


class Residual(Protocol):
    """Keeps the rounding error of a logical tensor, to be added when the tensor is encoded the next time."""

    def take(self) -> torch.Tensor | None:
        """Removes and returns the rounding error; None if there is none."""

    def put(self, left_out: torch.Tensor) -> None:
        """Keeps a rounding error."""


class Codec(ABC):
    """A way to make memory smaller."""

    @abstractmethod
    def encode(self, memory: torch.Tensor, dtype: torch.dtype | None) -> Encoded | None:
        """The encoded memory; None if the memory should be sent unencoded.

        `memory` is a uint8 tensor on the CPU. `dtype` is the dtype of the elements; None if it is not known,
        or not the same for all tensors that view the memory.
        """


class _Narrow(Codec):
    """Converts floating-point elements to a narrower dtype: fp16 and bf16."""

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
        # Written with `not`, because comparisons with NaN are false.
        if not (lowest >= -largest and highest <= largest) and not torch.equal(
            narrow.isfinite(), values.isfinite()
        ):
            return None  # an element beyond the range of the narrow dtype would become infinite
        message = tensor_pb2.Encoded()
        message.narrowed.dtype = NUMBERS[real]
        message.narrowed.narrow = NUMBERS[self._narrow]
        return Encoded(message, narrow.view(torch.uint8))


class _Blockwise(Codec):
    """Quantizes elements to 8-bit integers, with a scale for each block: int8."""

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
            # Memory that cannot be quantized is sent exactly, without the earlier rounding error, which is
            # kept.
            kept = carried if content is None else left_out
            if kept is not None:
                self._residual.put(kept)
        if content is None:
            return None
        message = tensor_pb2.Encoded()
        message.blockwise.dtype = NUMBERS[real]
        message.blockwise.block = _BLOCK
        return Encoded(message, content)


def _quantize(
    values: torch.Tensor, carried: torch.Tensor | None, left_out: torch.Tensor | None
) -> torch.Tensor | None:
    """The scales and the integers as bytes; None if an element is not finite, or too large for a scale.

    `carried`, the earlier rounding error, is added first. The new rounding error is written to `left_out`.
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
        # The scales of denormal numbers are rounded themselves, so a quotient may exceed 127.
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
    """The dtype in which elements are scaled."""
    return torch.float64 if real is torch.float64 else torch.float32


class _Zstandard(Codec):
    """Compresses bytes without loss: zstd. The first bytes of all elements come first, then the second bytes,
    ..."""

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
    """The zstandard module. Raises ImportError if it is not installed."""
    import zstandard

    return zstandard


@cache
def supported_codecs() -> tuple[tensor_pb2.Codec, ...]:
    """The numbers of the codecs that this process can encode and decode."""
    try:
        _zstandard()
    except ImportError:
        return tuple(number for name, number in CODECS.items() if name != "zstd")
    return tuple(CODECS.values())


def require_codec(name: str) -> tensor_pb2.Codec:
    """The number of a codec. Raises ValueError for an unknown name, CodecUnavailable if its package is
    missing."""
    number = CODECS.get(name)
    if number is None:
        raise ValueError(f"no codec is called {name!r}; there are {', '.join(CODECS)}")
    if number not in supported_codecs():
        raise CodecUnavailable(f"codec {name!r} needs a package: pip install 'gradwire[{name}]'")
    return number


def find_codec(number: int, residual: Residual | None = None) -> Codec | None:
    """The codec of a number; None for CODEC_NONE, and for a codec that this process lacks."""
    if number == tensor_pb2.CODEC_INT8:
        return _Blockwise(residual)
    return _STATELESS.get(number) if number in supported_codecs() else None


_STATELESS: dict[int, Codec] = {
    tensor_pb2.CODEC_FP16: _Narrow(torch.float16),
    tensor_pb2.CODEC_BF16: _Narrow(torch.bfloat16),
    tensor_pb2.CODEC_ZSTD: _Zstandard(),
}


def check_encoded(message: tensor_pb2.Encoded, size: int, available: int) -> None:
    """Raises MalformedMessage unless `available` encoded bytes can decode to `size` bytes. Allocates
    nothing."""
    kind = message.WhichOneof("codec")
    if not 0 < size <= _MAX_GROWTH * available:
        raise MalformedMessage(f"{available} encoded bytes for {size}: at most {_MAX_GROWTH} times as many")
    if kind == "narrowed":
        count = _element_count(message.narrowed.dtype, _WIDE, size)
        narrow = BY_NUMBER.get(message.narrowed.narrow)
        if narrow is None or narrow.dtype not in _NARROW:
            raise MalformedMessage(f"elements narrowed to dtype {message.narrowed.narrow}")
        expected = count * narrow.itemsize
    elif kind == "blockwise":
        count = _element_count(message.blockwise.dtype, tuple(set(_REAL.values())), size)
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


def _element_count(number: int, allowed: tuple[torch.dtype, ...], size: int) -> int:
    wire_type = BY_NUMBER.get(number)
    if wire_type is None or wire_type.dtype not in allowed or size % wire_type.itemsize:
        raise MalformedMessage(f"{size} encoded bytes of dtype {number}")
    return size // wire_type.itemsize


def decode(message: tensor_pb2.Encoded, size: int, content: torch.Tensor) -> torch.Tensor:
    """The `size` bytes that were encoded. The caller has called `check_encoded`."""
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
            "a storage was compressed with zstd, which this process did not offer"
        ) from None
    frame = content.numpy()
    try:
        # The size in the frame's own header is checked before memory is allocated for it.
        if zstandard.frame_content_size(frame) != size:
            raise MalformedMessage(f"a Zstandard frame that does not decode to {size} bytes")
        grouped = zstandard.ZstdDecompressor().decompress(frame)
    except zstandard.ZstdError as error:
        raise MalformedMessage(f"no valid Zstandard frame: {error}") from error
    if len(grouped) != size:
        raise MalformedMessage(f"a Zstandard frame of {len(grouped)} bytes where {size} are needed")
    memory = torch.frombuffer(bytearray(grouped), dtype=torch.uint8)
    return memory.view(width, -1).t().contiguous().view(-1) if width > 1 else memory
