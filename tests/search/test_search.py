"""Programs of fixed seeds are as in one process, and the search finds what is wrong and makes it small.

`make search` goes on from here, for as long as it is told.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import threading
from collections.abc import Iterator

import pytest
import torch
from tests.search.drawing import draw
from tests.search.found import FOUND
from tests.search.judging import Verdict, judge
from tests.search.local import OPERATIONS
from tests.search.shrinking import shrink
from tests.search.site import CALLING, STATEFUL, STATELESS, Argument, Site
from tests.search.starting import Workers, connected, daemons, in_this_process
from tests.search.steps import AtOnce, Backward, Call, Local, Operand, Program, Together

PER_TEST = 40
SEEDS = range(160)
X, Y, Z = Operand(-1), Operand(-2), Operand(-3)
"""Leaves."""


@pytest.fixture(scope="module")
def addresses() -> Iterator[dict[str, str]]:
    with daemons() as addresses:
        yield addresses


@pytest.fixture
def processes(addresses: dict[str, str]) -> Iterator[Workers]:
    with connected(addresses) as workers:
        yield workers


@pytest.fixture
def local_workers() -> Iterator[Workers]:
    with in_this_process() as workers:
        yield workers


@pytest.mark.parametrize("program", FOUND.values(), ids=FOUND)
def test_programs_that_once_differed(program: Program, processes: Workers) -> None:
    verdict = judge(program, processes)
    assert (verdict.finding, verdict.ended) == (None, "all done")


def check(seeds: range, workers: Workers) -> None:
    done = 0
    for seed in seeds:
        verdict = judge(draw(seed), workers)
        assert verdict.finding is None, f"python -m tests.search --only {seed}: {verdict.finding}"
        done += verdict.ended == "all done"
    # Else many could be refused on both sides without anybody noticing.
    assert done >= 0.75 * len(seeds)


@pytest.mark.parametrize("first", SEEDS[:80:PER_TEST])
def test_programs_over_processes(first: int, processes: Workers) -> None:
    check(range(first, first + PER_TEST), processes)


@pytest.mark.parametrize("first", SEEDS[80::PER_TEST])
def test_programs_over_workers_in_this_process(first: int, local_workers: Workers) -> None:
    check(range(first, first + PER_TEST), local_workers)
    for worker in local_workers.values():  # many of the calls went by a plan
        plans = [plan for plan in worker._link.plans._sent.values() if plan.is_kept]
        assert sum(plan.known_results != 0 for plan in plans) > 5


def test_the_programs_have_everything_in_them() -> None:
    steps = [step for seed in SEEDS for step in draw(seed)]
    together = [call for step in steps if isinstance(step, Together) for call in step.calls]
    calls = [*together, *(step for step in steps if isinstance(step, Call))]
    at_once = [one for step in steps if isinstance(step, AtOnce) for one in step.backwards]
    backwards = [*at_once, *(step for step in steps if isinstance(step, Backward))]
    assert {call.function for call in calls} == {*STATELESS, *STATEFUL, *CALLING}
    assert {call.mode for call in calls} == {"plain", "no grad", "in place", "remote"}
    assert {call.context for call in calls} == {0, 1, 2, 3}
    assert {(one.how, one.retain_graph) for one in backwards} == {
        (how, retain) for how in ("plain", "inputs", "grad", "context") for retain in (True, False)
    }
    assert {one.create_graph for one in backwards} == {True, False}
    assert {step.operation for step in steps if isinstance(step, Local)} == set(OPERATIONS)
    assert len({type(step) for step in steps}) == 9


# -- the search itself


def test_a_wrong_gradient_is_found_and_the_program_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    right = Site.keep

    @functools.wraps(right)
    def wrong(self: Site, x: Argument, y: Argument, key: str, other: str) -> torch.Tensor:
        """Forgets the graph of the state, on workers alone."""
        if hasattr(self._calls, "addresses") and key in self.states:
            self.states[key] = self.states[key].detach()
        return right(self, x, y, key, other)

    monkeypatch.setattr(Site, "keep", wrong)
    with in_this_process() as workers:
        program: Program = (
            Local(0, "add", X, Y),
            Call(1, "a", "keep", Operand(0), Y, "p", "b", context=1),
            Call(2, "b", "hop", Operand(1), Y, "p", "c"),
            Call(3, "a", "keep", Operand(2), Y, "p", "b", context=1),
            Local(4, "multiply", Operand(3), Operand(2)),
            Backward(5, "grad", (Operand(4), Operand(2)), (X, Y), retain_graph=False),
        )
        verdict = judge(program, workers)
        assert verdict.finding is not None
        assert verdict.kind is not None
        assert verdict.kind.startswith("value")
        smallest = shrink(program, lambda smaller: judge(smaller, workers).kind == verdict.kind)
    assert smallest == (
        Call(1, "a", "keep", X, Y, "p", "b"),
        Call(3, "a", "keep", X, Y, "p", "b"),
        Backward(5, "grad", (Operand(3),), (X,), retain_graph=True),
    ), smallest


def test_a_graph_that_was_freed_is_refused_on_both_sides(local_workers: Workers) -> None:
    program = (
        Call(0, "a", "recur", X, Y, "p", "b"),
        Backward(1, "plain", (Operand(0),), (), retain_graph=False),
        Backward(2, "plain", (Operand(0),), (), retain_graph=True),
    )
    assert judge(program, local_workers) == Verdict(
        "refused: a second backward through a freed graph", None, 2
    )


def test_a_refusal_that_is_missing_is_found(local_workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gradwire.autograd.records.ReceivedTensors.mark_freed", lambda *args, **kwargs: None)
    program = (
        Call(0, "a", "same", X, Y, "p", "b"),
        Backward(1, "plain", (Operand(0),), (), retain_graph=False),
        Backward(2, "plain", (Operand(0),), (), retain_graph=True),
    )
    finding = judge(program, local_workers).finding
    assert finding is not None
    assert "refuses a second backward" in finding


def test_an_error_of_the_workers_alone_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    @functools.wraps(Site.weigh)
    def raising(self: Site, x: Argument, y: Argument, key: str, other: str) -> torch.Tensor:
        if hasattr(self._calls, "addresses"):
            raise ValueError("not here")
        return Site.scale(self, x, y, key, other)

    monkeypatch.setattr(Site, "weigh", raising)
    with in_this_process() as workers:
        verdict = judge((Call(0, "a", "weigh", X, Y, "p", "b"),), workers)
    assert verdict.finding is not None
    assert "not here" in verdict.finding


def test_calls_at_the_same_time_may_come_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """One writes to its argument, which is on its worker. The other is called first, and reads it later."""
    is_written = threading.Event()
    write, read = Site.in_place, Site.keep_sparse

    @functools.wraps(write)
    def writing(self: Site, x: Argument, y: Argument, key: str, other: str) -> torch.Tensor:
        result = write(self, x, y, key, other)
        if hasattr(self._calls, "addresses"):
            is_written.set()
        return result

    @functools.wraps(read)
    def reading(self: Site, x: Argument, y: Argument, key: str, other: str) -> torch.Tensor:
        if hasattr(self._calls, "addresses"):
            assert is_written.wait(60)
        return read(self, x, y, key, other)

    monkeypatch.setattr(Site, "in_place", writing)
    monkeypatch.setattr(Site, "keep_sparse", reading)
    program = (
        Call(0, "a", "several", X, X, "q", "a", mode="remote"),
        Together(
            1,
            (
                Call(1, "c", "keep_sparse", X, Operand(0), "together 0", "a"),
                Call(1, "a", "in_place", Operand(0), X, "together 1", "c"),
            ),
        ),
    )
    with in_this_process() as workers:
        assert judge(program, workers) == Verdict("all done", None, 2)


def test_a_search_that_finds_something_says_so_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first program differs for as long as it has a backward; the time is over after one program."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as the import does
    command = importlib.import_module("tests.search.__main__")

    def judged(program: Program, workers: Workers) -> Verdict:
        differs = any(isinstance(step, Backward) for step in program)
        return Verdict("found", "the gradient of x is 1 instead of 2") if differs else Verdict("all done")

    monkeypatch.setattr(command, "judge", judged)
    monkeypatch.setattr(command, "WAYS", {"no process": lambda: contextlib.nullcontext({})})
    monkeypatch.setattr("sys.argv", ["search", "--seconds", "0", "--seed", "7"])
    assert command.main() == 1
    printed = capsys.readouterr().out
    assert "FOUND with seed 7" in printed
    assert printed.count("Backward(") == 1
    assert "1 kinds of findings" in printed
    monkeypatch.setattr(command, "judge", lambda program, workers: Verdict("all done"))
    assert command.main() == 0
