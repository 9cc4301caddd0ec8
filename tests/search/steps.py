"""A program as data: a list of steps, each of which names the earlier steps whose values it uses.

A step that was left out of a program leaves no hole: whoever names its values gets a leaf instead. So every
part of a program is a program, and one that fails can be made smaller by leaving out steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

__all__ = [
    "AMBIENT",
    "LEAVES",
    "AtOnce",
    "Backward",
    "Call",
    "Clear",
    "Drop",
    "End",
    "Local",
    "Operand",
    "Program",
    "State",
    "Step",
    "Together",
]

AMBIENT = 0
"""The number of the context outside of all explicit ones, which have 1, 2, ..."""

LEAVES = 3
"""Leaf tensors of the program's own, which every program has."""


class Operand(NamedTuple):
    """One of the values of an earlier step; a leaf if there is no such step."""

    step: int
    output: int = 0


@dataclass(frozen=True)
class Local:
    """An operation of the program itself."""

    id: int
    operation: str
    left: Operand
    right: Operand


@dataclass(frozen=True)
class Call:
    """A call of a worker's function."""

    id: int
    worker: str
    function: str
    left: Operand
    right: Operand
    key: str
    """Which of the worker's states it is about."""
    other: str
    """The worker that the function calls, if it calls one."""
    context: int = AMBIENT
    mode: Literal["plain", "no grad", "in place", "remote"] = "plain"
    """In place: the result is modified. Remote: it stays on the worker, and the program has a ref to it."""


@dataclass(frozen=True)
class Together:
    """Calls that are on their way at the same time. They have no state in common."""

    id: int
    calls: tuple[Call, ...]


@dataclass(frozen=True)
class Backward:
    """A backward, from some values. Gradients that it returns are the step's values."""

    id: int
    how: Literal["plain", "inputs", "grad", "context"]
    roots: tuple[Operand, ...]
    wanted: tuple[Operand, ...]
    """What gradients are asked for, with "inputs" (leaves alone) and "grad"."""
    retain_graph: bool
    create_graph: bool = False
    context: int = AMBIENT
    """The one that it runs in; with "context", the one that collects."""
    direct: bool = False
    """Whether it starts at the values themselves, with gradients for them, and not at sums of them."""


@dataclass(frozen=True)
class AtOnce:
    """Backwards in threads of their own. All of them retain their graphs."""

    id: int
    backwards: tuple[Backward, ...]


@dataclass(frozen=True)
class State:
    """The program makes a worker detach or forget one of its states."""

    id: int
    worker: str
    key: str
    action: Literal["detach_state", "reset_state"]


@dataclass(frozen=True)
class Clear:
    """Forgets all gradients of a context, here and on all workers."""

    id: int
    context: int


@dataclass(frozen=True)
class Drop:
    """The program lets go of values, and so of a part of its graph."""

    id: int
    steps: tuple[int, ...]


@dataclass(frozen=True)
class End:
    """Ends a context, after all that workers keep was detached and all values were let go of."""

    id: int
    context: int


Step = Local | Call | Together | Backward | AtOnce | State | Clear | Drop | End
Program = tuple[Step, ...]
