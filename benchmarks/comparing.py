"""The targets, and whether they are met."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from benchmarks.cases import BOTH, CASES, Case, Method
from benchmarks.contenders import (
    GRADWIRE,
    GRADWIRE_GRPC,
    GRADWIRE_TCP,
    LOCAL,
    TENSORPIPE,
    TENSORPIPE_HUGEPAGES,
    TENSORPIPE_TCP,
    Contender,
    Kind,
)
from benchmarks.results import Results, Spread
from benchmarks.targets import HUGEPAGES_TARGET, Target, target_of

OPPONENTS = (
    (GRADWIRE, TENSORPIPE),
    (GRADWIRE, TENSORPIPE_HUGEPAGES),
    (GRADWIRE_TCP, TENSORPIPE_TCP),
    (GRADWIRE_GRPC, TENSORPIPE_TCP),
)
"""Who is compared with whom, over the same carrier where both have it."""


@dataclass(frozen=True)
class Comparison:
    """One line of the table: a number, below its target if all is well."""

    case: Case
    ours: Contender
    against: str
    value: Spread
    """Of the ratios of single turns, whose two sides saw the same machine."""
    target: Target
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
    if case.row == 10:
        return [*_step(results, case), *(replace(one, target=None) for one in _ratios(results, case))]
    if case.row == 11:
        return _busy(results, case)
    if case.method is Method.MEMORY:
        return _memory(results, case)
    return _ratios(results, case)


def _ratios(results: Results, case: Case) -> list[Comparison]:
    return [
        Comparison(
            case,
            ours,
            theirs.label,
            _ratio(results, (case.key, ours), (case.key, theirs)),
            HUGEPAGES_TARGET if theirs is TENSORPIPE_HUGEPAGES else _target(case, ours),
        )
        for ours, theirs in OPPONENTS
        if results.has(case.key, ours) and results.has(case.key, theirs)
    ]


def _step(results: Results, case: Case) -> list[Comparison]:
    """Against the same step in one process, plus what its crossing activations cost to copy."""
    copies = f"{case.key}-memcpy"
    if not (results.has(case.key, LOCAL) and results.has(copies, LOCAL)):
        return []
    copying = results.spread(copies, LOCAL).median
    found = {
        who: _ratio(results, (case.key, who), (case.key, LOCAL), lambda bound: bound + copying)
        for who in (GRADWIRE, TENSORPIPE)
        if results.has(case.key, who)
    }
    target = _target(case, GRADWIRE)
    if target is not None and TENSORPIPE in found:
        target = max(target, found[TENSORPIPE].median)  # no worse than TensorPipe will do, too
    return [
        Comparison(case, who, "one process + memcpy", value, target if who is GRADWIRE else None)
        for who, value in found.items()
    ]


def _busy(results: Results, case: Case) -> list[Comparison]:
    return [
        Comparison(case, who, "idle", _ratio(results, (case.key, who), ("11-idle", who)), _target(case, who))
        for who in BOTH
        if results.has(case.key, who) and results.has("11-idle", who)
    ]


def _memory(results: Results, case: Case) -> list[Comparison]:
    return [
        Comparison(case, who, "the bytes that cross", results.spread(case.key, who), _target(case, who))
        for who in BOTH
        if results.has(case.key, who)
    ]


def _target(case: Case, who: Contender) -> Target:
    return target_of(case.key, who.carrier) if who.kind is Kind.GRADWIRE else None


def _ratio(
    results: Results,
    ours: tuple[str, Contender],
    theirs: tuple[str, Contender],
    bound: Callable[[float], float] = lambda seconds: seconds,
) -> Spread:
    turns = zip(results.turn_medians(*ours), results.turn_medians(*theirs), strict=True)
    return Spread.of([mine / bound(other) for mine, other in turns])
