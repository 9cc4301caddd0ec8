"""The memory budget for large requests, of one link and of all links."""

from __future__ import annotations

from gradwire.transport.memory_budget import MemoryBudget, Quota


def test_a_request_larger_than_the_budget_fits_when_it_is_alone() -> None:
    quota = Quota(10, MemoryBudget(10))
    assert quota.take(1, 8)
    assert quota.take(1, 8)  # another attachment of the same request
    assert not quota.take(2, 1)
    quota.give_back(1)
    assert quota.take(2, 1)
    assert not quota.take(1, 10)


def test_all_links_share_the_budget() -> None:
    budget = MemoryBudget(10)
    one, other = Quota(8, budget), Quota(8, budget)
    assert one.take(1, 6)
    assert not other.take(1, 6)
    assert other.take(1, 4)
    one.give_back(1)
    assert other.take(2, 4)
    other.give_back_all()
    assert one.take(2, 8)


def test_giving_back_twice_is_giving_back_once() -> None:
    budget = MemoryBudget(10)
    quota = Quota(10, budget)
    assert quota.take(1, 6)
    assert quota.take(2, 4)
    quota.give_back(1)
    quota.give_back(1)
    assert not quota.take(3, 7)
