"""Whether what comes next may be expected to be brisk."""

from __future__ import annotations

from gradwire.system.watchdog import INLINE_SECONDS
from gradwire.transport.leader_followers import InlinePolicy

SLOW = 10 * INLINE_SECONDS


def serve(policy: InlinePolicy, seconds: float) -> bool:
    """Whether it was expected to be brisk, and so took its time here."""
    may_run_inline = policy.may_run_inline()
    if may_run_inline:
        policy.took(seconds)
    return may_run_inline


def test_one_that_takes_long_by_chance_says_nothing() -> None:
    policy = InlinePolicy()
    assert all(serve(policy, SLOW if number % 10 == 5 else 0.0) for number in range(100))


def test_those_that_take_long_again_and_again_go_elsewhere() -> None:
    policy = InlinePolicy()
    here = sum(serve(policy, SLOW) for _ in range(1000))
    assert 2 <= here < 30


def test_what_has_become_brisk_is_found_out() -> None:
    policy = InlinePolicy()
    for _ in range(1000):
        serve(policy, SLOW)
    served = [serve(policy, 0.0) for _ in range(1000)]
    assert sum(served) > 500
    assert all(served[-100:])
