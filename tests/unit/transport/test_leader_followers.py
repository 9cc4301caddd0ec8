"""Whether what comes next may be expected to be brisk."""

from __future__ import annotations

from gradwire.system.watchdog import INLINE_SECONDS
from gradwire.transport.leader_followers import InlinePolicy

SLOW = 10 * INLINE_SECONDS


def answer(pace: InlinePolicy, seconds: float) -> bool:
    """Whether it was expected to be brisk, and so took its time here."""
    may_run_inline = pace.may_run_inline()
    if may_run_inline:
        pace.took(seconds)
    return may_run_inline


def test_one_that_takes_long_by_chance_says_nothing() -> None:
    pace = InlinePolicy()
    assert all(answer(pace, SLOW if number % 10 == 5 else 0.0) for number in range(100))


def test_those_that_take_long_again_and_again_go_elsewhere() -> None:
    pace = InlinePolicy()
    here = sum(answer(pace, SLOW) for _ in range(1000))
    assert 2 <= here < 30


def test_what_has_become_brisk_is_found_out() -> None:
    pace = InlinePolicy()
    for _ in range(1000):
        answer(pace, SLOW)
    answers = [answer(pace, 0.0) for _ in range(1000)]
    assert sum(answers) > 500
    assert all(answers[-100:])
