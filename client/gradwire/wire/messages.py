"""Reading whole protobuf messages."""

from __future__ import annotations

from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from gradwire.errors import MalformedMessage

__all__ = ["parse"]

M = TypeVar("M", bound=Message)


def parse(type_: type[M], body: bytes) -> M:
    """The message in some bytes, or MalformedMessage."""
    try:
        return type_.FromString(body)
    except DecodeError as error:
        raise MalformedMessage(f"the body is no {type_.DESCRIPTOR.name}: {error}") from error
