"""Changes JSON at random: values, keys and what they are."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from random import Random
from typing import Any

from tests.fuzz.mutating_bytes import LARGEST, mutate_bytes, mutate_text

__all__ = ["mutate_json"]

_NUMBERS = (0, 1, -1, 2, 255, 2**31, 2**53, 2**63, -(2**63), 2**64, 10**30, 0.5, -0.0, 1e308)
_OTHERS: Sequence[Any] = (None, True, False, "", [], {}, [[]], [None], {"": None}, float("nan"), float("inf"))


def mutate_json(random: Random, text: bytes, donor: bytes, words: Sequence[str] = ()) -> bytes:
    """JSON that differs in one or several values; sometimes it is no JSON any more."""
    if random.random() < 0.15:
        return mutate_bytes(random, text, donor, words)
    try:
        whole = [json.loads(text)]
    except (ValueError, RecursionError):
        return mutate_bytes(random, text, donor, words)
    nested = random.choice((0,) * 30 + (10, 500, 3000))
    try:
        for _ in range(random.choice((1, 1, 2, 3))):
            holder, key = random.choice(list(_places(whole)))
            _change(random, holder, key, whole, words)
        changed = json.dumps(whole[0])
    except (ValueError, RecursionError):
        return text
    if nested:
        changed = changed.replace("[]", "[" * nested + "]" * nested, 1)
    return changed.encode("utf-8", "surrogatepass")[:LARGEST]


def _places(whole: Any) -> Iterator[tuple[Any, Any]]:
    unvisited = [whole]
    while unvisited:
        holder = unvisited.pop()
        for key, value in list(holder.items()) if isinstance(holder, dict) else list(enumerate(holder)):
            yield holder, key
            if isinstance(value, dict | list):
                unvisited.append(value)


def _change(random: Random, holder: Any, key: Any, whole: list[Any], words: Sequence[str]) -> None:
    value = holder[key]
    choice = random.random()
    if choice < 0.15:
        holder[key] = random.choice(_OTHERS)
    elif choice < 0.25 and holder is not whole:
        del holder[key]
    elif choice < 0.35:
        other, place = random.choice(list(_places(whole)))
        holder[key] = json.loads(json.dumps(other[place]))
    elif choice < 0.45 and isinstance(holder, dict):
        holder[mutate_text(random, key, words)] = holder.pop(key)
    elif choice < 0.5:
        holder[key] = [value]
    elif isinstance(value, str):
        holder[key] = mutate_text(random, value, words)
    elif isinstance(value, bool):
        holder[key] = not value
    elif isinstance(value, int | float):
        holder[key] = random.choice((*_NUMBERS, value + 1, value - 1, -value, str(value)))
    elif isinstance(value, list):
        value.append(random.choice(value) if value else 0)
    elif isinstance(value, dict):
        value[random.choice(words) if words else "x"] = random.choice(_OTHERS)
    else:
        holder[key] = random.choice(_NUMBERS)
