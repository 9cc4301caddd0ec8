"""What it costs to put keys that somebody else chose into a set or dict, known before it is done.

Python's hash tables take time that grows with the square of the number of keys if the keys are chosen for
it, and hold the interpreter's lock all the while. The hashes of text are secret; those of numbers, and of
whatever is made of numbers, can be worked out by anybody. So the steps that CPython's tables would take are
taken here first, with the hashes alone, and given up as soon as they are too many: the work is linear.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradwire.errors import MalformedMessage

__all__ = ["check_dict_keys", "check_set_items", "no_hash", "set_table"]

_FEW = 32
"""So many keys may all be in each other's way."""
_STEPS_A_KEY = 64
"""How many steps a key may take on average. Multiples of large powers of two, as fractions with a common
denominator hash to, take up to 45."""
_STEPS_AT_ANY_RATE = 1 << 17
"""How many steps a table may take besides, which is a matter of milliseconds. Powers of two have 61 hashes in
all, and -1 and -2 have the same one: some keys that nobody chose need it."""
_EQUAL_HASH_STEPS = 16
"""What it counts as to meet a key of the same hash: the two are compared, which may take long."""
_UNSIGNED = (1 << 64) - 1
_SHIFT = 5
_LINEAR = 9
"""How many slots behind its own a set looks at before it goes elsewhere."""
_SMALLEST_TABLE = 8
_LARGE_SET = 50_000

Table = list[int | None]
"""The hash in each slot."""


def check_dict_keys(keys: Sequence[object]) -> None:
    """Raises MalformedMessage if a dict of these keys would be costly to make, or a key has no hash."""
    if len(keys) <= _FEW:
        return
    hashes = _hashes(keys)
    size = _SMALLEST_TABLE
    while True:
        capacity = 2 * size // 3
        _fill_dict([None] * size, hashes[:capacity])
        if capacity >= len(hashes):
            return
        size *= 2  # keys are put into the new table in the order in which they came


def check_set_items(items: Sequence[object]) -> None:
    """The same for a set."""
    if len(items) > _FEW:
        set_table(_hashes(items))


def set_table(hashes: Sequence[int]) -> Table:
    """The table of a set that was made of items with these hashes, in this order."""
    size, filled = _SMALLEST_TABLE, 0
    table: Table = [None] * size
    while True:
        # When so many are in it, a larger one takes its place.
        capacity = -(-3 * (size - 1) // 5)
        more = hashes[filled:capacity]
        filled += len(more)
        _fill_set(table, more, filled)
        if filled < capacity:
            return table
        wanted = filled * 2 if filled > _LARGE_SET else filled * 4
        while size <= wanted:
            size *= 2
        moved = [known for known in table if known is not None]
        table = [None] * size
        _fill_set(table, moved, filled)


def _hashes(keys: Sequence[object]) -> list[int]:
    try:
        return list(map(hash, keys))
    except Exception as error:
        raise no_hash(error) from error


def no_hash(error: Exception) -> MalformedMessage:
    return MalformedMessage(f"a key or an item of a set has no hash: {error}")


def _fill_dict(table: Table, hashes: Sequence[int]) -> None:
    steps = _STEPS_A_KEY * len(hashes) + _STEPS_AT_ANY_RATE
    mask = len(table) - 1
    for one in hashes:
        slot = one & mask
        if table[slot] is not None:
            rest = one & _UNSIGNED
            while (found := table[slot]) is not None:
                steps -= _EQUAL_HASH_STEPS if found == one else 1
                if steps < 0:
                    raise _in_the_way(len(table))
                rest >>= _SHIFT
                slot = (slot * 5 + rest + 1) & mask
        table[slot] = one


def _fill_set(table: Table, hashes: Sequence[int], filled: int) -> None:
    """`filled`: how many are in it then."""
    steps = _STEPS_A_KEY * filled + _STEPS_AT_ANY_RATE
    mask = len(table) - 1
    for one in hashes:
        slot = one & mask
        if table[slot] is not None:
            rest = one & _UNSIGNED
            while True:
                run = table[slot : slot + _LINEAR + 1] if slot + _LINEAR <= mask else [table[slot]]
                if None in run:
                    before = run.index(None)
                    slot += before
                    run = run[:before]
                else:
                    before = -1
                steps -= 1 + _EQUAL_HASH_STEPS * run.count(one)
                if steps < 0:
                    raise _in_the_way(len(table))
                if before >= 0:
                    break
                rest >>= _SHIFT
                slot = (slot * 5 + rest + 1) & mask
        table[slot] = one


def _in_the_way(size: int) -> MalformedMessage:
    return MalformedMessage(
        "the hashes of the keys of a dict, or of the items of a set, are so much alike that they are in each "
        f"other's way in a table of {size} slots"
    )
