"""Runs a program over workers beside the oracle, step by step, and says where they differ."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from tests.search.local import FAILURE, dense
from tests.search.one_process import MIXED, OneProcess
from tests.search.over_workers import OverWorkers
from tests.search.steps import AtOnce, Backward, Call, Clear, End, Operand, Program, Step, Together

import gradwire as gw

__all__ = ["Verdict", "judge"]

LARGEST = 2.0**45
"""Beyond this, sums of integers may be inexact in float64."""


@dataclass(frozen=True)
class Verdict:
    """How a program went."""

    ended: str
    """Why the comparison ended: "all done", or what both sides refuse to do."""
    finding: str | None = None
    """How the workers differed from one process, and at which step; None if they did not."""
    steps: int = 0
    """Steps that were compared."""
    lenient: int = 0
    """Backwards that the workers ran although one process would have refused: the part of the graph that was
    freed is on a worker, which keeps it for the results of other calls."""

    @property
    def kind(self) -> str | None:
        """What findings of the same kind have in common."""
        if self.finding is None:
            return None
        return re.sub(r" is .* instead of .*|[-\d.]+|\b[abc]\.\w+|\(in .*", "", self.finding)[:120]


def judge(program: Program, workers: Mapping[str, gw.RemoteWorker]) -> Verdict:
    """The verdict on one program."""
    world = OverWorkers(workers)
    try:
        return _Comparison(world).run(program)
    finally:
        world.close()


_FAILURE_OF_TORCH = "is_coalesced expected sparse coordinate tensor layout but got Strided"
"""The backward of torch's sparse_mask for a dense gradient raises it, in one process, too."""


class _Ended(Exception):
    """Nothing more can be compared, and nothing is wrong."""


class _Found(Exception):
    """The worlds differ."""


class _Comparison:
    def __init__(self, world: OverWorkers) -> None:
        self._world = world
        self._oracle = OneProcess(retain_graph=True)
        self._freeing: OneProcess | None = OneProcess(retain_graph=False)
        """Follows the program's wishes about retain_graph, until it raises."""
        self._spent: set[tuple[Operand, ...]] = set()
        """Roots of backwards that freed all of their graph."""
        self._has_freed = False
        self._has_modified = False
        self._lenient = 0

    def run(self, program: Program) -> Verdict:
        for index, step in enumerate(program):
            try:
                self._step(step)
            except _Ended as ended:
                return Verdict(str(ended), None, index, self._lenient)
            except _Found as found:
                return Verdict("found", f"{found} (in {step})", index, self._lenient)
        return Verdict("all done", None, len(program), self._lenient)

    def _step(self, step: Step) -> None:
        expected = _failure(self._oracle, step)
        freed = None if self._freeing is None else _failure(self._freeing, step)
        if isinstance(step, Clear | End) and self._oracle.ledger.get(MIXED):
            # It is not known which of them are in the context that is cleared.
            self._clear_all()
        found = _failure(self._world, step)
        if expected is not None:
            self._judge_failure(step, expected, found)
            return
        if found is not None:
            self._judge_refusal(step, found)
        if freed is not None:
            self._freeing = None
            self._lenient += 1
            if self._must_be_spent(step):
                raise _Found("one process refuses a second backward through a freed graph, workers do not")
        self._note(step)
        self._compare_values(step)
        if isinstance(step, Backward | AtOnce | Clear | End):
            self._compare_gradients()

    def _clear_all(self) -> None:
        for context in self._world.gradients():
            self._world.clear(context)
        self._oracle.ledger.clear()

    def _judge_failure(self, step: Step, expected: BaseException, found: BaseException | None) -> None:
        """One process raises. If it is on purpose, and no graph was freed, the program goes on."""
        if found is None:
            raise _Found(f"one process raises {expected!r}, workers do not")
        backwards = step.backwards if isinstance(step, AtOnce) else (step,)
        is_retained = all(isinstance(one, Backward) and one.retain_graph for one in backwards)
        if not (is_retained and FAILURE in str(expected)):
            raise _Ended(f"refused: {_brief(expected)}")
        if FAILURE not in str(found):
            self._judge_refusal(step, found, expected)
        # Some gradients are there and some are not; from now on all has to be right.
        self._freeing = None
        self._clear_all()

    # -- graphs that are freed

    def _judge_refusal(self, step: Step, found: BaseException, expected: BaseException | None = None) -> None:
        # All arguments of a call have one send node. Behind those that get no gradient, too, the engine runs
        # the graph and frees it, without effect on any gradient. One process would not have touched it.
        if self._has_freed and "second time" in str(found):
            raise _Ended("refused: a second backward through a freed graph")
        if _is_partial(step) and any(failure in str(found) for failure in (FAILURE, _FAILURE_OF_TORCH)):
            raise _Ended("refused: a failure behind an argument that gets no gradient")
        if self._has_modified and "modified by an inplace operation" in str(found):
            raise _Ended("refused: modified in place")
        # A backward that is recorded adds gradients in the order in which they come, and torch cannot add a
        # dense one to a sparse one. Those of calls come in another order than those of one process.
        if _is_recorded(step) and "add(sparse, dense)" in str(found):
            raise _Ended("refused: a dense gradient after a sparse one")
        instead = "nothing" if expected is None else repr(expected)
        raise _Found(f"one process raises {instead}, workers {type(found).__name__}: {_brief(found)}")

    def _must_be_spent(self, step: Step) -> bool:
        """A ref is fetched anew for each backward, so the worker keeps the graph of its value."""
        if not isinstance(step, Backward) or step.roots not in self._spent:
            return False
        return all(isinstance(self._world.operand(root), torch.Tensor) for root in step.roots)

    def _note(self, step: Step) -> None:
        """What may be refused later."""
        calls = step.calls if isinstance(step, Together) else (step,)
        if any(isinstance(call, Call) and call.function in ("bump", "in_place") for call in calls):
            self._has_modified = True
        if isinstance(step, Backward) and not (step.retain_graph or step.create_graph):
            self._has_freed = True
            if step.how in ("plain", "context"):
                self._spent.add(step.roots)

    # -- equality

    def _compare_values(self, step: Step) -> None:
        if self._oracle.without_gradient != self._world.without_gradient:
            without = (self._world.without_gradient, self._oracle.without_gradient)
            raise _Found("no gradient for {} instead of {} of those that were asked for".format(*without))
        expected, found = self._oracle.values.get(step.id, ()), self._world.values.get(step.id, ())
        if len(expected) != len(found):
            raise _Found(f"{len(found)} values instead of {len(expected)}")
        for index, (one, other) in enumerate(zip(expected, found, strict=True)):
            if isinstance(one, torch.Tensor):
                _check_size(one)
                if not _are_equal(other, one):
                    raise _Found(f"value {index} is {_numbers(other)} instead of {_numbers(one)}")

    def _compare_gradients(self) -> None:
        ledger, found = self._oracle.ledger, self._world.gradients()
        mixed = ledger.get(MIXED, {})
        names = {name for gradients in found.values() for name in gradients}
        for name in sorted(names):
            if name in mixed:
                total = sum((dense(g) for held in found.values() if (g := held.get(name)) is not None), 0.0)
                wanted = sum((held[name] for held in ledger.values() if name in held), 0.0)
                _compare(f"{name} in all contexts", total, wanted)
                continue
            for context, held in found.items():
                _compare(f"{name} in context {context}", held.get(name), ledger[context].get(name))


def _is_partial(step: Step) -> bool:
    """Whether only some gradients are wanted."""
    return any(one.how in ("inputs", "grad") for one in _backwards(step))


def _is_recorded(step: Step) -> bool:
    """Whether a backward can itself be differentiated."""
    return any(one.create_graph for one in _backwards(step))


def _backwards(step: Step) -> list[Backward]:
    steps = step.backwards if isinstance(step, AtOnce) else (step,)
    return [one for one in steps if isinstance(one, Backward)]


def _compare(what: str, found: Any, expected: Any) -> None:
    """No gradient is something else than a gradient of zeros: optimizers pass by what has none."""
    if found is None or expected is None:
        if found is not expected:
            raise _Found(f"the gradient of {what} is {_numbers(found)} instead of {_numbers(expected)}")
        return
    one, other = torch.as_tensor(found), torch.as_tensor(expected)
    _check_size(other)
    if not _are_equal(one, other):
        raise _Found(f"the gradient of {what} is {_numbers(one)} instead of {_numbers(other)}")


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    one, other = dense(one.detach()), dense(other.detach())
    if one.dim() and other.dim() and one.shape != other.shape:
        return False  # a number stands for a tensor of any shape
    return bool((one == other).all())


def _check_size(tensor: torch.Tensor) -> None:
    if (dense(tensor.detach()).abs() > LARGEST).any():
        raise _Ended("the numbers are too large to be exact")


def _failure(world: OneProcess | OverWorkers, step: Step) -> BaseException | None:
    try:
        world.do(step)
    except Exception as error:
        # Without its traceback, which would keep the graph alive.
        return error.with_traceback(None)
    return None


def _brief(error: BaseException) -> str:
    return str(error).splitlines()[0][:200]


def _numbers(tensor: torch.Tensor | None) -> Any:
    return None if tensor is None else dense(tensor.detach()).tolist()
