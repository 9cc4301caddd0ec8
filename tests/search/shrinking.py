"""Makes a program that fails smaller, for as long as it still fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TypeVar

from tests.search.steps import AMBIENT, AtOnce, Backward, Call, Local, Operand, Program, Step, Together

__all__ = ["shrink"]

T = TypeVar("T", bound=Step)


def shrink(program: Program, fails: Callable[[Program], bool], at_most: int = 400) -> Program:
    """A small program that fails, by leaving out steps and simplifying others. Tries so many at most."""
    tries = 0
    size = max(len(program) // 2, 1)
    while tries < at_most:
        for smaller in _smaller(program, size):
            tries += 1
            if fails(smaller):
                program = smaller
                size = min(size, max(len(program) // 2, 1))
                break
            if tries >= at_most:
                break
        else:
            if size == 1:
                break
            size //= 2
    return program


def _smaller(program: Program, size: int) -> Iterator[Program]:
    """Without so many neighbouring steps, latest first; or with one step simpler."""
    for start in range(len(program) - size, -1, -1):
        yield program[:start] + program[start + size :]
    if size == 1:
        for index, step in enumerate(program):
            if isinstance(step, Local | Call):
                yield program[:index] + tuple(_bypassed(later, step) for later in program[index + 1 :])
            for simpler in _simpler(step):
                yield (*program[:index], simpler, *program[index + 1 :])


def _bypassed(step: T, gone: Local | Call) -> T:
    """A step that uses what another one used, instead of its values."""

    def instead(operand: Operand) -> Operand:
        return gone.left if operand.step == gone.id else operand

    match step:
        case Local() | Call():
            return replace(step, left=instead(step.left), right=instead(step.right))
        case Backward():
            return replace(
                step, roots=tuple(map(instead, step.roots)), wanted=tuple(map(instead, step.wanted))
            )
        case Together():
            return replace(step, calls=tuple(_bypassed(call, gone) for call in step.calls))
        case AtOnce():
            return replace(step, backwards=tuple(_bypassed(one, gone) for one in step.backwards))
        case _:
            return step


def _simpler(step: Step) -> Iterator[Step]:
    match step:
        case Together():
            yield from step.calls
        case AtOnce():
            yield from step.backwards
        case Backward():
            for index in range(len(step.roots) if len(step.roots) > 1 else 0):
                yield replace(step, roots=step.roots[:index] + step.roots[index + 1 :])
            for index in range(len(step.wanted) if len(step.wanted) > 1 else 0):
                yield replace(step, wanted=step.wanted[:index] + step.wanted[index + 1 :])
            if step.direct:
                yield replace(step, direct=False)
            if step.create_graph:
                yield replace(step, create_graph=False)
            if not step.retain_graph:
                yield replace(step, retain_graph=True)
            if step.how not in ("plain", "grad"):
                yield replace(step, how="plain")
            if step.context != AMBIENT and step.how != "context":
                yield replace(step, context=AMBIENT)
        case Call():
            if step.mode != "plain":
                yield replace(step, mode="plain")
            if step.context != AMBIENT:
                yield replace(step, context=AMBIENT)
            for simple in (Operand(-1), Operand(-2)):
                if step.left.step >= 0:
                    yield replace(step, left=simple)
                if step.right.step >= 0:
                    yield replace(step, right=simple)
        case _:
            return
