"""Names for contexts, messages and passes. No coordinator hands them out: a peer counts its own."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import NamedTuple

from gradwire.proto.v1 import autograd_pb2

__all__ = ["AutogradMessageId", "ContextId", "message_ids", "message_protos"]

_new = tuple.__new__
"""What the constructor of a named tuple calls. There are many in each message, so directly."""

# An id does not have the hash of a tuple, which can be worked out: other peers choose their ids, and many of
# one hash would make each that is looked up slow. Whoever does not know these factors cannot find such.
_MODULUS = (1 << 61) - 1
_NODE_FACTOR = secrets.randbelow(_MODULUS - 1) + 1
_NUMBER_FACTOR = secrets.randbelow(_MODULUS - 1) + 1


class ContextId(NamedTuple):
    """A context: the peer that opened it, and that peer's number for it. 0 is the peer's ambient context."""

    peer: int
    number: int

    def __hash__(self) -> int:
        return (self[0] * _NODE_FACTOR + self[1] * _NUMBER_FACTOR) % _MODULUS

    @classmethod
    def parse(cls, message: autograd_pb2.ContextId) -> ContextId:
        return _new(cls, (message.peer, message.number))

    @classmethod
    def from_text(cls, text: str) -> ContextId:
        """The context that `str` writes so. Raises ValueError if it is none."""
        peer, _, number = text.partition(":")
        try:
            return cls(int(peer, 16), int(number))
        except ValueError:
            raise ValueError(f"{text!r} names no context; one looks like 1f0c5a3b9d2e4f60:7") from None

    def write(self, message: autograd_pb2.ContextId) -> None:
        message.peer, message.number = self

    def __str__(self) -> str:
        return f"{self.peer:016x}:{self.number}"


class AutogradMessageId(NamedTuple):
    """One sending of tensors that require grad, or one pass: the peer, and that peer's number for it."""

    peer: int
    number: int

    def __hash__(self) -> int:
        return (self[0] * _NODE_FACTOR + self[1] * _NUMBER_FACTOR) % _MODULUS

    @classmethod
    def parse(cls, message: autograd_pb2.AutogradMessageId) -> AutogradMessageId:
        return _new(cls, (message.peer, message.number))

    def write(self, message: autograd_pb2.AutogradMessageId) -> None:
        message.peer, message.number = self

    def __str__(self) -> str:
        return f"{self.peer:016x}:{self.number}"


def message_ids(messages: Iterable[autograd_pb2.AutogradMessageId]) -> list[AutogradMessageId]:
    return [_new(AutogradMessageId, (message.peer, message.number)) for message in messages]


def message_protos(ids: Iterable[AutogradMessageId]) -> list[autograd_pb2.AutogradMessageId]:
    return [autograd_pb2.AutogradMessageId(peer=id.peer, number=id.number) for id in ids]
