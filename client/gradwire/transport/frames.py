"""Encodes and decodes frames.

Every write to a stream is a valid protobuf Envelope. Chunks make up nearly all bytes, so they are encoded
and decoded by hand, which copies their data only once. All other frames go through the generated code, which
is as fast for small messages.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from google.protobuf.message import DecodeError

from gradwire.errors import MalformedMessage
from gradwire.proto.v1 import link_pb2

__all__ = [
    "LENGTH",
    "Chunk",
    "RequestFrame",
    "cancel",
    "chunk",
    "dropped",
    "envelope",
    "goodbye",
    "parse",
    "parse_chunk",
    "placed",
    "request_frame",
    "returned",
    "segment",
]

LENGTH = struct.Struct("<I")
"""The length prefix of each Envelope on a socket, which has no message boundaries of its own."""

# Tags: field number << 3 | wire type (0 varint, 2 length-delimited).
_ENVELOPE_FRAME = b"\x0a"
_FRAME_CHUNK = b"\x2a"
_CHUNK_TRANSFER, _CHUNK_OFFSET, _CHUNK_TOTAL, _CHUNK_DATA = b"\x08", b"\x10", b"\x18", b"\x22"


class Chunk(NamedTuple):
    """A piece of an attachment."""

    transfer: int
    offset: int
    total: int
    data: memoryview | bytes


class RequestFrame(NamedTuple):
    """A Request whose body was copied out once: protobuf copies a bytes field each time that it is read."""

    id: int
    method: int
    body: bytes
    transfers: Sequence[int]
    timeout_seconds: float


def request_frame(message: link_pb2.Request) -> RequestFrame:
    return RequestFrame(
        message.id, message.method, message.body, message.transfers[:], message.timeout_seconds
    )


def _varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def chunk(transfer: int, offset: int, total: int, data: memoryview) -> bytes:
    """An Envelope with one Chunk, byte for byte as the generated code would encode it."""
    fields = b"".join(
        (
            _CHUNK_TRANSFER + _varint(transfer) if transfer else b"",
            _CHUNK_OFFSET + _varint(offset) if offset else b"",
            _CHUNK_TOTAL + _varint(total) if total else b"",
            _CHUNK_DATA + _varint(len(data)) if len(data) else b"",
        )
    )
    chunk_length = _varint(len(fields) + len(data))
    frame_length = _varint(len(_FRAME_CHUNK) + len(chunk_length) + len(fields) + len(data))
    return b"".join((_ENVELOPE_FRAME, frame_length, _FRAME_CHUNK, chunk_length, fields, data))


def parse_chunk(data: bytes) -> Chunk | None:
    """Decodes an Envelope with exactly one Chunk as `chunk` encodes it; None if the data is anything else."""
    if data[:1] != _ENVELOPE_FRAME:
        return None
    try:
        length, at = _read_varint(data, 1)
        if at + length != len(data) or data[at : at + 1] != _FRAME_CHUNK:
            return None
        length, at = _read_varint(data, at + 1)
        if at + length != len(data):
            return None
        numbers = [0, 0, 0]
        for index, tag in enumerate((_CHUNK_TRANSFER, _CHUNK_OFFSET, _CHUNK_TOTAL)):
            if data[at : at + 1] == tag:
                numbers[index], at = _read_varint(data, at + 1)
        if at == len(data):
            return Chunk(numbers[0], numbers[1], numbers[2], b"")
        if data[at : at + 1] != _CHUNK_DATA:
            return None
        length, at = _read_varint(data, at + 1)
        if at + length != len(data):
            return None
        return Chunk(numbers[0], numbers[1], numbers[2], memoryview(data)[at:])
    except IndexError:
        return None


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        byte = data[at]
        at += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result, at
        shift += 7
        if shift > 63:
            raise IndexError  # not a varint: leave it to the generated parser to describe the error


def parse(data: bytes) -> Sequence[link_pb2.Frame]:
    """Decodes any Envelope."""
    try:
        return link_pb2.Envelope.FromString(data).frames
    except DecodeError as error:
        raise MalformedMessage(f"a frame of {len(data)} bytes is no gradwire Envelope: {error}") from error


def envelope(frame: link_pb2.Frame) -> bytes:
    """Encodes an Envelope with one frame."""
    body = frame.SerializeToString()
    return b"".join((_ENVELOPE_FRAME, _varint(len(body)), body))


def cancel(request_id: int) -> bytes:
    return envelope(link_pb2.Frame(cancel=link_pb2.Cancel(id=request_id)))


def segment(id: int, size: int) -> bytes:
    return envelope(link_pb2.Frame(segment=link_pb2.Segment(id=id, size=size)))


def placed(transfer: int, segment: int, total: int) -> bytes:
    return envelope(link_pb2.Frame(placed=link_pb2.Placed(transfer=transfer, segment=segment, total=total)))


def returned(segments: Iterable[int]) -> bytes:
    return envelope(link_pb2.Frame(returned=link_pb2.Returned(segments=segments)))


def dropped(segments: Iterable[int]) -> bytes:
    return envelope(link_pb2.Frame(dropped=link_pb2.Dropped(segments=segments)))


def goodbye(error: link_pb2.Error | None = None, *, leaving: bool = False) -> bytes:
    return envelope(link_pb2.Frame(goodbye=link_pb2.Goodbye(error=error, leaving=leaving)))
