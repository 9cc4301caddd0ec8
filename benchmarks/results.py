"""Samples, and what they come to."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.cases import CASES, Case
from benchmarks.contenders import CONTENDERS, Contender


@dataclass(frozen=True)
class Spread:
    """The middle of some numbers."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Spread:
        if len(numbers) == 1:
            return cls(numbers[0], numbers[0], numbers[0])
        return cls(*statistics.quantiles(numbers, n=4, method="inclusive"))


class Results:
    """The samples of every case and contender, turn by turn, in the units of the cases."""

    def __init__(self) -> None:
        self._turns: dict[tuple[str, str], list[list[float]]] = {}

    def add(self, case: Case, contender: Contender, samples: list[float]) -> None:
        """The samples of one more turn."""
        self._turns.setdefault((case.key, contender.name), []).append(samples)

    def has(self, key: str, contender: Contender) -> bool:
        return (key, contender.name) in self._turns

    def spread(self, key: str, contender: Contender) -> Spread:
        """Over all samples."""
        turns = self._turns[key, contender.name]
        return Spread.of([sample for turn in turns for sample in turn])

    def turn_medians(self, key: str, contender: Contender) -> list[float]:
        return [statistics.median(turn) for turn in self._turns[key, contender.name]]

    def measured(self) -> list[tuple[Case, Contender]]:
        """In the order of the rows."""
        order = list(CASES)
        return sorted(
            ((CASES[key], CONTENDERS[name]) for key, name in self._turns),
            key=lambda one: (one[0].row, order.index(one[0].key)),
        )

    def as_json(self) -> list[dict[str, Any]]:
        return [
            {
                "case": case.key,
                "row": case.row,
                "title": case.title,
                "contender": contender.name,
                "unit": case.unit.value,
                "median": (spread := self.spread(case.key, contender)).median,
                "quartiles": [spread.low, spread.high],
                "samples": sum(map(len, self._turns[case.key, contender.name])),
                "turn_medians": self.turn_medians(case.key, contender),
            }
            for case, contender in self.measured()
        ]
