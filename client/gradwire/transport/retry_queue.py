"""Requests that the other peer refused because it was too busy: they wait, and are sent again."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial

from gradwire.errors import GradwireError
from gradwire.proto.v1 import link_pb2
from gradwire.system.randomness import between
from gradwire.system.timers import Timer, call_later
from gradwire.transport.calls import OutboundCall

__all__ = ["RetryQueue"]

_LONGEST_PAUSE = 5.0
_PATIENCE_SECONDS = 120.0
"""How long a request without a deadline is sent again and again."""


class RetryQueue:
    """Sends refused requests again after random pauses, until their deadline or a limit.

    The pauses are about as long as the refusing peer says, and do not grow from one refusal to the next: that
    peer holds room for the request when it expects it, so whoever comes much later would find the room taken.

    Only requests that the other peer refused before anything of them ran: sending them
    again cannot make them run twice.
    """

    def __init__(self, send_again: Callable[[OutboundCall], None]) -> None:
        self._send_again = send_again
        self._lock = threading.Lock()
        self._retries: dict[OutboundCall, Timer] = {}

    def schedule(self, call: OutboundCall, error: link_pb2.Error) -> bool:
        """Schedules a refused request to be sent again. Returns False if the refusal is
        final, and is the response."""
        if not error.not_started or error.retry_after_seconds <= 0:
            return False
        # Jitter: requests that were refused together must not be sent again together.
        pause = min(error.retry_after_seconds, _LONGEST_PAUSE) * between(0.5, 1.5)
        now = time.monotonic()
        call.refused_since = call.refused_since or now
        give_up_at = call.refused_since + _PATIENCE_SECONDS if call.deadline is None else call.deadline
        if now + pause >= give_up_at:
            return False
        with self._lock:
            call.future.abandon = partial(self._give_up, call)
            self._retries[call] = call_later(pause, partial(self._retry, call))
        if call.future.cancelled():
            self._give_up(call)
        return True

    def end(self, error: GradwireError) -> None:
        """Fails all requests that wait to be sent again."""
        with self._lock:
            waiting, self._retries = self._retries, {}
        for call, timer in waiting.items():
            timer.cancel()
            call.future.settle(error.again())

    def _retry(self, call: OutboundCall) -> None:
        with self._lock:
            if self._retries.pop(call, None) is None:
                return
        try:
            self._send_again(call)
        except GradwireError as error:
            call.future.settle(error)

    def _give_up(self, call: OutboundCall) -> None:
        with self._lock:
            timer = self._retries.pop(call, None)
        if timer is not None:
            timer.cancel()
