"""Parsing protobuf messages, and finding the refs in them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

from google.protobuf.message import DecodeError, Message

from gradwire.errors import MalformedMessage
from gradwire.proto.v1 import value_pb2

__all__ = ["parse", "refs_in"]

M = TypeVar("M", bound=Message)


def parse(type_: type[M], body: bytes) -> M:
    """The message of a type that the bytes hold. Raises MalformedMessage if they do not."""
    try:
        return type_.FromString(body)
    except DecodeError as error:
        raise MalformedMessage(f"the body is no {type_.DESCRIPTOR.name}: {error}") from error


def refs_in(messages: Iterable[Message]) -> Iterator[value_pb2.RemoteRef]:
    """All refs inside some messages, at any depth."""
    unvisited = list(messages)
    while unvisited:
        message = unvisited.pop()
        if isinstance(message, value_pb2.RemoteRef):
            yield message
            continue
        for field, value in message.ListFields():
            if field.message_type is not None:
                unvisited.extend([value] if isinstance(value, Message) else value)
