"""Draws random programs."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal

from tests.search.local import OPERATIONS
from tests.search.site import CALLING, NAMES, STATEFUL, STATELESS
from tests.search.steps import (
    AMBIENT,
    LEAVES,
    AtOnce,
    Backward,
    Call,
    Clear,
    Drop,
    End,
    Local,
    Operand,
    Program,
    State,
    Step,
    Together,
)

__all__ = ["draw"]

KEYS = ("p", "q")
"""States that are used often, so that calls meet in them."""


def draw(seed: int) -> Program:
    """The program of a seed: always the same one."""
    return _Drawing(random.Random(f"program {seed}")).program()


class _Drawing:
    def __init__(self, chance: random.Random) -> None:
        self._chance = chance
        # A program that uses few of many possibilities finds what is wrong with their combination.
        self._workers = chance.sample(NAMES, chance.choice((1, 2, 2, 3)))
        self._contexts = chance.choice((0, 0, 1, 2, 2, 3))
        self._functions = chance.sample(STATEFUL, chance.randint(1, 4))
        self._functions += chance.sample(STATELESS, chance.randint(0, 3))
        self._functions += chance.sample(CALLING, chance.randint(0, 3))
        self._double = chance.random() < 0.25
        self._retain = chance.choice((0.5, 0.8, 1.0))
        self._ids: list[int] = []

    def program(self) -> Program:
        length = self._chance.choice((3, 5, 8, 8, 12, 16, 20, 40))
        steps = [self._step(id) for id in range(length)]
        # Whatever was drawn, there is something to compare at the end.
        steps.append(self._backward(length, retain=self._chance.random() < 0.5))
        return tuple(steps)

    def _step(self, id: int) -> Step:
        kinds: dict[Callable[[int], Step], int] = {
            self._call: 50,
            self._local: 18,
            self._backward: 20,
            self._together: 4,
            self._at_once: 3,
            self._state: 5,
            self._clear: 2,
            self._drop: 3,
            self._end: 1,
        }
        (kind,) = self._chance.choices(list(kinds), list(kinds.values()))
        step = kind(id)
        self._ids.append(id)
        return step

    def _operand(self) -> Operand:
        """Mostly a late value, so that long chains are likely; now and then a leaf."""
        if not self._ids or self._chance.random() < 0.2:
            return Operand(-1 - self._chance.randrange(LEAVES))
        back = min(int(self._chance.expovariate(0.5)), len(self._ids) - 1)
        return Operand(self._ids[-1 - back], self._chance.choice((0, 0, 1, 2)))

    def _context(self) -> int:
        return self._chance.randint(AMBIENT, self._contexts)

    def _local(self, id: int) -> Local:
        return Local(id, self._chance.choice(sorted(OPERATIONS)), self._operand(), self._operand())

    def _call(self, id: int) -> Call:
        function = self._chance.choice(self._functions)
        modes: list[Literal["plain", "no grad", "in place", "remote"]] = [
            "plain",
            "no grad",
            "in place",
            "remote",
        ]
        (mode,) = self._chance.choices(modes, (85, 3, 6, 6))
        return Call(
            id,
            self._chance.choice(self._workers),
            function,
            self._operand(),
            self._operand(),
            self._chance.choice(KEYS),
            self._chance.choice(self._workers),
            self._context(),
            mode,
        )

    def _together(self, id: int) -> Together:
        """Each with a state of its own, since nobody knows which of them comes first."""
        calls = [
            Call(
                id,
                self._chance.choice(self._workers),
                self._chance.choice([*STATELESS, *(name for name in STATEFUL if name != "cell")]),
                self._operand(),
                self._operand(),
                f"together {index}",
                self._chance.choice(self._workers),
                self._context(),
            )
            for index in range(self._chance.randint(2, 4))
        ]
        return Together(id, tuple(calls))

    def _backward(self, id: int, retain: bool | None = None) -> Backward:
        hows: list[Literal["plain", "inputs", "grad", "context"]] = ["plain", "inputs", "grad", "context"]
        (how,) = self._chance.choices(hows, (3, 1, 4, 3 if self._contexts else 0))
        context = self._chance.randint(1, self._contexts) if how == "context" else self._context()
        wanted = [self._operand() for _ in range(self._chance.randint(1, 3))]
        if how == "inputs":
            wanted = [Operand(-1 - self._chance.randrange(LEAVES)) for _ in wanted]
        return Backward(
            id,
            how,
            tuple(self._operand() for _ in range(self._chance.choice((1, 1, 1, 2, 3)))),
            tuple(wanted),
            retain_graph=self._chance.random() < self._retain if retain is None else retain,
            create_graph=how == "grad" and self._double and self._chance.random() < 0.7,
            context=context,
            direct=self._chance.random() < 0.3,
        )

    def _at_once(self, id: int) -> AtOnce:
        return AtOnce(id, (self._backward(id, retain=True), self._backward(id, retain=True)))

    def _state(self, id: int) -> State:
        action: Literal["detach_state", "reset_state"]
        action = "detach_state" if self._chance.random() < 0.7 else "reset_state"
        return State(id, self._chance.choice(self._workers), self._chance.choice(KEYS), action)

    def _clear(self, id: int) -> Clear:
        return Clear(id, self._context())

    def _drop(self, id: int) -> Drop:
        many = self._chance.randint(0, min(4, len(self._ids)))
        return Drop(id, tuple(sorted(self._chance.sample(self._ids, many))))

    def _end(self, id: int) -> Step:
        return End(id, self._chance.randint(1, self._contexts)) if self._contexts else self._drop(id)
