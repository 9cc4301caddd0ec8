"""Context variables whose values also hold on the threads of torch's autograd engine."""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar, Token
from typing import Any, Generic, TypeVar

from gradwire.torch_internals import is_stashed, stash, stashed, unstash

__all__ = ["CarriedVar"]

T = TypeVar("T")
_UNSET: Any = object()


class _Stashed:
    """A value in torch's thread-local state, which torch hands over to the threads of its engine."""

    __slots__ = ("is_reset", "outer", "thread", "value")

    def __init__(self, thread: int, value: Any, outer: _Stashed | None) -> None:
        self.thread = thread
        """The thread that set the value. That thread itself uses the context variable instead."""
        self.value = value
        self.outer = outer
        """What was stashed when the value was set."""
        self.is_reset = False
        """Whether `CarriedVar.reset` was called for the value, perhaps while a later value was stashed."""


class CarriedVar(Generic[T]):
    """A context variable that torch carries to the threads of its engine that run a backward.

    A backward runs on the thread that calls it, except for nodes on a device and for backwards nested more
    than 60 deep. These run on threads of the engine, where Python's context variables are not set. torch
    hands its thread-local state over to these threads, so a value is stashed there as well, and only threads
    other than the one that set the value read it there.

    Values may be reset in another order than they were set in: one thread can be in several
    `contextvars.Context`, and has a single stash for all of them.

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
        if not is_stashed(self._key):
            return self._default  # the usual case: a trainer outside of any block
        carried = self._stashed()
        if carried is not None and carried.thread != threading.get_ident():
            found: T = carried.value
            return found
        return self._default

    def set(self, value: T) -> tuple[Token[T], _Stashed | None]:
        """Sets the value, and returns a token for `reset`.

        If Ctrl-C interrupts this method, the value is not set.
        """
        entry: _Stashed | None = None
        before: T = self._variable.get(_UNSET)
        try:
            if asyncio._get_running_loop() is None:
                entry = _Stashed(threading.get_ident(), value, self._stashed())
                stash(self._key, entry)
            return self._variable.set(value), entry
        except BaseException:
            self._variable.set(before)
            self._take_out(entry)
            raise

    def reset(self, token: tuple[Token[T], _Stashed | None]) -> None:
        variable_token, entry = token
        if entry is not None:
            self._take_out(entry)
        self._variable.reset(variable_token)

    def _take_out(self, entry: _Stashed | None) -> None:
        if entry is None:
            return
        entry.is_reset = True
        if entry.outer is None and is_stashed(self._key) and stashed(self._key) is entry:
            unstash(self._key)  # the usual case: values are reset in the reverse order
            return
        innermost = self._stashed()
        if innermost is not None:
            stash(self._key, innermost)
        elif is_stashed(self._key):
            unstash(self._key)
        while innermost is not None:  # else values that overlap in time would make an ever longer chain
            innermost.outer = _not_reset(innermost.outer)
            innermost = innermost.outer

    def _stashed(self) -> _Stashed | None:
        """The value that was set last and was not reset."""
        if not is_stashed(self._key):
            return None
        return _not_reset(stashed(self._key))


def _not_reset(entry: _Stashed | None) -> _Stashed | None:
    while entry is not None and entry.is_reset:
        entry = entry.outer
    return entry
