"""The targets, and whether they are met."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.cases import CASES, Case
from benchmarks.contenders import (
    GRADWIRE,
    GRADWIRE_TCP,
    LOCAL,
    TENSORPIPE,
    TENSORPIPE_HUGEPAGES,
    TENSORPIPE_TCP,
    Contender,
)
from benchmarks.results import Results, Spread

RATIO_TARGETS = {1: 0.8, 2: 0.7, 3: 0.7, 4: 0.4, 5: 0.4, 8: 0.7, 9: 0.7}
"""Of gradwire's time to TensorPipe's, by row."""
LARGE_FROM = 16
"""The size in megabytes from which on the targets of large tensors hold."""
LARGE_TARGET, HUGEPAGES_TARGET, TCP_TARGET = 0.4, 1.0, 1.0
STEP_TARGET, BUSY_TARGET, MEMORY_TARGET = 1.05, 5.0, 1.1


@dataclass(frozen=True)
class Comparison:
    """One line of the table: a number, below its target if all is well."""

    case: Case
    ours: Contender
    against: str
    value: Spread
    """Of the ratios of single turns, whose two sides saw the same machine."""
    target: float | None
    """None where it is there for information."""

    @property
    def is_met(self) -> bool | None:
        return None if self.target is None else self.value.median <= self.target


def compare(results: Results) -> list[Comparison]:
    """Everything that was measured on both sides."""
    found = [_compare_case(results, case) for case in CASES.values()]
    return [comparison for of_case in found for comparison in of_case]


def _compare_case(results: Results, case: Case) -> list[Comparison]:
    if case.key.endswith("memcpy") or case.key == "11-idle":
        return []  # what others are compared with
    if case.row in (6, 7):
        return _large(results, case)
    if case.row == 10:
        return _step(results, case)
    if case.row == 11:
        return _busy(results, case)
    if case.row == 12:
        return _memory(results, case)
    if case.row == 13:
        return _ratios(results, case, [(GRADWIRE, TENSORPIPE, None), (GRADWIRE_TCP, TENSORPIPE_TCP, None)])
    return _ratios(results, case, [(GRADWIRE, TENSORPIPE, RATIO_TARGETS[case.row])])


def _large(results: Results, case: Case) -> list[Comparison]:
    is_large = case.size >= LARGE_FROM
    return _ratios(
        results,
        case,
        [
            (GRADWIRE, TENSORPIPE, LARGE_TARGET if is_large else None),
            (GRADWIRE, TENSORPIPE_HUGEPAGES, HUGEPAGES_TARGET if is_large else None),
            (GRADWIRE_TCP, TENSORPIPE_TCP, TCP_TARGET if is_large else None),
        ],
    )


def _ratios(
    results: Results, case: Case, pairs: list[tuple[Contender, Contender, float | None]]
) -> list[Comparison]:
    return [
        Comparison(case, ours, theirs.label, _ratio(results, (case.key, ours), (case.key, theirs)), target)
        for ours, theirs, target in pairs
        if results.has(case.key, ours) and results.has(case.key, theirs)
    ]


def _step(results: Results, case: Case) -> list[Comparison]:
    """Against the same step in one process, plus what its crossing activations cost to copy."""
    found = []
    copies = f"{case.key}-memcpy"
    if results.has(case.key, LOCAL) and results.has(copies, LOCAL):
        copying = results.spread(copies, LOCAL).median
        for ours, target in ((GRADWIRE, STEP_TARGET), (TENSORPIPE, None)):
            if results.has(case.key, ours):
                value = _ratio(results, (case.key, ours), (case.key, LOCAL), lambda bound: bound + copying)
                found.append(Comparison(case, ours, "one process + memcpy", value, target))
    return found + _ratios(results, case, [(GRADWIRE, TENSORPIPE, None)])


def _busy(results: Results, case: Case) -> list[Comparison]:
    return [
        Comparison(case, ours, "idle", _ratio(results, (case.key, ours), ("11-idle", ours)), target)
        for ours, target in ((GRADWIRE, BUSY_TARGET), (TENSORPIPE, None))
        if results.has(case.key, ours) and results.has("11-idle", ours)
    ]


def _memory(results: Results, case: Case) -> list[Comparison]:
    return [
        Comparison(case, ours, "the bytes that cross", results.spread(case.key, ours), target)
        for ours, target in ((GRADWIRE, MEMORY_TARGET), (GRADWIRE_TCP, MEMORY_TARGET), (TENSORPIPE, None))
        if results.has(case.key, ours)
    ]


def _ratio(
    results: Results,
    ours: tuple[str, Contender],
    theirs: tuple[str, Contender],
    bound: Callable[[float], float] = lambda seconds: seconds,
) -> Spread:
    turns = zip(results.turn_medians(*ours), results.turn_medians(*theirs), strict=True)
    return Spread.of([mine / bound(other) for mine, other in turns])
