"""Refuses keys of sets and dicts that were chosen to collide, before a set or dict is made of them.

A hash table of Python takes time that grows with the square of the number of keys if the keys were chosen to
collide, and holds the interpreter's lock all the while. The hashes of strings are randomized, but everybody
can compute the hashes of numbers, and of tuples of numbers. So the probes that CPython's tables would make
are made here first, with the hashes alone, up to a limit that is linear in the number of keys.
"""

from __future__ import annotations

from collections.abc import Sequence

from gradwire.errors import MalformedMessage

__all__ = ["check_dict_keys", "check_set_items", "set_table", "unhashable"]

_UNCHECKED_KEYS = 32
"""Up to this many keys are not checked: even if all collide, a table of them is cheap."""
_PROBES_PER_KEY = 64
"""How many probes a key may take on average. Harmless keys, such as fractions with a common denominator,
whose hashes are multiples of a large power of two, take up to 45."""
_BASE_PROBES = 1 << 17
"""How many probes a table may take in addition, which is a matter of milliseconds. Some harmless keys need
them: powers of two have only 61 different hashes, and -1 and -2 have the same hash."""
_EQUAL_HASH_PROBES = 16
"""How many probes a key of the same hash counts as: Python compares the two keys, which may take long."""
_UNSIGNED = (1 << 64) - 1
_PERTURB_SHIFT = 5
_LINEAR_PROBES = 9
"""How many slots behind a slot a set probes before it computes another slot."""
_SMALLEST_TABLE = 8
_LARGE_SET = 50_000

Table = list[int | None]
"""The hash in each slot; None for an empty slot."""


def check_dict_keys(keys: Sequence[object]) -> None:
    """Raises MalformedMessage if a dict of these keys would take too many probes, or a key is unhashable."""
    if len(keys) <= _UNCHECKED_KEYS:
        return
    hashes = _hashes(keys)
    size = _SMALLEST_TABLE
    while True:
        capacity = 2 * size // 3
        _fill_dict([None] * size, hashes[:capacity])
        if capacity >= len(hashes):
            return
        size *= 2  # a dict inserts its keys into the larger table in the order of their first insertion


def check_set_items(items: Sequence[object]) -> None:
    """Raises MalformedMessage if a set of these items would take too many probes, or an item is
    unhashable."""
    if len(items) > _UNCHECKED_KEYS:
        set_table(_hashes(items))


def set_table(hashes: Sequence[int]) -> Table:
    """The table of a set into which items with these hashes were inserted in this order."""
    size, filled = _SMALLEST_TABLE, 0
    table: Table = [None] * size
    while True:
        # CPython replaces a table of this size by a larger one when it holds so many items.
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
        raise unhashable(error) from error


def unhashable(error: Exception) -> MalformedMessage:
    """The error for a key or an item whose hash raised."""
    return MalformedMessage(f"a key or an item of a set has no hash: {error}")


def _fill_dict(table: Table, hashes: Sequence[int]) -> None:
    probes = _PROBES_PER_KEY * len(hashes) + _BASE_PROBES
    mask = len(table) - 1
    for key_hash in hashes:
        slot = key_hash & mask
        if table[slot] is not None:
            perturb = key_hash & _UNSIGNED
            while (found := table[slot]) is not None:
                probes -= _EQUAL_HASH_PROBES if found == key_hash else 1
                if probes < 0:
                    raise _too_many_collisions(len(table))
                perturb >>= _PERTURB_SHIFT
                slot = (slot * 5 + perturb + 1) & mask
        table[slot] = key_hash


def _fill_set(table: Table, hashes: Sequence[int], filled: int) -> None:
    """Inserts hashes into the table of a set. `filled`: how many the table holds afterwards."""
    probes = _PROBES_PER_KEY * filled + _BASE_PROBES
    mask = len(table) - 1
    for key_hash in hashes:
        slot = key_hash & mask
        if table[slot] is not None:
            perturb = key_hash & _UNSIGNED
            while True:
                run = (
                    table[slot : slot + _LINEAR_PROBES + 1]
                    if slot + _LINEAR_PROBES <= mask
                    else [table[slot]]
                )
                if None in run:
                    before = run.index(None)
                    slot += before
                    run = run[:before]
                else:
                    before = -1
                probes -= 1 + _EQUAL_HASH_PROBES * run.count(key_hash)
                if probes < 0:
                    raise _too_many_collisions(len(table))
                if before >= 0:
                    break
                perturb >>= _PERTURB_SHIFT
                slot = (slot * 5 + perturb + 1) & mask
        table[slot] = key_hash


def _too_many_collisions(size: int) -> MalformedMessage:
    return MalformedMessage(
        "the hashes of the keys of a dict, or of the items of a set, collide too often in a table of "
        f"{size} slots"
    )
