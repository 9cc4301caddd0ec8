"""Deadlines are kept in order, and forgotten when they are not needed."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest

from gradwire.transport.timers import _Clock


def test_timers_fire_in_order_of_time() -> None:
    clock, fired, done = _Clock(), [], threading.Event()
    with clock._changed:  # however long it takes to add them, none fires before all are there
        clock.call_later(3600, lambda: None)
        due = time.monotonic()
        for offset, name in ((0.03, "last"), (0.01, "first"), (0.02, "second")):
            clock.call_later(due + offset - time.monotonic(), partial(fired.append, name))
        clock.call_later(due + 0.04 - time.monotonic(), done.set)
    assert done.wait(10)
    assert fired == ["first", "second", "last"]


def test_a_cancelled_timer_does_not_fire() -> None:
    clock, fired, done = _Clock(), [], threading.Event()
    clock.call_later(0.01, lambda: fired.append("cancelled")).cancel()
    clock.call_later(0.02, done.set)
    assert done.wait(10)
    assert fired == []


def test_a_failing_callback_stops_no_other(caplog: pytest.LogCaptureFixture) -> None:
    clock, done = _Clock(), threading.Event()
    clock.call_later(0.0, lambda: 1 / 0)
    clock.call_later(0.01, done.set)
    assert done.wait(10)
    assert "ZeroDivisionError" in caplog.text


def test_cancelled_timers_do_not_pile_up() -> None:
    clock = _Clock()
    for _ in range(20_000):
        clock.call_later(3600.0, lambda: None).cancel()
    assert len(clock._heap) <= 2 * _Clock.KEPT_CANCELLED + 2


def test_live_timers_survive_the_sweeping(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, done = _Clock(), threading.Event()
    clock.call_later(0.2, done.set)
    for _ in range(5_000):
        timer = clock.call_later(3600.0, lambda: None)
        timer.cancel()
        timer.cancel()
    assert done.wait(10)
