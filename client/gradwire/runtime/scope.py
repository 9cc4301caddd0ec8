"""What a served function runs in: whose peer it is part of, who asked, and how long it may take."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from gradwire.errors import Cancelled
from gradwire.runtime.compression import Compression
from gradwire.runtime.context_vars import CarriedVar
from gradwire.transport.base import ResponseFuture, ServerCall
from gradwire.wire.ids import ContextId

__all__ = [
    "Scope",
    "cancel_with_caller",
    "cancelled",
    "current_scope",
    "deadline",
    "enter",
    "entered",
    "leave",
    "time_left",
    "timeout",
    "waiting",
]

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Scope:
    """The surroundings of the code that runs now. Empty outside served functions.

    Others see the same object, so it is never changed: to change something for a block, enter a copy.
    """

    peer: object | None = None
    """The `LocalPeer` whose function runs. `peers`, the room above, knows what it is: `peers.current`."""
    server_call: ServerCall | None = None
    deadline: float | None = None
    """On time.monotonic's clock."""
    context: ContextId | None = None
    """The autograd context that calls are made in; None for the peer's ambient one."""
    around_wait: Callable[[], AbstractContextManager[None]] | None = None
    """Entered while the code waits for another process, so that others may compute meanwhile."""
    compression: Compression | None = None
    """Of calls that are made; None for what the handle to a worker says."""
    detect_anomaly: bool | None = None
    """Whether who asked wants anomaly detection; None for torch's own switch, if nobody asked."""

    def in_context(self, context: ContextId | None, detect_anomaly: bool | None) -> Scope:
        """The same with another context. Written out, as every call needs it, and `replace` takes longer."""
        return Scope(
            self.peer,
            self.server_call,
            self.deadline,
            context,
            self.around_wait,
            self.compression,
            detect_anomaly,
        )


Token = tuple[Any, Any]
_scope: CarriedVar[Scope] = CarriedVar("scope", default=Scope())


def current_scope() -> Scope:
    return _scope.get()


def enter(scope: Scope) -> Token:
    return _scope.set(scope)


def leave(token: Token) -> None:
    _scope.reset(token)


class entered:
    """Runs a block in a scope. Not `carried`: on this thread alone, for a block that runs no backward."""

    __slots__ = ("_carried", "_scope", "_token")

    def __init__(self, scope: Scope, *, carried: bool = True) -> None:
        self._scope = scope
        self._carried = carried

    def __enter__(self) -> None:
        self._token = _scope.set(self._scope, carried=self._carried)

    def __exit__(self, *_: object) -> None:
        _scope.reset(self._token)


def waiting(wait: Callable[[], T]) -> T:
    """Waits for another process, or for another call: others may compute meanwhile."""
    scope = _scope.get()
    around_wait = scope.around_wait
    try:
        if scope.server_call is not None:
            scope.server_call.about_to_block()
        if around_wait is None:
            return wait()
        with around_wait():
            return wait()
    finally:
        del wait  # it may be of a future, to which the traceback of an error would lead back


def time_left(timeout: float | None) -> float | None:
    """The shorter of a timeout and what the surroundings leave; None if neither sets a limit."""
    limit = _scope.get().deadline
    if limit is None:
        return timeout
    left = max(limit - time.monotonic(), 0.0)
    return left if timeout is None else min(timeout, left)


def deadline() -> float | None:
    """Seconds left for the code that runs now; None if there is no limit.

    In a served function this is what its caller has left. Calls to other workers made from there are
    bounded by it without further ado.
    """
    return time_left(None)


def cancelled() -> bool:
    """Whether the caller of the served function that runs now no longer wants the answer.

    A function that takes long can ask now and then, and stop early.
    """
    scope = _scope.get()
    if scope.server_call is not None and scope.server_call.cancelled:
        return True
    return scope.deadline is not None and time.monotonic() >= scope.deadline


def cancel_with_caller(future: ResponseFuture) -> None:
    """What a served function, or a backward on behalf of another peer, asks of others is of no use once
    whoever asked for it has given up. Raises Cancelled if that has happened already."""
    server_call = _scope.get().server_call
    if server_call is None:
        return
    if server_call.cancelled:
        raise Cancelled("whoever asked for this has given it up")
    future.is_nested = True
    take_back = server_call.when_cancelled(future.cancel)
    # Else a function that makes many calls would keep the results of all of them until it returns.
    future.when_settled(take_back)


@contextmanager
def timeout(seconds: float) -> Iterator[None]:
    """Bounds all calls made in a block, those that they cause on other workers included.

    >>> import gradwire as gw
    >>> with gw.timeout(5):
    ...     gw.deadline() <= 5
    True
    """
    scope = _scope.get()
    limit = time.monotonic() + seconds
    if scope.deadline is not None:
        limit = min(limit, scope.deadline)
    with entered(replace(scope, deadline=limit)):
        yield
