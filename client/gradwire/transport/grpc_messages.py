"""Moves the messages of an open gRPC stream without a thread for each direction.

grpcio's own stream is an iterator at each end: a thread writes what it takes from one, another reads the
other, and each message wakes both. Here whoever has a message starts to write it, and gRPC's own thread
passes on what arrives.

This is the one place that uses private names of grpcio. It does with them what grpcio's iterators do, and
leaves the accounts of a call to grpcio's own functions. `AVAILABLE` says whether all of them are there, in a
version with which they were tried; without them, streams are iterators at both ends.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

__all__ = ["AVAILABLE", "Messages", "of_client", "of_server"]

log = logging.getLogger("gradwire.link")

_NO_FLAGS = 0
_TRIED = (1, 74), (1, 85)
"""The oldest and the newest version of grpcio with which this was tried. A newer one may have the same names
and mean something else by them."""

try:
    import grpc
    from grpc import _channel, _server
    from grpc._cython import cygrpc  # type: ignore[attr-defined]

    _SEND, _RECEIVE = cygrpc.OperationType.send_message, cygrpc.OperationType.receive_message
    _SendMessage, _ReceiveMessage = cygrpc.SendMessageOperation, cygrpc.ReceiveMessageOperation
    _client_handler, _operate = _channel._event_handler, cygrpc.IntegratedCall.operate
    _is_active = _server._is_rpc_state_active
    _sent, _received = _server._send_message, _server._receive_message
    _SEND_TOKEN, _RECEIVE_TOKEN = _server._SEND_MESSAGE_TOKEN, _server._RECEIVE_MESSAGE_TOKEN
    _start_batch = cygrpc.Call.start_server_batch
    AVAILABLE = _TRIED[0] <= tuple(map(int, grpc.__version__.split(".")[:2])) <= _TRIED[1]
except (ImportError, AttributeError) as error:
    log.info("streams of grpcio stay iterators: %s", error)
    AVAILABLE = False


class Messages(Protocol):
    """The messages of one stream. Callbacks come on gRPC's own thread, which must not block."""

    def write(self, data: bytes, on_written: Callable[[], object]) -> bool:
        """Starts to write, and calls back when the next message may be written: one is written at a time,
        those of the stream's iterator among them. Returns False if the stream has ended."""

    def read(self, on_read: Callable[[bytes | None], object]) -> None:
        """Calls back with each message from now on, and with None at the end. Nobody else may read then."""


def of_client(call: Any) -> Messages | None:
    """The messages of a stream that this process has opened; None if they cannot be had."""
    return _of(_ClientMessages, call)


def of_server(context: Any) -> Messages | None:
    """The messages of a stream that another process has opened; None if they cannot be had."""
    return _of(_ServerMessages, context)


def _of(messages: Callable[[Any], Messages], stream: Any) -> Messages | None:
    try:
        return messages(stream) if AVAILABLE else None
    except AttributeError as error:
        log.info("this stream of grpcio stays an iterator: %s", error)
        return None


def _call_back(callback: Callable[..., object], *arguments: object) -> None:
    """An error would end gRPC's thread, and with it all streams."""
    try:
        callback(*arguments)
    except Exception:
        log.exception("a message of a stream could not be handled")


class _Messages(ABC):
    """What both ends have in common. Each event goes to grpcio's own handler before anything else."""

    def __init__(
        self, state: Any, received_in: str, on_sent: Callable[..., Any], on_received: Callable[..., Any]
    ) -> None:
        """The handler `on_received` leaves the message in the attribute `received_in` of the state."""
        self._state = state
        self._lock = state.condition
        self._due = state.due
        self._received_in = received_in
        self._on_sent = on_sent
        self._on_received = on_received

    def write(self, data: bytes, on_written: Callable[[], object]) -> bool:
        def on_event(event: Any) -> Any:
            outcome = self._on_sent(event)
            _call_back(on_written)
            return outcome

        return self._start(_SendMessage(data, _NO_FLAGS), on_event, is_read=False)

    def read(self, on_read: Callable[[bytes | None], object]) -> None:
        def on_event(event: Any) -> Any:
            outcome = self._on_received(event)
            data = getattr(self._state, self._received_in)
            setattr(self._state, self._received_in, None)
            if data is not None:
                start()
            _call_back(on_read, data)
            return outcome

        def start() -> None:
            if not self._start(_ReceiveMessage(_NO_FLAGS), on_event, is_read=True):
                _call_back(on_read, None)

        start()

    @abstractmethod
    def _start(self, operation: Any, on_event: Callable[[Any], Any], *, is_read: bool) -> bool:
        """Returns False if the stream has ended."""


class _ClientMessages(_Messages):
    def __init__(self, call: Any) -> None:
        handler = _client_handler(call._state, None)
        super().__init__(call._state, "response", handler, handler)
        self._operate = call._call.operate

    def _start(self, operation: Any, on_event: Callable[[Any], Any], *, is_read: bool) -> bool:
        with self._lock:
            if self._state.code is not None:
                return False
            try:
                is_started: bool = self._operate((operation,), on_event)
            except ValueError:  # the stream is ending
                return False
            if is_started:
                self._due.add(_RECEIVE if is_read else _SEND)
            return is_started


class _ServerMessages(_Messages):
    def __init__(self, context: Any) -> None:
        state, call = context._state, context._rpc_event.call
        super().__init__(state, "request", _sent(state, _SEND_TOKEN), _received(state, call, None))
        self._operate = call.start_server_batch

    def _start(self, operation: Any, on_event: Callable[[Any], Any], *, is_read: bool) -> bool:
        with self._lock:
            if not _is_active(self._state):
                return False
            try:
                self._operate((operation,), on_event)
            except ValueError:  # the stream is ending
                return False
            self._due.add(_RECEIVE_TOKEN if is_read else _SEND_TOKEN)
            return True
