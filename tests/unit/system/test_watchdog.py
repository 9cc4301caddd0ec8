"""Watched objects are checked, whatever happened before."""

from __future__ import annotations

import threading

import pytest
from tests.unit.system.support import eventually

from gradwire.system.watchdog import _Watchdog


class Seen:
    """Counts how often it is checked."""

    def __init__(self, error: Exception | None = None) -> None:
        self.times = 0
        self._error = error

    def check(self, now: float) -> bool:
        self.times += 1
        if self._error is not None:
            raise self._error
        return False


def test_a_thread_that_failed_to_start_is_started_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    watchdog, first, second = _Watchdog(), Seen(), Seen()

    def fail(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", fail)
        assert not watchdog.watch(first)
    assert watchdog.watch(second)
    eventually(lambda: first.times > 0 and second.times > 0)


def test_a_failing_check_keeps_no_other_from_being_checked() -> None:
    watchdog, broken, sound = _Watchdog(), Seen(ValueError("broken")), Seen()
    watchdog.watch(broken)
    eventually(lambda: broken.times > 0)
    watchdog.watch(sound)
    eventually(lambda: sound.times > 0)
