"""Whether what comes next may be expected to be brisk."""

from __future__ import annotations

from gradwire.transport.lookout import BRISK_SECONDS
from gradwire.transport.readers import Pace

SLOW = 10 * BRISK_SECONDS


def answer(pace: Pace, seconds: float) -> bool:
    """Whether it was expected to be brisk, and so took its time here."""
    is_brisk = pace.is_brisk()
    if is_brisk:
        pace.took(seconds)
    return is_brisk


def test_one_that_takes_long_by_chance_says_nothing() -> None:
    pace = Pace()
    assert all(answer(pace, SLOW if number % 10 == 5 else 0.0) for number in range(100))


def test_those_that_take_long_again_and_again_go_elsewhere() -> None:
    pace = Pace()
    here = sum(answer(pace, SLOW) for _ in range(1000))
    assert 2 <= here < 30


def test_what_has_become_brisk_is_found_out() -> None:
    pace = Pace()
    for _ in range(1000):
        answer(pace, SLOW)
    answers = [answer(pace, 0.0) for _ in range(1000)]
    assert sum(answers) > 500
    assert all(answers[-100:])
