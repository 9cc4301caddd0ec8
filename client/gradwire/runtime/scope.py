"""The scope that code runs in: its peer, the request that it serves, its deadline, its context."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, TypeVar

from gradwire.errors import Cancelled
from gradwire.runtime.compression import Compression
from gradwire.runtime.context_vars import CarriedVar
from gradwire.transport.base import ResponseFuture, ServerCall
from gradwire.wire.ids import ContextId

__all__ = [
    "Scope",
    "cancelled",
    "current_scope",
    "deadline",
    "enter",
    "entered",
    "leave",
    "timeout",
    "waiting",
]

T = TypeVar("T")


class Scope(NamedTuple):
    """What holds for the code that runs now. Outside served functions most of it is None.

    Several threads may share a scope, so it is never changed: to change something for a block, enter a copy
    (`_replace`).
    """

    peer: object | None = None
    """The `LocalPeer` whose function runs; None for the program's own peer. Typed as object, because `peers`
    is a room above this one. `peers.current.current_peer` returns the peer."""
    server_call: ServerCall | None = None
    """The request that the code serves, a call or a backward; None where no request is served."""
    deadline: float | None = None
    """When the time is up, on the clock of time.monotonic; None for no limit."""
    context: ContextId | None = None
    """The autograd context that calls are made in; None for the peer's ambient context."""
    around_wait: Callable[[], AbstractContextManager[None]] | None = None
    """Entered while the code waits for another process, so that other calls of the worker may run
    meanwhile."""
    compression: Compression | None = None
    """The compression of calls that are made; None for that of the handle to the worker."""
    detect_anomaly: bool | None = None
    """Whether the requester has anomaly detection on; None where no request is served, for torch's
    own switch."""
    waits_for_link: bool = False
    """Whether calls wait while a connection is cut, whatever `wait_for_ready` its handle has."""

    def for_request(self, context: ContextId | None, detect_anomaly: bool) -> Scope:
        """A copy for what a request names. Written out, because every call makes one, and `_replace` is
        slower: a new field of the scope that travels with calls has to be added here, too.

        `waits_for_link` is left out on purpose: that a request has to arrive says nothing of the calls that
        are made to serve it.
        """
        return Scope(
            self.peer,
            self.server_call,
            self.deadline,
            context,
            self.around_wait,
            self.compression,
            detect_anomaly,
        )

    def time_left(self, timeout: float | None = None) -> float | None:
        """The shorter of a timeout and the time until the deadline; None if there is neither."""
        if self.deadline is None:
            return timeout
        left = max(self.deadline - time.monotonic(), 0.0)
        return left if timeout is None else min(timeout, left)

    def cancel_with_caller(self, future: ResponseFuture) -> None:
        """Cancels a request that a served function, or a backward for another peer, sends, when the request
        that it serves is cancelled. Raises Cancelled if that has been cancelled already."""
        server_call = self.server_call
        if server_call is None:
            return
        if server_call.cancelled:
            raise Cancelled("the request that this call was made for was cancelled")
        future.is_nested = True
        take_back = server_call.when_cancelled(future.cancel)
        # Without this, a function that makes many calls would keep the results of all of them until it
        # returns.
        future.when_settled(take_back)


Token = tuple[Any, Any]
_scope: CarriedVar[Scope] = CarriedVar("scope", default=Scope())


current_scope: Callable[[], Scope] = _scope.get
"""The scope of the code that runs now. (No function of its own, since every call asks for it.)"""


def enter(scope: Scope) -> Token:
    """Enters a scope, until `leave` is called with the returned token."""
    return _scope.set(scope)


def leave(token: Token) -> None:
    """Restores the scope from before `enter`."""
    _scope.reset(token)


class entered:
    """A ``with`` block in a scope."""

    __slots__ = ("_scope", "_token")

    def __init__(self, scope: Scope) -> None:
        self._scope = scope

    def __enter__(self) -> None:
        self._token = _scope.set(self._scope)

    def __exit__(self, *_: object) -> None:
        _scope.reset(self._token)


def waiting(wait: Callable[[], T]) -> T:
    """Calls `wait`, which waits for another process or another call, and lets other calls run meanwhile."""
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
        del wait  # it may refer to a future, which the traceback of an error would keep alive


def deadline() -> float | None:
    """Seconds left for the code that runs now; None if there is no limit.

    In a served function this is the time that its caller has left. Calls that the function makes to other
    workers are bounded by it automatically.
    """
    return _scope.get().time_left()


def cancelled() -> bool:
    """Whether the caller of the served function that runs now has cancelled the call, or its time is up.

    A function that takes long can check this now and then, and stop early.
    """
    scope = _scope.get()
    if scope.server_call is not None and scope.server_call.cancelled:
        return True
    return scope.deadline is not None and time.monotonic() >= scope.deadline


@contextmanager
def timeout(seconds: float) -> Iterator[None]:
    """Bounds the time of all calls made in a block, including the calls that these make to other workers.

    >>> import gradwire as gw
    >>> with gw.timeout(5):
    ...     gw.deadline() <= 5
    True
    """
    scope = _scope.get()
    limit = time.monotonic() + seconds
    if scope.deadline is not None:
        limit = min(limit, scope.deadline)
    with entered(scope._replace(deadline=limit)):
        yield
