"""Whether the next request is expected to be fast enough to run inline."""

from __future__ import annotations

from gradwire.system.watchdog import INLINE_SECONDS
from gradwire.transport.leader_followers import InlinePolicy

SLOW = 10 * INLINE_SECONDS


def serve(policy: InlinePolicy, seconds: float) -> bool:
    """Whether the request ran inline, and so took its time there."""
    may_run_inline = policy.may_run_inline()
    if may_run_inline:
        policy.took(seconds)
    return may_run_inline


def test_a_single_slow_request_changes_nothing() -> None:
    policy = InlinePolicy()
    assert all(serve(policy, SLOW if number % 10 == 5 else 0.0) for number in range(100))


def test_repeatedly_slow_requests_run_on_other_threads() -> None:
    policy = InlinePolicy()
    here = sum(serve(policy, SLOW) for _ in range(1000))
    assert 2 <= here < 30


def test_requests_that_became_fast_run_inline_again() -> None:
    policy = InlinePolicy()
    for _ in range(1000):
        serve(policy, SLOW)
    served = [serve(policy, 0.0) for _ in range(1000)]
    assert sum(served) > 500
    assert all(served[-100:])
