"""Context variables whose values also hold on the threads of torch's autograd engine."""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar, Token
from typing import Any, Generic, NamedTuple, TypeVar

from gradwire.torch_internals import is_stashed, stash, stashed, unstash

__all__ = ["CarriedVar"]

T = TypeVar("T")
_UNSET: Any = object()


class _Stashed(NamedTuple):
    """A value in torch's thread-local state, which torch hands over to the threads of its engine."""

    thread: int
    """The thread that set the value. That thread itself uses the context variable instead."""
    value: Any


class CarriedVar(Generic[T]):
    """A context variable that torch carries to the threads of its engine that run a backward.

    A backward runs on the thread that calls it, except for nodes on a device and for backwards nested more
    than 60 deep. These run on threads of the engine, where Python's context variables are not set. torch
    hands its thread-local state over to these threads, so a value is stashed there as well, and only threads
    other than the one that set the value read it there.

    Within an asyncio event loop values are not stashed, because another task of the same thread would hand
    them over as its own. On engine threads, a backward of a task has the value from where the loop was
    started.
    """

    def __init__(self, name: str, *, default: T) -> None:
        self._variable: ContextVar[T] = ContextVar(name)
        self._key = f"gradwire.{name}"
        self._default = default

    def get(self) -> T:
        value: T = self._variable.get(_UNSET)
        if value is not _UNSET:
            return value
        carried = self._stashed()
        if carried is not None and carried.thread != threading.get_ident():
            found: T = carried.value
            return found
        return self._default

    def set(self, value: T, *, carried: bool = True) -> tuple[Token[T], _Stashed | bool | None]:
        """Sets the value, and returns a token for `reset`. Unless `carried`, it holds on this thread only."""
        before: _Stashed | bool | None = False
        if carried and asyncio._get_running_loop() is None:
            before = self._stashed()
            stash(self._key, _Stashed(threading.get_ident(), value))
        return self._variable.set(value), before

    def reset(self, token: tuple[Token[T], _Stashed | bool | None]) -> None:
        variable_token, before = token
        self._variable.reset(variable_token)
        if before is None:
            unstash(self._key)
        elif before is not False:
            stash(self._key, before)

    def _stashed(self) -> _Stashed | None:
        if not is_stashed(self._key):
            return None
        carried: _Stashed | None = stashed(self._key)
        return carried
