"""Changes messages of protobuf at random: their fields, and the bytes that protobuf writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from random import Random
from typing import Any, NamedTuple

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, EncodeError, Message
from google.protobuf.message_factory import GetMessageClass
from tests.fuzz.mutating_bytes import INTERESTING, LARGEST, mutate_bytes, mutate_text

__all__ = ["mutate_body"]

_DEEPEST = 40
"""Levels that nesting leads to; deeper ones are made as bytes."""

_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e300, -1e300, 5e-324, 1e-40, float("inf"), float("-inf"), float("nan"))
_BITS = {
    FieldDescriptor.CPPTYPE_INT32: (32, True),
    FieldDescriptor.CPPTYPE_INT64: (64, True),
    FieldDescriptor.CPPTYPE_UINT32: (32, False),
    FieldDescriptor.CPPTYPE_UINT64: (64, False),
    FieldDescriptor.CPPTYPE_ENUM: (32, True),
}


def mutate_body(
    random: Random, kind: type[Message], body: bytes, donor: bytes, words: Sequence[str] = ()
) -> bytes:
    """A serialized message that differs: in its fields, in its bytes, or in both."""
    choice = random.random()
    if choice < 0.75:
        message = _parsed(kind, body)
        if message is not None:
            other = _parsed(kind, donor)
            try:
                for _ in range(random.choice((1, 1, 2, 4))):
                    _mutate_message(random, message, other, words)
                body = message.SerializeToString()
            except (DecodeError, EncodeError, ValueError):
                choice = 0.7  # deeper or larger than protobuf allows: bytes are changed instead
            if choice < 0.65:
                return body[:LARGEST]
    if random.random() < 0.5:
        return _mutate_encoding(random, body)[:LARGEST]
    return mutate_bytes(random, body, donor, words)


def _parsed(kind: type[Message], body: bytes) -> Message | None:
    try:
        return kind.FromString(body)
    except DecodeError:
        return None


# -- fields


def _messages_directly_in(message: Message) -> Iterator[Message]:
    for field, value in message.ListFields():
        if field.message_type is None:
            continue
        if _is_map(field):
            if field.message_type.fields_by_name["value"].message_type is not None:
                yield from value.values()
        else:
            yield from value if field.is_repeated else [value]


def _messages_in(message: Message) -> Iterator[Message]:
    """A message and all within it."""
    unvisited = [message]
    while unvisited:
        found = unvisited.pop()
        yield found
        unvisited.extend(_messages_directly_in(found))


def _is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and bool(field.message_type.GetOptions().map_entry)


def _mutate_message(random: Random, message: Message, donor: Message | None, words: Sequence[str]) -> None:
    """Changes one field, somewhere in the message."""
    place = random.choice(list(_messages_in(message)))
    fields = place.DESCRIPTOR.fields
    if not fields:
        return
    present = [field for field, _ in place.ListFields()]
    field = random.choice(present) if present and random.random() < 0.75 else random.choice(fields)
    donors = [] if donor is None else list(_messages_in(donor))
    if _is_map(field):
        _mutate_map(random, getattr(place, field.name), field, words)
    elif field.is_repeated:
        _mutate_repeated(random, getattr(place, field.name), field, donors, words)
    elif field.message_type is not None:
        _mutate_submessage(random, place, field, donors)
    elif random.random() < 0.2:
        place.ClearField(field.name)
    else:
        setattr(place, field.name, _scalar(random, field, getattr(place, field.name), words))


def _scalar(random: Random, field: FieldDescriptor, value: Any, words: Sequence[str]) -> Any:
    """A value for a field that has, or might have, this one."""
    kind = field.cpp_type
    if kind == FieldDescriptor.CPPTYPE_BOOL:
        return not value
    if kind in (FieldDescriptor.CPPTYPE_DOUBLE, FieldDescriptor.CPPTYPE_FLOAT):
        return random.choice((*_FLOATS, -value, random.uniform(-300, 300)))
    if kind == FieldDescriptor.CPPTYPE_STRING:
        if isinstance(value, bytes):
            return mutate_bytes(random, value, value, words)
        return mutate_text(random, value, words)
    bits, is_signed = _BITS[kind]
    if kind == FieldDescriptor.CPPTYPE_ENUM and random.random() < 0.8:
        return random.choice(field.enum_type.values).number
    number = random.choice((value + 1, value - 1, 2 * value, random.randrange(8), random.choice(INTERESTING)))
    number *= random.choice((1, 1, 1, -1))
    number %= 1 << bits
    return number - (1 << bits) if is_signed and number >> (bits - 1) else number


def _zero(field: FieldDescriptor) -> Any:
    if field.cpp_type == FieldDescriptor.CPPTYPE_STRING:
        return b"" if field.type == FieldDescriptor.TYPE_BYTES else ""
    return 0


def _same_kind(donors: Sequence[Message], field: FieldDescriptor) -> list[Message]:
    assert field.message_type is not None
    return [donor for donor in donors if donor.DESCRIPTOR.full_name == field.message_type.full_name]


def _mutate_submessage(
    random: Random, place: Message, field: FieldDescriptor, donors: Sequence[Message]
) -> None:
    choice = random.random()
    fitting = _same_kind(donors, field)
    here = getattr(place, field.name)
    if choice < 0.25:
        place.ClearField(field.name)
    elif choice < 0.5 and fitting:
        here.CopyFrom(random.choice(fitting))
    elif choice < 0.75:
        _nest(random, here)
    else:
        here.SetInParent()


def _nest(random: Random, message: Message) -> None:
    """Puts a message into one of its own kind that is in it, several times."""
    for _ in range(random.choice((1, 2, 5))):
        within = _same_kind_within(message)
        # protobuf's own code ends the process if it is to write messages that are far deeper than it reads.
        if not within or _depth(message) > _DEEPEST // 2 or message.ByteSize() > 1 << 16:
            return
        copied = GetMessageClass(message.DESCRIPTOR)()
        copied.CopyFrom(message)
        random.choice(within).CopyFrom(copied)


def _same_kind_within(message: Message) -> list[Message]:
    kind = message.DESCRIPTOR.full_name
    return [
        inner
        for inner in _messages_in(message)
        if inner is not message and inner.DESCRIPTOR.full_name == kind
    ]


def _depth(message: Message) -> int:
    """How many levels of messages there are."""
    deepest, unvisited = 1, [(message, 1)]
    while unvisited:
        found, depth = unvisited.pop()
        deepest = max(deepest, depth)
        unvisited += [(inner, depth + 1) for inner in _messages_directly_in(found)]
    return deepest


def _mutate_repeated(
    random: Random, items: Any, field: FieldDescriptor, donors: Sequence[Message], words: Sequence[str]
) -> None:
    def a_new_one() -> None:
        if field.message_type is None:
            items.append(_scalar(random, field, items[0] if items else _zero(field), words))
        else:
            items.add().CopyFrom(
                random.choice(_same_kind(donors, field) or [GetMessageClass(field.message_type)()])
            )

    def change() -> None:
        index = random.randrange(len(items))
        if field.message_type is None:
            items[index] = _scalar(random, field, items[index], words)
        else:
            _nest(random, items[index])

    def many() -> None:
        one = items[random.randrange(len(items))]
        size = one.ByteSize() if field.message_type is not None else 8
        count = min(random.choice((2, 10, 100, 5000)), (1 << 17) // (size + 2) + 1)
        items.extend([one] * count)

    def shuffle() -> None:
        copied = list(items)
        random.shuffle(copied)
        del items[:]
        items.extend(copied)

    actions: list[Callable[[], object]] = [a_new_one]
    if items:
        actions += [
            change,
            many,
            shuffle,
            lambda: items.append(items[random.randrange(len(items))]),
            lambda: items.pop(random.randrange(len(items))),
            lambda: items.__delitem__(slice(None)),
        ]
    random.choice(actions)()


def _mutate_map(random: Random, items: Any, field: FieldDescriptor, words: Sequence[str]) -> None:
    assert field.message_type is not None
    names = sorted(items)
    name = random.choice(names) if names and random.random() < 0.5 else mutate_text(random, "x", words)
    if field.message_type.fields_by_name["value"].message_type is None:
        items[name] = mutate_text(random, "x", words)
    elif names and random.random() < 0.5:
        items[name].CopyFrom(items[random.choice(names)])
    elif name in items:
        del items[name]
    else:
        items[name].SetInParent()


# -- the encoding


class _Field(NamedTuple):
    """Where a field is in some bytes."""

    begin: int
    content: int
    """Where its number, its length or its bytes begin."""
    body: int
    """Of what has a length: where its bytes begin."""
    end: int
    wire_type: int


def _varint(data: bytes, at: int) -> tuple[int, int]:
    number = shift = 0
    while at < len(data) and shift < 70:
        byte = data[at]
        at += 1
        number |= (byte & 0x7F) << shift
        if not byte & 0x80:
            return number, at
        shift += 7
    raise ValueError("no number")


def _fields(data: bytes, begin: int, end: int, depth: int = 0) -> Iterator[_Field]:
    """The fields in some bytes, and those in them, as far as they can be told without a schema."""
    found = []
    at = begin
    while at < end:
        tag, content = _varint(data, at)
        wire_type = tag & 7
        body = content
        if not tag >> 3 or wire_type not in (0, 1, 2, 5):
            raise ValueError("no field")
        if wire_type == 0:
            _, stop = _varint(data, content)
        elif wire_type == 2:
            size, body = _varint(data, content)
            stop = body + size
        else:
            stop = content + (8 if wire_type == 1 else 4)
        if stop > end:
            raise ValueError("beyond the end")
        found.append(_Field(at, content, body, stop, wire_type))
        at = stop
    yield from found
    for field in found:
        if field.wire_type == 2 and depth < 8:
            try:
                yield from list(_fields(data, field.body, field.end, depth + 1))
            except ValueError:
                pass


def _encoded(number: int, padding: int = 0) -> bytes:
    encoded = bytearray()
    while number > 0x7F or padding:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
        padding = max(padding - 1, 0)
    return bytes([*encoded, number])


def _mutate_encoding(random: Random, body: bytes) -> bytes:
    """Changes a field as it is encoded: its length, its number, its type, its place."""
    try:
        fields = list(_fields(body, 0, len(body)))
    except ValueError:
        fields = []
    if not fields:
        return mutate_bytes(random, body, body)
    field = random.choice(fields)
    whole = body[field.begin : field.end]
    before, after = body[: field.begin], body[field.end :]
    tag, _ = _varint(body, field.begin)

    def another_length() -> bytes:
        if field.wire_type != 2:
            return a_long_number()
        size = field.end - field.body
        size = random.choice((size + 1, max(size - 1, 0), 0, 2 * size, random.choice(INTERESTING)))
        return body[: field.content] + _encoded(size) + body[field.body :]

    def a_long_number() -> bytes:
        number, end = _varint(body, field.content if field.wire_type in (0, 2) else field.begin)
        begin = field.content if field.wire_type in (0, 2) else field.begin
        return body[:begin] + _encoded(number, random.choice((1, 4, 9, 12))) + body[end:]

    def another_number() -> bytes:
        new = random.choice((0, 1, tag >> 3, random.randrange(40), 18999, (1 << 29) - 1, 1 << 29)) << 3
        return before + _encoded(new | random.choice((tag & 7, random.randrange(8)))) + body[field.content :]

    def in_a_group() -> bytes:
        number = tag >> 3 << 3
        levels = random.choice((1, 2, 120))
        return (
            before
            + _encoded(number | 3) * levels
            + whole
            + _encoded(number | 4) * random.choice((levels, 0))
            + after
        )

    def within_itself() -> bytes:
        nested = whole
        for _ in range(random.choice((3, 31, 110, 3000))):
            nested = _encoded(tag >> 3 << 3 | 2) + _encoded(len(nested)) + nested
        return before + nested + after

    actions: list[Callable[[], bytes]] = [
        another_length,
        another_length,
        within_itself,
        a_long_number,
        another_number,
        in_a_group,
        lambda: before + after,
        lambda: before + whole + whole + after,
        lambda: before + after + whole,
        lambda: before + mutate_bytes(random, whole, body) + after,
    ]
    return random.choice(actions)()
