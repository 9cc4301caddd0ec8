"""Values that torch carries to the threads of its engine: whatever happens, none stays behind."""

from __future__ import annotations

import contextvars
import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.unit.interrupting import interrupted_at

import gradwire as gw
from gradwire.runtime.context_vars import CarriedVar
from gradwire.torch_internals import is_stashed, stashed

NAME = "tested"
KEY = f"gradwire.{NAME}"


@pytest.fixture
def variable() -> CarriedVar[str]:
    return CarriedVar(NAME, default="default")


def carried() -> str | None:
    """The value that torch would hand over to a thread of its engine."""
    return stashed(KEY).value if is_stashed(KEY) else None


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_values_are_reset_in_any_order(variable: CarriedVar[str], order: tuple[int, ...]) -> None:
    """Each in a `contextvars.Context` of its own, as the tasks of a framework other than asyncio are."""
    tasks = [contextvars.copy_context() for _ in range(3)]
    tokens = [task.run(variable.set, f"of task {number}") for number, task in enumerate(tasks)]
    left = dict(enumerate(tokens))
    for number in order:
        assert carried() == f"of task {max(left)}"
        assert tasks[number].run(variable.get) == f"of task {number}"
        tasks[number].run(variable.reset, left.pop(number))
        assert tasks[number].run(variable.get) == "default"
    assert not is_stashed(KEY)


def test_contexts_that_are_left_in_the_order_they_were_entered_leave_nothing_behind() -> None:
    tasks = [contextvars.copy_context() for _ in range(2)]
    contexts = [task.run(gw.context().__enter__) for task in tasks]
    for task, context in zip(tasks, contexts, strict=True):
        task.run(context.__exit__, None, None, None)
    assert not is_stashed("gradwire.scope")


def test_values_that_overlap_for_ever_keep_none_of_the_earlier_ones(variable: CarriedVar[str]) -> None:
    task = contextvars.copy_context()
    earlier = task.run(variable.set, "first")
    for number in range(100):
        following = contextvars.copy_context()
        token = following.run(variable.set, str(number))
        task.run(variable.reset, earlier)
        task, earlier = following, token
    assert stashed(KEY).outer is None
    task.run(variable.reset, earlier)
    assert not is_stashed(KEY)


def test_a_block_that_is_left_on_another_thread_is_over(variable: CarriedVar[str]) -> None:
    """A generator's block, for example, is left on the thread that collects the generator."""

    def block() -> Iterator[None]:
        token = variable.set("of the block")
        try:
            yield
        finally:
            variable.reset(token)

    found: list[str | None] = []

    def enter_and_leave() -> None:
        generator = block()
        next(generator)
        with ThreadPoolExecutor(1) as elsewhere, pytest.raises(ValueError, match="different Context"):
            elsewhere.submit(next, generator).result(60)
        token = variable.set("later")
        found.append(carried())
        variable.reset(token)
        found.append(carried())

    thread = threading.Thread(target=enter_and_leave)
    thread.start()
    thread.join(60)
    assert found == ["later", None]


def test_an_interrupt_while_a_value_is_set_leaves_it_unset(variable: CarriedVar[str]) -> None:
    outer = variable.set("outer")
    for number in itertools.count():
        tokens = []

        def set_value(tokens: list[object] = tokens) -> None:
            tokens.append(variable.set("value"))

        if not interrupted_at(number, CarriedVar.set.__code__, set_value):
            break
        assert variable.get() == "outer"
        assert carried() == "outer"
    variable.reset(tokens.pop())
    variable.reset(outer)
    assert number >= 5  # there were places to interrupt
    assert not is_stashed(KEY)
    assert variable.get() == "default"
