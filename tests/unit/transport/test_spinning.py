"""Polling before sleeping: bounded, skipped where it was useless, one thread at a time."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from gradwire.transport import spinning
from gradwire.transport.spinning import Spinning

STEP = 0.00001
"""How long a poll takes, by a clock that only polls advance."""


class Looks:
    """Replaces `select.poll`."""

    def __init__(self) -> None:
        self.now = 100.0
        self.count = 0
        self.takes = STEP
        self.comes_after: int | None = None

    def poll(self, timeout: int, /) -> list[tuple[int, int]]:
        assert timeout == 0
        self.count += 1
        self.now += self.takes
        return [(3, 1)] if self.count == self.comes_after else []


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Looks:
    looks = Looks()
    # Not the clock of the whole process, which other code relies on.
    monkeypatch.setattr(spinning, "time", SimpleNamespace(monotonic=lambda: looks.now))
    return looks


def looked(looks: Looks, work: Callable[[], None]) -> int:
    before = looks.count
    work()
    return looks.count - before


def test_it_returns_when_something_comes(looks: Looks) -> None:
    spin = Spinning(looks)
    for _ in range(3):
        looks.comes_after = looks.count + 5
        assert looked(looks, spin) == 5


def test_it_gives_up(looks: Looks) -> None:
    assert looked(looks, Spinning(looks)) <= spinning._SECONDS / STEP + 2


def test_where_it_was_of_no_use_it_is_not_tried_for_longer_and_longer(looks: Looks) -> None:
    spin = Spinning(looks)
    tries = [index for index in range(300) if looked(looks, spin)]
    pauses = [later - one - 1 for one, later in itertools.pairwise(tries)]
    assert pauses == [1, 3, 7, 15, 31, 63, 63, 63]


def test_where_it_is_of_use_again_it_is_tried_every_time(looks: Looks) -> None:
    spin = Spinning(looks)
    for _ in range(8):
        spin()
    looks.comes_after = looks.count + 1
    while looks.count < looks.comes_after:
        spin()
    assert looked(looks, spin) == 0  # the data was there already: nothing was gained
    looks.comes_after = looks.count + 2
    while looks.count < looks.comes_after:
        spin()
    for _ in range(5):
        looks.comes_after = looks.count + 2
        assert looked(looks, spin) == 2


def test_it_gives_up_at_once_where_others_want_the_core(looks: Looks) -> None:
    looks.takes = 2 * spinning._CROWDED_SECONDS
    assert looked(looks, Spinning(looks)) == 2


def test_one_thread_at_a_time(looks: Looks) -> None:
    inside, done = threading.Event(), threading.Event()

    class Slow(Looks):
        def poll(self, timeout: int, /) -> list[tuple[int, int]]:
            inside.set()
            assert done.wait(10)
            return [(3, 1)]

    other = threading.Thread(target=Spinning(Slow()))
    other.start()
    try:
        assert inside.wait(10)
        assert looked(looks, Spinning(looks)) == 0
    finally:
        done.set()
        other.join()
    looks.comes_after = looks.count + 1
    assert looked(looks, Spinning(looks)) == 1
