"""Context variables that hold on the threads of torch's engine, too."""

from __future__ import annotations

import asyncio
import threading
from contextvars import ContextVar, Token
from typing import Any, Generic, NamedTuple, TypeVar

from gradwire.torch_internals import is_stashed, stash, stashed, unstash

__all__ = ["CarriedVar", "unstash"]

T = TypeVar("T")
_UNSET: Any = object()


class _Stashed(NamedTuple):
    """What torch carries to other threads."""

    thread: int
    """The thread that it is from, where the context variable itself says what holds."""
    value: Any


class CarriedVar(Generic[T]):
    """A context variable that torch carries to the threads which run a backward that was started with it.

    A backward runs on the thread that calls it, but for what is on a device, and for backwards nested more
    than 60 deep. Those run on threads of the engine, where context variables are not set. torch hands its
    thread-local state over to them: so a value is put there, too, and looked up there by such threads only.

    Within an event loop, values are not put there: another task of the thread would hand them over as its
    own. A backward in a task has on other threads what held where the loop was started.
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
        """What it returns undoes it, with `reset`. Not `carried`: it holds on this thread alone."""
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
