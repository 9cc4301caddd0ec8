"""Changes bytes at random, without knowing what they mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

__all__ = ["INTERESTING", "LARGEST", "mutate_bytes", "mutate_text"]

LARGEST = 1 << 20
"""No part of an input gets larger."""
INTERESTING = sorted(
    {
        number + near
        for bits in (0, 1, 3, 4, 5, 6, 7, 8, 15, 16, 20, 31, 32, 62, 63, 64)
        for number in (1 << bits,)
        for near in (-1, 0, 1)
    }
)

Change = Callable[[Random, bytes, bytes, Sequence[str]], bytes]


def _place(random: Random, data: bytes) -> int:
    # Headers are at the beginning.
    return (
        random.randrange(len(data) + 1) if random.random() < 0.7 else random.randrange(min(len(data), 64) + 1)
    )


def _flip_a_bit(random: Random, data: bytes, donor: bytes, words: Sequence[str]) -> bytes:
    at = _place(random, data)
    return data[:at] + bytes(byte ^ 1 << random.randrange(8) for byte in data[at : at + 1]) + data[at + 1 :]


def _set_a_byte(random: Random, data: bytes, donor: bytes, words: Sequence[str]) -> bytes:
    at = _place(random, data)
    byte = random.choice((0, 1, 0x7F, 0x80, 0xFF, random.randrange(256)))
    return data[:at] + bytes([byte]) + data[at + 1 :]


def _add_to_a_byte(random: Random, data: bytes, donor: bytes, words: Sequence[str]) -> bytes:
    at = _place(random, data)
    return (
        data[:at] + bytes(byte + random.choice((-1, 1)) & 255 for byte in data[at : at + 1]) + data[at + 1 :]
    )


def _write_a_number(random: Random, data: bytes, donor: bytes, words: Sequence[str]) -> bytes:
    at, size = _place(random, data), random.choice((1, 2, 4, 8))
    number = random.choice(INTERESTING) % (1 << 8 * size)
    return data[:at] + number.to_bytes(size, random.choice(("little", "little", "big"))) + data[at + size :]


def _insert(random: Random, data: bytes, donor: bytes, words: Sequence[str]) -> bytes:
    at = _place(random, data)
    more = random.choice(
        (b"\0", b"\xff", random.randbytes(4), b"\0" * 100, random.randbytes(random.randrange(1, 64)))
    )
    return data[:at] + more + data[at:]


def _delete(random: Random, data: bytes, donor: bytes, words: Sequence[str]) -> bytes:
    at = _place(random, data)
    return data[:at] + data[at + random.choice((1, 1, 2, 4, 8, 16, 1000)) :]


def _cut_off(random: Random, data: bytes, donor: bytes, words: Sequence[str]) -> bytes:
    return data[: _place(random, data)]


def _repeat(random: Random, data: bytes, donor: bytes, words: Sequence[str]) -> bytes:
    begin = _place(random, data)
    end = begin + random.choice((1, 2, 4, 8, 32, 256))
    return data[:end] + data[begin:end] * random.choice((1, 1, 2, 10, 1000)) + data[end:]


def _copy_within(random: Random, data: bytes, donor: bytes, words: Sequence[str]) -> bytes:
    source, at = _place(random, data), _place(random, data)
    run = data[source : source + random.choice((1, 2, 4, 8, 16, 32))]
    return data[:at] + run + data[at + len(run) :]


def _splice(random: Random, data: bytes, donor: bytes, words: Sequence[str]) -> bytes:
    return data[: _place(random, data)] + donor[_place(random, donor) :]


def _insert_a_word(random: Random, data: bytes, donor: bytes, words: Sequence[str]) -> bytes:
    if not words:
        return _insert(random, data, donor, words)
    at = _place(random, data)
    word = random.choice(words).encode()
    return data[:at] + word + data[at + random.choice((0, len(word))) :]


_CHANGES: Sequence[Change] = (
    _flip_a_bit,
    _set_a_byte,
    _add_to_a_byte,
    _write_a_number,
    _insert,
    _delete,
    _cut_off,
    _repeat,
    _copy_within,
    _splice,
    _insert_a_word,
)


def mutate_bytes(random: Random, data: bytes, donor: bytes, words: Sequence[str] = ()) -> bytes:
    """Bytes that differ in one or several places."""
    for _ in range(random.choice((1, 1, 1, 2, 3, 8))):
        data = random.choice(_CHANGES)(random, data, donor, words)
    return data[:LARGEST]


def mutate_text(random: Random, text: str, words: Sequence[str]) -> str:
    """Text that differs: another one, or this one with other characters."""
    choice = random.random()
    if choice < 0.4 and words:
        return random.choice(words)
    if choice < 0.5:
        return random.choice(
            ("", "\0", "a" * 10_000, "\ud7ff", "é", "🙂" * 10, "-1", "9" * 20, "../x", "x\n")
        )
    return mutate_bytes(random, text.encode("utf-8", "replace"), b"", words).decode("utf-8", "ignore")
