"""What a fuzz target is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from random import Random
from typing import ClassVar

from google.protobuf.message import Message
from tests.fuzz.inputs import Input
from tests.fuzz.mutating_bytes import mutate_bytes
from tests.fuzz.mutating_json import mutate_json
from tests.fuzz.mutating_messages import mutate_body

from gradwire.errors import WireError

__all__ = ["Target"]


class Target(ABC):
    """Something that reads bytes from elsewhere.

    It may refuse an input with an error of `refuses`. Any other error is a finding, and so is an input that
    ends the process, takes long, or takes far more memory than its size.
    """

    name: ClassVar[str]
    refuses: ClassVar[tuple[type[Exception], ...]] = (WireError,)
    kinds: ClassVar[Sequence[type[Message] | str | None]] = (None,)
    """What each part of an input is: a message, "json", or None for bytes. Further parts are as the last."""
    words: ClassVar[Sequence[str]] = ()
    """Texts that mean something to the target."""
    most_parts: ClassVar[int] = 1

    @abstractmethod
    def corpus(self) -> dict[str, Input]:
        """Valid inputs by name, from which all others are made. Called by ``--make-corpus`` alone."""

    @abstractmethod
    def run(self, parts: Input) -> object:
        """Reads an input."""

    def kind(self, index: int) -> type[Message] | str | None:
        return self.kinds[min(index, len(self.kinds) - 1)]

    def mutate(self, random: Random, parts: Input, donor: Input) -> Input:
        """Another input. `donor` is one from which parts may be taken."""
        changed = list(parts)
        for _ in range(1 if random.random() < 0.7 else random.randrange(2, 5)):
            if self.most_parts > 1 and random.random() < 0.2:
                _mutate_list(random, changed, donor, self.most_parts)
            index = random.randrange(len(changed))
            other = donor[min(index, len(donor) - 1)]
            changed[index] = self.mutate_part(random, index, changed[index], other)
        return tuple(changed)

    def mutate_part(self, random: Random, index: int, part: bytes, donor: bytes) -> bytes:
        kind = self.kind(index)
        words = self.words
        if kind is None:
            return mutate_bytes(random, part, donor, words)
        if kind == "json":
            return mutate_json(random, part, donor, words)
        assert not isinstance(kind, str)
        return mutate_body(random, kind, part, donor, words)


def _mutate_list(random: Random, parts: list[bytes], donor: Input, most: int) -> None:
    index = random.randrange(len(parts))
    actions: list[Callable[[], object]] = [
        lambda: parts.insert(index, random.choice(parts)),
        lambda: parts.insert(index, random.choice(donor)),
        lambda: parts.append(random.choice(donor)),
        lambda: random.shuffle(parts),
        lambda: parts.extend(donor),
        lambda: len(parts) > 1 and parts.pop(index),
    ]
    random.choice(actions)()
    del parts[most:]
