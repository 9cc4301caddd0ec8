"""Reading whole protobuf messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from gradwire.errors import MalformedMessage
from gradwire.proto.v1 import value_pb2

__all__ = ["parse", "refs_in"]

M = TypeVar("M", bound=Message)


def parse(type_: type[M], body: bytes) -> M:
    """The message in some bytes, or MalformedMessage."""
    try:
        return type_.FromString(body)
    except DecodeError as error:
        raise MalformedMessage(f"the body is no {type_.DESCRIPTOR.name}: {error}") from error


def refs_in(messages: Iterable[Message]) -> Iterator[value_pb2.RemoteRef]:
    """All refs in some values, or in whatever has values in it."""
    waiting = list(messages)
    while waiting:
        message = waiting.pop()
        if isinstance(message, value_pb2.RemoteRef):
            yield message
            continue
        for field, value in message.ListFields():
            if field.message_type is not None:
                waiting.extend([value] if isinstance(value, Message) else value)
