"""Questions that the other end was too busy for: they rest a while, and are asked again."""

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

_SHORTEST_REST, _LONGEST_REST = 0.005, 5.0
_PATIENCE_SECONDS = 120.0
"""How long a question without a deadline is asked again and again."""


class RetryQueue:
    """Asks again, with growing and random pauses, for as long as the question's deadline or patience allows.

    Only what the other end refused before anything of it ran: asking again cannot make it run twice.
    """

    def __init__(self, ask_again: Callable[[OutboundCall], None]) -> None:
        self._ask_again = ask_again
        self._lock = threading.Lock()
        self._retries: dict[OutboundCall, Timer] = {}

    def takes(self, asked: OutboundCall, error: link_pb2.Error) -> bool:
        """Whether a refused question will be asked again; if not, the refusal is the answer."""
        if not error.not_started or error.retry_after_seconds <= 0:
            return False
        pause = min(max(error.retry_after_seconds, _SHORTEST_REST * 2**asked.refusals), _LONGEST_REST)
        # Jitter: those who were refused together must not come back together.
        pause *= between(0.5, 1.5)
        if asked.refusals == 0:
            asked.refused_since = time.monotonic()
        give_up_at = asked.refused_since + _PATIENCE_SECONDS if asked.deadline is None else asked.deadline
        if time.monotonic() + pause >= give_up_at:
            return False
        asked.refusals += 1
        with self._lock:
            asked.future.abandon = partial(self._give_up, asked)
            self._retries[asked] = call_later(pause, partial(self._wake, asked))
        if asked.future.cancelled():
            self._give_up(asked)
        return True

    def end(self, error: GradwireError) -> None:
        """Nothing will be asked any more."""
        with self._lock:
            resting, self._retries = self._retries, {}
        for asked, timer in resting.items():
            timer.cancel()
            asked.future.settle(error.again())

    def _wake(self, asked: OutboundCall) -> None:
        with self._lock:
            if self._retries.pop(asked, None) is None:
                return
        try:
            self._ask_again(asked)
        except GradwireError as error:
            asked.future.settle(error)

    def _give_up(self, asked: OutboundCall) -> None:
        with self._lock:
            timer = self._retries.pop(asked, None)
        if timer is not None:
            timer.cancel()
