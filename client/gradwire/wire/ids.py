"""The ids of contexts, messages and passes. Each peer numbers its own, so there is no coordinator."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from typing import NamedTuple

from gradwire.proto.v1 import autograd_pb2

__all__ = ["AutogradMessageId", "ContextId", "message_ids", "message_protos"]

_new = tuple.__new__
"""What the constructor of a named tuple calls. Called directly, since each message has many ids."""

# Ids do not use the hash of tuples: other peers choose their ids, and could choose many with the same hash,
# which would make each lookup slow. Without knowing these random factors a peer cannot find such ids.
_MODULUS = (1 << 61) - 1
_PEER_FACTOR = secrets.randbelow(_MODULUS - 1) + 1
_NUMBER_FACTOR = secrets.randbelow(_MODULUS - 1) + 1


class ContextId(NamedTuple):
    """The id of a context: the peer that opened it, and a number of that peer. Number 0 is the ambient
    context of the peer."""

    peer: int
    number: int

    def __hash__(self) -> int:
        return (self[0] * _PEER_FACTOR + self[1] * _NUMBER_FACTOR) % _MODULUS

    @classmethod
    def parse(cls, message: autograd_pb2.ContextId) -> ContextId:
        return _new(cls, (message.peer, message.number))

    @classmethod
    def from_text(cls, text: str) -> ContextId:
        """The id that `str` writes as this text. Raises ValueError if it is not the text of an id."""
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
    """The id of an autograd message or of a pass: the peer that sent or started it, and a number of that
    peer."""

    peer: int
    number: int

    def __hash__(self) -> int:
        return (self[0] * _PEER_FACTOR + self[1] * _NUMBER_FACTOR) % _MODULUS

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
