"""Room for large questions, of one link and of all."""

from __future__ import annotations

from gradwire.transport.room import Allowance, Room


def test_one_that_is_larger_than_everything_finds_room_when_it_is_alone() -> None:
    allowance = Allowance(10, Room(10))
    assert allowance.take(1, 8)
    assert allowance.take(1, 8)  # another attachment of the same question
    assert not allowance.take(2, 1)
    allowance.give_back(1)
    assert allowance.take(2, 1)
    assert not allowance.take(1, 10)


def test_all_links_share_the_room() -> None:
    room = Room(10)
    one, other = Allowance(8, room), Allowance(8, room)
    assert one.take(1, 6)
    assert not other.take(1, 6)
    assert other.take(1, 4)
    one.give_back(1)
    assert other.take(2, 4)
    other.give_back_all()
    assert one.take(2, 8)


def test_giving_back_twice_is_giving_back_once() -> None:
    room = Room(10)
    allowance = Allowance(10, room)
    assert allowance.take(1, 6)
    assert allowance.take(2, 4)
    allowance.give_back(1)
    allowance.give_back(1)
    assert not allowance.take(3, 7)
