"""What a conversation remembers: the questions that this end asked, and those that it was asked."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from gradwire.errors import Cancelled, ResourceExhausted
from gradwire.proto.v1 import link_pb2
from gradwire.transport import faults
from gradwire.transport.base import Buffer, Exchange, Pending, Received, Sendable, call_each
from gradwire.transport.timers import Timer

if TYPE_CHECKING:
    from gradwire.transport.conversation import Conversation

__all__ = ["Asked", "Served"]

Answer = tuple[bytes | link_pb2.Error, Sequence[Sendable]]


class Asked:
    """A question that this end asked and that is not answered yet."""

    __slots__ = (
        "attachments",
        "body",
        "deadline",
        "method",
        "pending",
        "refusals",
        "refused_since",
        "timeout",
        "timer",
    )

    def __init__(
        self,
        method: int,
        body: bytes,
        attachments: Sequence[Sendable],
        pending: Pending,
        timeout: float | None,
    ) -> None:
        self.method = method
        self.body = body
        self.attachments = attachments
        self.pending = pending
        self.timeout = timeout
        self.deadline = None if timeout is None else time.monotonic() + timeout
        self.timer: Timer | None = None
        self.refusals = 0
        """How often the other end was too busy for it."""
        self.refused_since = 0.0

    @property
    def size(self) -> int:
        """Bytes of its attachments."""
        return sum(len(attachment.view) for attachment in self.attachments)

    def stop_timer(self) -> None:
        if self.timer is not None:
            self.timer.cancel()


class Served(Exchange):
    """A question that the other end asked, kept until the answer is acknowledged.

    Its state is under the conversation's lock.
    """

    def __init__(
        self, conversation: Conversation, request: link_pb2.Request, attachments: Sequence[Buffer]
    ) -> None:
        self.id = request.id
        self.method = request.method
        self.request = Received(request.body, attachments)
        left = request.timeout_seconds
        self.deadline = time.monotonic() + left if left > 0 else None
        self.link = conversation
        self.answer: Answer | None = None
        self._conversation = conversation
        self._cancelled = False
        self._callbacks: dict[object, Callable[[], object]] = {}

    @property
    def cancelled(self) -> bool:
        return self._cancelled

    def when_cancelled(self, callback: Callable[[], object]) -> Callable[[], None]:
        token = object()
        with self._conversation._lock:
            if not self._cancelled:
                self._callbacks[token] = callback
                return lambda: self._take_back(token)
        callback()
        return lambda: None

    def _take_back(self, token: object) -> None:
        with self._conversation._lock:
            self._callbacks.pop(token, None)

    def cancel(self) -> None:
        with self._conversation._lock:
            self._cancelled = True
            callbacks, self._callbacks = self._callbacks, {}
        call_each(callbacks.values())

    def reply(self, body: bytes, attachments: Sequence[Sendable] = ()) -> None:
        try:
            self._conversation._check_size(body, attachments)
        except ResourceExhausted as error:
            self.fail(faults.describe(error, self._conversation.local.name))
        else:
            self._answer(body, attachments)

    def fail(self, error: link_pb2.Error) -> None:
        self._answer(error, ())

    def _answer(self, outcome: bytes | link_pb2.Error, attachments: Sequence[Sendable]) -> None:
        with self._conversation._lock:
            if self.answer is None:
                if self._cancelled and attachments:
                    # Nobody waits for it, so nobody has to carry it.
                    error = Cancelled("the call was cancelled")
                    outcome, attachments = faults.describe(error, self._conversation.local.name), ()
                self.answer = (outcome, attachments)
                self.request = Received(b"")  # its memory is not needed for answering again
                self._callbacks.clear()
                self._conversation._send_answer(self)
