"""Sets and dicts are decoded in linear time, or refused, whoever chose their keys."""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy
import pytest

from gradwire import wire
from gradwire.errors import MalformedMessage
from gradwire.proto.v1 import tensor_pb2, value_pb2
from gradwire.wire.hashing import check_dict_keys, check_set_items, set_table

MODULUS = 2**61 - 1
"""Numbers that leave the same rest have the same hash."""
COUNT = 4000

types = wire.TypeRegistry()


class Pair(NamedTuple):
    left: int
    right: int


@dataclasses.dataclass(frozen=True)
class Point:
    x: int
    y: int


comparisons = 0


@dataclasses.dataclass(frozen=True)
class Counting:
    """Counts how often two are compared."""

    number: int

    def __hash__(self) -> int:
        return hash(self.number)

    def __eq__(self, other: object) -> bool:
        global comparisons
        comparisons += 1
        return isinstance(other, Counting) and self.number == other.number


for cls in (Pair, Point, Counting):
    types.register(cls)


def same_hash(index: int) -> int:
    return 7 + index * MODULUS


def same_tuple_hash(index: int) -> tuple[int, int]:
    """Two numbers such that all these tuples have one hash, as CPython 3.8 and later mix it."""
    mask, first, second, fifth = 2**64 - 1, 11400714785074694791, 14029467366897019727, 2870177450012600261
    wanted = 0x123456789ABCDEF
    left = index * 100
    while True:
        mixed = (fifth + left * second) & mask
        mixed = ((mixed << 31 | mixed >> 33) & mask) * first & mask
        right = (wanted - mixed) * pow(second, -1, 2**64) & mask
        if right < MODULUS:
            return left, right
        left += 1


ATTACKS: dict[str, Callable[[int], Any]] = {
    "int": same_hash,
    "negative int": lambda index: -same_hash(index),
    "complex": lambda index: complex(10**12 - 1000003 * index, index),
    "tuple": same_tuple_hash,
    "tuple of one": lambda index: (same_hash(index),),
    "nested tuple": lambda index: ("name", (same_hash(index), 1.5)),
    "frozenset": lambda index: frozenset({same_hash(index)}),
    "named tuple": lambda index: Pair(same_hash(index), 1),
    "dataclass": lambda index: Point(same_hash(index), 1),
}


def list_of(keys: Iterable[Any]) -> value_pb2.Value:
    return wire.Encoder(attach_from=None, types=types).value(list(keys), "value")


def message_of(kind: str, keys: Iterable[Any]) -> value_pb2.Value:
    """A set or a dict with these keys, without ever making one here."""
    items = list_of(keys).list
    message = value_pb2.Value()
    if kind == "dict":
        for item in items.items:
            entry = message.dict.entries.add()
            entry.key.CopyFrom(item)
            entry.value.boolean = True
    else:
        getattr(message, kind).CopyFrom(items)
    return message


def decode(message: value_pb2.Value) -> Any:
    return wire.Decoder(tensor_pb2.TensorTable(), types=types).value(message)


KINDS = ("set", "frozen_set", "dict")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("attack", ATTACKS)
def test_keys_of_one_hash_are_refused(attack: str, kind: str) -> None:
    keys = [ATTACKS[attack](index) for index in range(COUNT)]
    assert len({hash(key) for key in keys}) == 1
    message = message_of(kind, keys)
    with pytest.raises(MalformedMessage, match="collide too often"):
        decode(message)


@pytest.mark.parametrize("kind", KINDS)
def test_refusing_takes_no_longer_than_taking_as_many(kind: str) -> None:
    def seconds(key: Callable[[int], int]) -> float:
        message = message_of(kind, map(key, range(10_000)))
        before = time.thread_time()
        try:
            decode(message)
        except MalformedMessage:
            pass
        return time.thread_time() - before

    # Ten thousand of one hash took some fifty times as long.
    assert min(seconds(same_hash) for _ in range(3)) < 3 * min(seconds(lambda i: i * 7919) for _ in range(3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("alike", [20, 32, 33, 200, COUNT])
def test_keys_are_compared_a_bounded_number_of_times_each(kind: str, alike: int) -> None:
    """However many of them are alike, and whether they are taken or refused."""
    global comparisons
    keys = [Counting(same_hash(index) if index < alike else index * 7919) for index in range(COUNT)]
    random.Random(1).shuffle(keys)
    message = message_of(kind, keys)
    comparisons = 0
    try:
        decode(message)
    except MalformedMessage:
        assert alike > 32
    else:
        assert alike < COUNT
    assert comparisons <= 8 * COUNT


def keys_in_each_others_way(size: int, fillers: int, attackers: int) -> list[int]:
    """All hashes differ. The fillers take one run of a dict's slots. The attackers find only taken ones until
    nothing is left of their hashes, and then walk the run."""
    source = random.Random(3)
    mask = size - 1
    run = [0]
    while len(run) < fillers:
        run.append((5 * run[-1] + 1) & mask)
    taken = set(run)

    def last_slot(slot: int, rest: int, steps: int) -> int | None:
        for _ in range(steps):
            if slot not in taken:
                return None
            rest >>= 5
            slot = (5 * slot + rest + 1) & mask
        return slot

    low = 40  # the bits that decide on the first steps
    while True:
        start = source.getrandbits(low)
        if last_slot(start & mask, start, 6) is not None:
            break
    found: set[int] = set()
    early = set(run[: fillers // 4])
    while len(found) < attackers:
        one = start | source.getrandbits(60 - low) << low
        if last_slot(one & mask, one, 13) in early:
            found.add(one)
    return [*run, *found]


def test_keys_of_different_hashes_that_walk_the_same_slots_are_refused() -> None:
    keys = keys_in_each_others_way(4096, 2000, 600)
    assert len({hash(key) for key in keys}) == len(keys)
    with pytest.raises(MalformedMessage, match="collide too often"):
        decode(message_of("dict", keys))


ORDINARY: dict[str, Callable[[int], Any]] = {
    "counted": lambda index: index,
    "negative": lambda index: -index,
    "shifted": lambda index: index << 20,
    "shifted far": lambda index: index << 44,
    "addresses": lambda index: 0x7F0000000000 + index * 4096,
    "random": lambda index: random.Random(index).getrandbits(63),
    "fractions": lambda index: index / 1024,
    "tenths": lambda index: index * 0.1,
    "tiny": lambda index: index * 2.0**-149,
    "huge": lambda index: index * 1e300,
    "complex": lambda index: complex(index % 250, index // 250),
    "pixels": lambda index: (index % 250, index // 250),
    "points": lambda index: Point(index % 250, index // 250),
    "text": str,
    "bytes": lambda index: b"%d" % index,
    "mixed": lambda index: index if index % 2 else str(index),
    "sets": lambda index: frozenset({index, index + 1}),
    "numpy": numpy.int64,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ordinary", ORDINARY)
def test_ordinary_keys_are_taken(ordinary: str, kind: str) -> None:
    # 0 comes once among the negative ones and the fractions, too.
    keys = list(dict.fromkeys(ORDINARY[ordinary](index) for index in range(20_000)))
    if kind == "dict":
        check_dict_keys(keys)
    else:
        check_set_items(keys)
    if ordinary != "numpy":  # their memory is in the table, which is not at hand here
        few = keys[:500]
        assert (
            decode(message_of(kind, few))
            == {
                "set": set(few),
                "frozen_set": frozenset(few),
                "dict": dict.fromkeys(few, True),
            }[kind]
        )


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "keys",
    [
        [1 << index for index in range(1000)],
        [2.0**index for index in range(-512, 512)],
        list(itertools.product((-1, -2), repeat=6)),
    ],
    ids=["powers of two", "floats that are powers of two", "offsets"],
)
def test_keys_that_happen_to_have_few_hashes_between_them_are_taken(keys: list[Any], kind: str) -> None:
    """Nobody chose them for it: powers of two have 61 hashes, and -1 and -2 the same one."""
    assert len(decode(message_of(kind, keys))) == len(keys)


@pytest.mark.parametrize("count", [33, 500, 5_000, 60_000, 120_000])
@pytest.mark.parametrize("ordinary", ["random", "shifted", "fractions", "pixels"])
def test_the_steps_are_those_of_pythons_own_sets(ordinary: str, count: int) -> None:
    """A set is gone through in the order of its slots, so that shows where everything is."""
    items = list(dict.fromkeys(ORDINARY[ordinary](index) for index in range(count)))
    random.Random(count).shuffle(items)
    made = [one for one in set_table([hash(item) for item in items]) if one is not None]
    assert made == [hash(item) for item in set(items)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [2, 100])
def test_what_has_no_hash_or_comes_twice_is_malformed(kind: str, count: int) -> None:
    with pytest.raises(MalformedMessage, match="has no hash"):
        decode(message_of(kind, [*range(count), [1]]))
    with pytest.raises(MalformedMessage, match="comes twice"):
        decode(message_of(kind, [*range(count), 1]))
