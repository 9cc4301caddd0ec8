"""The ids of contexts, messages and passes. Each peer numbers its own, so there is no coordinator.

An id is also the right to what it names. Its key cannot be guessed: only a peer that was told of something
can name it, and to all others it is not found.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from os import urandom
from typing import Generic, Self, TypeVar

from gradwire.errors import MalformedMessage
from gradwire.proto.v1 import autograd_pb2

__all__ = ["AutogradMessageId", "ContextId", "message_ids", "message_protos", "read_ids"]

Message = TypeVar("Message", autograd_pb2.ContextId, autograd_pb2.AutogradMessageId)

_layout = struct.Struct("<QQQ")
_pack, _unpack = _layout.pack, _layout.unpack
_pack_number = struct.Struct("<QQ").pack
_KEY_BYTES = 8
_new = bytes.__new__
"""Called directly where ids come from messages, since each message has many ids."""


class _Id(bytes, Generic[Message]):
    """A peer, a number of that peer, and a random key, as 24 bytes.

    Ids are looked up far more often than they are taken apart, and other peers choose them. The hash of bytes
    is computed once, with a key that Python draws for each process: peers cannot choose many ids with the
    same hash, as they could with tuples, which would make each lookup slow.
    """

    __slots__ = ()

    def __new__(cls, peer: int, number: int, key: int) -> Self:
        return _new(cls, _pack(peer, number, key))

    def __getnewargs__(self) -> tuple[int, int, int]:  # type: ignore[override]
        return _unpack(self)

    @classmethod
    def new(cls, peer: int, number: int) -> Self:
        """An id with a key of its own."""
        return _new(cls, _pack_number(peer, number) + urandom(_KEY_BYTES))

    @classmethod
    def of(cls, content: bytes) -> Self:
        """The id of these 24 bytes."""
        return _new(cls, content)

    @property
    def peer(self) -> int:
        peer: int = _unpack(self)[0]
        return peer

    @property
    def number(self) -> int:
        number: int = _unpack(self)[1]
        return number

    @property
    def key(self) -> int:
        key: int = _unpack(self)[2]
        return key

    @classmethod
    def parse(cls, message: Message) -> Self:
        return _new(cls, _pack(message.peer, message.number, message.key))

    def write(self, message: Message) -> None:
        message.peer, message.number, message.key = _unpack(self)

    # Without the key, so that neither logs nor errors hand on the right to use it.

    def __str__(self) -> str:
        return f"{self.peer:016x}:{self.number}"

    def __repr__(self) -> str:
        return f"{type(self).__name__}(peer={self.peer}, number={self.number})"


class ContextId(_Id[autograd_pb2.ContextId]):
    """The id of a context: the peer that opened it, and a number of that peer. Number 0 is the ambient
    context of the peer."""

    __slots__ = ()

    @classmethod
    def from_text(cls, text: str) -> ContextId:
        """The id that `str` writes as this text, without its key. Raises ValueError if there is none."""
        peer, _, number = text.partition(":")
        try:
            return cls(int(peer, 16), int(number), 0)
        except (ValueError, struct.error):
            raise ValueError(f"{text!r} names no context; one looks like 1f0c5a3b9d2e4f60:7") from None


class AutogradMessageId(_Id[autograd_pb2.AutogradMessageId]):
    """The id of an autograd message or of a pass: the peer that sent or started it, and a number of that
    peer."""

    __slots__ = ()


def message_ids(messages: Iterable[autograd_pb2.AutogradMessageId]) -> list[AutogradMessageId]:
    return [_new(AutogradMessageId, _pack(message.peer, message.number, message.key)) for message in messages]


def read_ids(body: bytes, at: int, count: int) -> list[AutogradMessageId]:
    """Ids that stand in a body one after another."""
    end = at + count * _layout.size
    if end > len(body):
        raise MalformedMessage(f"a body of {len(body)} bytes lacks ids")
    return [
        _new(AutogradMessageId, body[start : start + _layout.size]) for start in range(at, end, _layout.size)
    ]


def message_protos(ids: Iterable[AutogradMessageId]) -> list[autograd_pb2.AutogradMessageId]:
    return [
        autograd_pb2.AutogradMessageId(peer=peer, number=number, key=key)
        for peer, number, key in map(_unpack, ids)
    ]
