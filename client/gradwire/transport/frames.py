"""The frames of the handshake, which goes before a session. Those of sessions are written in
`native/frames.cpp`."""

from __future__ import annotations

from collections.abc import Sequence

from google.protobuf.message import DecodeError

from gradwire.errors import MalformedMessage
from gradwire.proto.v1 import link_pb2

__all__ = ["NOTHING", "envelope", "goodbye", "parse"]

NOTHING = b""
"""An Envelope without frames. The connecting peer's first message after Hello, if it was offered a socket and
uses the stream instead."""


def parse(data: bytes) -> Sequence[link_pb2.Frame]:
    """Decodes any Envelope."""
    try:
        return link_pb2.Envelope.FromString(data).frames
    except DecodeError as error:
        raise MalformedMessage(f"a frame of {len(data)} bytes is no gradwire Envelope: {error}") from error


def envelope(frame: link_pb2.Frame) -> bytes:
    """Encodes an Envelope with one frame."""
    return link_pb2.Envelope(frames=[frame]).SerializeToString()


def goodbye(error: link_pb2.Error | None = None) -> bytes:
    return envelope(link_pb2.Frame(goodbye=link_pb2.Goodbye(error=error)))
