"""Timers fire in order, are never lost, and are removed when they are cancelled."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from functools import partial

import pytest
from tests.unit.system.support import SECONDS, eventually

from gradwire.system import timers
from gradwire.system.timers import _Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Clock]:
    """A clock whose thread ends with the test."""
    monkeypatch.setattr(_Clock, "IDLE_SECONDS", 0.01)
    clock = _Clock()
    yield clock
    for _, _, timer in list(clock._heap):
        timer.cancel()
    for timer in list(clock._incoming):
        timer.cancel()
    clock.call_later(0.0, lambda: None)
    eventually(lambda: clock._thread is None)


def test_timers_fire_in_order_of_time(clock: _Clock) -> None:
    fired: list[str] = []
    added, done = threading.Event(), threading.Event()
    # However long it takes to add the timers, none fires before all are there.
    clock.call_later(0.0, partial(added.wait, SECONDS))
    clock.call_later(3600, lambda: None)
    due = time.monotonic()
    for offset, name in ((0.03, "last"), (0.01, "first"), (0.02, "second")):
        clock.call_later(due + offset - time.monotonic(), partial(fired.append, name))
    clock.call_later(due + 0.04 - time.monotonic(), done.set)
    added.set()
    assert done.wait(SECONDS)
    assert fired == ["first", "second", "last"]


def test_an_earlier_timer_wakes_the_thread(clock: _Clock) -> None:
    clock.call_later(3600, lambda: None)
    for _ in range(50):
        eventually(lambda: clock._sleeps_until > time.monotonic())
        done = threading.Event()
        clock.call_later(0.0, done.set)
        assert done.wait(SECONDS)


def test_a_cancelled_timer_does_not_fire(clock: _Clock) -> None:
    fired: list[str] = []
    done = threading.Event()
    clock.call_later(0.5, lambda: fired.append("cancelled")).cancel()
    clock.call_later(0.6, done.set)
    assert done.wait(SECONDS)
    assert fired == []


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit, KeyboardInterrupt])
def test_a_failing_callback_stops_no_other(
    error: type[BaseException], clock: _Clock, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise error

    done = threading.Event()
    clock.call_later(0.0, fail)
    clock.call_later(0.01, done.set)
    assert done.wait(SECONDS)
    assert error.__name__ in caplog.text


def test_an_interrupt_while_the_thread_is_started_does_no_harm(
    clock: _Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(thread: threading.Thread) -> None:
        raise KeyboardInterrupt

    done = threading.Event()
    with monkeypatch.context() as patched:
        patched.setattr(timers.threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            clock.call_later(0.0, lambda: None)
    clock.call_later(0.0, done.set)
    assert done.wait(SECONDS)


def test_destructors_set_timers_at_any_moment(clock: _Clock) -> None:
    """The garbage collector runs destructors within any line, those of the clock included."""
    fired: list[None] = []

    class Dropped:
        def __init__(self) -> None:
            self.itself = self

        def __del__(self) -> None:
            clock.call_later(3600, lambda: None).cancel()
            clock.call_later(0.0, lambda: fired.append(None))

    clock.call_later(3600, lambda: None)
    before = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        for _ in range(500):
            Dropped()
            clock.call_later(0.0, lambda: None)
    finally:
        gc.set_threshold(*before)
    gc.collect()
    eventually(lambda: len(fired) == 500)


def test_timers_started_while_the_thread_ends_fire(clock: _Clock) -> None:
    """The thread ends when there was no timer for a while; here that is a very short time."""
    for number in range(200):
        done = threading.Event()
        time.sleep(0.0001 * (number % 120))
        clock.call_later(0.0, done.set)
        assert done.wait(SECONDS)


def test_cancelled_timers_do_not_pile_up(clock: _Clock) -> None:
    for _ in range(20_000):
        clock.call_later(3600.0, lambda: None).cancel()
    eventually(lambda: len(clock._heap) + len(clock._incoming) <= 2 * _Clock.KEPT_CANCELLED + 2)


def test_live_timers_survive_the_sweeping(clock: _Clock) -> None:
    done = threading.Event()
    clock.call_later(0.2, done.set)
    for _ in range(5_000):
        timer = clock.call_later(3600.0, lambda: None)
        timer.cancel()
        timer.cancel()
    assert done.wait(SECONDS)
