"""Names for contexts, messages and passes. No coordinator hands them out: a node counts its own."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import NamedTuple

from gradwire.proto.v1 import autograd_pb2

__all__ = ["ContextId", "MessageId", "message_ids", "message_protos"]

_new = tuple.__new__
"""What the constructor of a named tuple calls. There are many in each message, so directly."""

# An id does not have the hash of a tuple, which can be worked out: other nodes choose their ids, and many of
# one hash would make each that is looked up slow. Whoever does not know these factors cannot find such.
_MODULUS = (1 << 61) - 1
_NODE_FACTOR = secrets.randbelow(_MODULUS - 1) + 1
_NUMBER_FACTOR = secrets.randbelow(_MODULUS - 1) + 1


class ContextId(NamedTuple):
    """A context: the node that opened it, and that node's number for it. 0 is the node's ambient context."""

    node: int
    number: int

    def __hash__(self) -> int:
        return (self[0] * _NODE_FACTOR + self[1] * _NUMBER_FACTOR) % _MODULUS

    @classmethod
    def parse(cls, message: autograd_pb2.ContextId) -> ContextId:
        return _new(cls, (message.node, message.number))

    @classmethod
    def from_text(cls, text: str) -> ContextId:
        """The context that `str` writes so. Raises ValueError if it is none."""
        node, _, number = text.partition(":")
        try:
            return cls(int(node, 16), int(number))
        except ValueError:
            raise ValueError(f"{text!r} names no context; one looks like 1f0c5a3b9d2e4f60:7") from None

    def write(self, message: autograd_pb2.ContextId) -> None:
        message.node, message.number = self

    def __str__(self) -> str:
        return f"{self.node:016x}:{self.number}"


class MessageId(NamedTuple):
    """One sending of tensors that require grad, or one pass: the node, and that node's number for it."""

    node: int
    number: int

    def __hash__(self) -> int:
        return (self[0] * _NODE_FACTOR + self[1] * _NUMBER_FACTOR) % _MODULUS

    @classmethod
    def parse(cls, message: autograd_pb2.MessageId) -> MessageId:
        return _new(cls, (message.node, message.number))

    def write(self, message: autograd_pb2.MessageId) -> None:
        message.node, message.number = self

    def __str__(self) -> str:
        return f"{self.node:016x}:{self.number}"


def message_ids(messages: Iterable[autograd_pb2.MessageId]) -> list[MessageId]:
    return [_new(MessageId, (message.node, message.number)) for message in messages]


def message_protos(ids: Iterable[MessageId]) -> list[autograd_pb2.MessageId]:
    return [autograd_pb2.MessageId(node=id.node, number=id.number) for id in ids]
