"""The benchmark's own reckoning: what is compared with what, and that wrong results do not pass."""

from __future__ import annotations

import pytest
import torch
from benchmarks.cases import CASES, Case, Operation
from benchmarks.checking import check_alike
from benchmarks.comparing import Comparison, compare
from benchmarks.contenders import (
    GRADWIRE,
    GRADWIRE_TCP,
    LOCAL,
    TENSORPIPE,
    TENSORPIPE_HUGEPAGES,
    TENSORPIPE_TCP,
    Contender,
)
from benchmarks.results import Results
from benchmarks.runtimes.local import LocalRuntime

WORKERS = 3
HELD_IN_MEMORY = 16
"""In megabytes, the largest that is tried here."""


def results_of(*turns: tuple[str, Contender, list[float]]) -> Results:
    """Results with one sample per turn."""
    results = Results()
    for key, contender, samples in turns:
        for sample in samples:
            results.add(CASES[key], contender, [sample])
    return results


def only(comparisons: list[Comparison], ours: Contender, against: str) -> Comparison:
    [found] = [one for one in comparisons if one.ours is ours and one.against == against]
    return found


def test_all_rows_of_the_benchmark_are_there() -> None:
    assert {case.row for case in CASES.values()} == set(range(1, 14))


@pytest.mark.parametrize(
    "case",
    [case for case in CASES.values() if case.size <= HELD_IN_MEMORY and case.row not in (11, 12)],
    ids=lambda case: case.key,
)
def test_a_case_comes_to_the_same_each_time_it_is_made(case: Case) -> None:
    check_alike(
        case.make(LocalRuntime(WORKERS)), case.make(LocalRuntime(WORKERS)), times=1 if case.row == 10 else 2
    )


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: [torch.ones(3), torch.ones(3)],
        lambda: [torch.ones(3)],
        lambda: [torch.ones(3), torch.full((3,), 2.001)],
        lambda: [torch.ones(3), torch.full((4,), 2.0)],
    ],
    ids=["value", "missing", "slightly off", "shape"],
)
def test_a_contender_with_wrong_results_is_not_measured(wrong: Operation) -> None:
    with pytest.raises(AssertionError):
        check_alike(wrong, lambda: [torch.ones(3), torch.full((3,), 2.0)], times=1)


def test_turns_are_compared_one_by_one() -> None:
    slow_machine_in_the_last_turns = [1.0, 2.0, 4.0, 4.0]
    ours = [0.5 * seconds for seconds in slow_machine_in_the_last_turns]
    results = results_of(("1", GRADWIRE, ours), ("1", TENSORPIPE, slow_machine_in_the_last_turns))
    [found] = compare(results)
    assert (found.value.low, found.value.median, found.value.high) == (0.5, 0.5, 0.5)
    assert found.target == 0.8
    assert found.is_met


def test_a_missed_target_is_said_to_be_missed() -> None:
    [found] = compare(results_of(("4", GRADWIRE, [0.5]), ("4", TENSORPIPE, [1.0])))
    assert (found.target, found.is_met) == (0.4, False)


def test_large_tensors_are_compared_with_their_like() -> None:
    found = compare(
        results_of(
            ("6-64", GRADWIRE, [1.0]),
            ("6-64", GRADWIRE_TCP, [6.0]),
            ("6-64", TENSORPIPE, [4.0]),
            ("6-64", TENSORPIPE_TCP, [5.0]),
            ("6-64", TENSORPIPE_HUGEPAGES, [2.0]),
        )
    )
    shown = [(one.ours, one.against, one.value.median, one.target, one.is_met) for one in found]
    assert shown == [
        (GRADWIRE, TENSORPIPE.label, 0.25, 0.4, True),
        (GRADWIRE, TENSORPIPE_HUGEPAGES.label, 0.5, 1.0, True),
        (GRADWIRE_TCP, TENSORPIPE_TCP.label, 1.2, 1.0, False),
    ]


def test_small_ones_among_the_large_have_no_target() -> None:
    [found] = compare(results_of(("7-1", GRADWIRE, [1.0]), ("7-1", TENSORPIPE, [1.0])))
    assert found.target is None
    assert found.is_met is None


def test_the_transformer_is_compared_with_computing_and_copying() -> None:
    found = compare(results_of(("10", GRADWIRE, [1.05]), ("10", LOCAL, [0.9]), ("10-memcpy", LOCAL, [0.1])))
    step = only(found, GRADWIRE, "one process + memcpy")
    assert step.value.median == pytest.approx(1.05)
    assert step.target == 1.05


def test_a_busy_link_is_compared_with_the_same_when_idle() -> None:
    found = compare(results_of(("11-busy", GRADWIRE, [6.0]), ("11-idle", GRADWIRE, [1.0])))
    assert [(one.value.median, one.target, one.is_met) for one in found] == [(6.0, 5.0, False)]


def test_memory_is_not_a_ratio_of_times() -> None:
    [found] = compare(results_of(("12-echo", GRADWIRE, [0.0, 0.2, 0.1])))
    assert (found.value.median, found.target, found.is_met) == (0.1, 1.1, True)
