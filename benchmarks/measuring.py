"""Runs the cases, contenders in turns: whatever the machine does meanwhile hits all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

from benchmarks.cases import Case, Method, Topology
from benchmarks.contenders import Contender
from benchmarks.idling import idle_costs
from benchmarks.members import Member
from benchmarks.memory import extra_memory
from benchmarks.results import Results
from benchmarks.starting import start_times
from benchmarks.worlds import World, running

LEAD_SECONDS = 0.1
"""Between telling clients to race and the beginning of the race."""


@dataclass(frozen=True)
class Plan:
    """What to measure, and how often."""

    cases: Sequence[Case]
    contenders: Sequence[Contender]
    turns: int | None = None
    """In place of each case's own number."""
    share: float = 1.0
    """Of the turns and of the operations in a turn, where little time is left."""

    def contenders_of(self, case: Case) -> list[Contender]:
        """Those of the case that are wanted."""
        return [contender for contender in case.contenders if contender in self.contenders]

    def turns_of(self, case: Case) -> int:
        return self.turns or max(2, round(case.turns * self.share))

    def block_of(self, case: Case) -> int:
        return max(1, round(case.block * self.share))


def measure(plan: Plan, say: Callable[[str], None] = lambda _: None) -> Results:
    """All samples of all cases."""
    results = Results()
    timed = [case for case in plan.cases if case.method is Method.IN_TURNS]
    # What only a few rows need is used last, so that the others are measured without its connections.
    timed.sort(key=lambda case: (case.topology.trainers, case.topology.workers, case.row))
    if timed:
        say("starting processes")
        with running(_needed(plan, timed)) as worlds:
            for _, group in groupby(timed, key=lambda case: case.group or case.key):
                _measure_group(plan, list(group), worlds, results, say)
    _measure_memory(plan, [case for case in plan.cases if case.method is Method.MEMORY], results, say)
    for method, look in ((Method.START, start_times), (Method.IDLE, idle_costs)):
        _measure_fresh(plan, [case for case in plan.cases if case.method is method], look, results, say)
    return results


def _needed(plan: Plan, cases: Sequence[Case]) -> list[tuple[Contender, Topology]]:
    """For each contender as many trainers and workers as any of its cases needs."""
    needed: dict[Contender, Topology] = {}
    for case in cases:
        for contender in plan.contenders_of(case):
            so_far = needed.get(contender, case.topology)
            needed[contender] = so_far.or_more(case.topology)
    return list(needed.items())


def _measure_group(
    plan: Plan, cases: list[Case], worlds: list[World], results: Results, say: Callable[[str], None]
) -> None:
    takers = {case.key: [w for w in worlds if w.contender in plan.contenders_of(case)] for case in cases}
    for case in cases:
        say(case.title)
        for world in takers[case.key]:
            with world.awake(case.topology) as trainers:
                for trainer in trainers:
                    trainer.send_request("prepare", case.key)
                    trainer.send_request("check", case.key)  # warms up, too
    for turn in range(max(plan.turns_of(case) for case in cases)):
        for case in cases:
            # Another one first each time: nobody always follows the same other one.
            shift = turn % max(1, len(takers[case.key]))
            for world in takers[case.key][shift:] + takers[case.key][:shift]:
                with world.awake(case.topology) as trainers:
                    results.add(case, world.contender, _block(case, trainers, plan.block_of(case)))
    for case in cases:
        for world in takers[case.key]:
            with world.awake(case.topology) as trainers:
                for trainer in trainers:
                    trainer.send_request("forget", case.key)


def _block(case: Case, trainers: list[Member], count: int) -> list[float]:
    """Seconds per call of one turn of a contender."""
    if len(trainers) == 1:
        seconds: list[float] = trainers[0].send_request("measure", case.key, count)
        return seconds
    begin_at = time.monotonic() + LEAD_SECONDS
    for trainer in trainers:
        trainer.tell("race", case.key, count, begin_at)
    begun, ended = zip(*(trainer.answer() for trainer in trainers), strict=True)
    return [(max(ended) - min(begun)) / (count * case.operations * len(trainers))]


def _measure_memory(plan: Plan, cases: Sequence[Case], results: Results, say: Callable[[str], None]) -> None:
    """In processes of its own for each measurement: none has buffers left from another one.

    Those of one case are there at a time, since each keeps hundreds of megabytes.
    """
    for case in cases:
        with running([(contender, case.topology) for contender in plan.contenders_of(case)]) as worlds:
            for world in worlds:
                say(f"{case.title}: {world.contender.label}")
                with world.awake(case.topology) as [trainer]:
                    for extra in extra_memory(case, world, plan.turns_of(case)):
                        results.add(case, world.contender, [extra])
                    trainer.send_request("check", case.key)


def _measure_fresh(
    plan: Plan,
    cases: Sequence[Case],
    look: Callable[[Contender], dict[str, float]],
    results: Results,
    say: Callable[[str], None],
) -> None:
    """Cases that one look at fresh processes tells of together."""
    for turn in range(max(map(plan.turns_of, cases), default=0)):
        for contender in dict.fromkeys(who for case in cases for who in plan.contenders_of(case)):
            say(f"{cases[0].method.value}: {contender.label}, {turn + 1}")
            found = look(contender)
            for case in cases:
                if contender in plan.contenders_of(case):
                    results.add(case, contender, [found[case.key]])
