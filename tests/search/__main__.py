"""``python -m tests.search --seconds 3600 --seed 0``: exits with 1 if a program differs from one process.

``--only 17`` runs the program of one seed, prints it, and says how it went.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import threading
import time
import traceback
from collections import Counter
from dataclasses import dataclass, field

# Before torch is loaded, here and in every process that is started: this is about order, not about speed.
os.environ["OMP_NUM_THREADS"] = "1"

import torch
from tests.search.drawing import draw
from tests.search.judging import Verdict, judge
from tests.search.shrinking import shrink
from tests.search.starting import Workers, in_processes, in_this_process
from tests.search.steps import Program

PROGRAMS_AT_A_TIME = 200
"""Before the workers are started anew, the other way."""
HANGS_AFTER = 300.0
"""Seconds for one program, of which no step may take longer than `over_workers.STEP_SECONDS`."""
PROGRESS_SECONDS = 60.0
WAYS = {"processes": in_processes, "one process": in_this_process}


@dataclass
class Search:
    """What was found so far."""

    end: float
    started: float = field(default_factory=time.monotonic)
    programs: int = 0
    steps: int = 0
    endings: Counter[str] = field(default_factory=Counter)
    lenient: int = 0
    findings: dict[str, int] = field(default_factory=dict)
    """The first seed of each kind."""
    _told_at: float = field(default_factory=time.monotonic)

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.end

    def run(self, seed: int, workers: Workers, way: str) -> None:
        """One program, which is printed and made smaller if it differs."""
        program = draw(seed)
        verdict = run_in_time(program, workers, seed)
        self.programs += 1
        self.steps += verdict.steps
        self.lenient += verdict.lenient
        self.endings[verdict.ended] += 1
        if verdict.kind is not None and verdict.kind not in self.findings:
            self.findings[verdict.kind] = seed
            print(f"\nFOUND with seed {seed}, workers in {way}: {verdict.finding}", flush=True)
            print_program(smallest(program, verdict, workers, seed))
        if time.monotonic() >= self._told_at + PROGRESS_SECONDS:
            self._told_at = time.monotonic()
            self.tell(seed)

    def tell(self, seed: int) -> None:
        minutes = (time.monotonic() - self.started) / 60
        done = self.endings["all done"]
        print(
            f"{minutes:5.1f} min: up to seed {seed}, {self.programs} programs of {self.steps} steps, "
            f"{done} to their end, {self.programs - done} refused on both sides or found, "
            f"{len(self.findings)} kinds of findings",
            flush=True,
        )


def run_in_time(program: Program, workers: Workers, seed: int) -> Verdict:
    """The verdict. If there is none in time the search ends, since what hangs cannot be stopped."""
    verdicts: list[Verdict] = []
    thread = threading.Thread(target=lambda: verdicts.append(judge(program, workers)), daemon=True)
    thread.start()
    thread.join(HANGS_AFTER)
    if thread.is_alive():
        print(f"\nFOUND with seed {seed}: it hangs", flush=True)
        print_program(program)
        for id, frame in sys._current_frames().items():
            print(f"thread {id}:\n{''.join(traceback.format_stack(frame))}", flush=True)
        sys.exit(1)
    if not verdicts:
        raise AssertionError(f"the program of seed {seed} could not be judged: see above")
    return verdicts[0]


def smallest(program: Program, verdict: Verdict, workers: Workers, seed: int) -> Program:
    """A small program with the same kind of finding, and what it shows."""
    found = shrink(program, lambda smaller: run_in_time(smaller, workers, seed).kind == verdict.kind)
    again = run_in_time(found, workers, seed)
    print(f"smallest: {again.finding or 'it does not happen each time'}")
    return found


def print_program(program: Program) -> None:
    for step in program:
        print(f"    {step},")
    print(flush=True)


def search(seconds: float, first: int) -> Search:
    """Runs the programs of one seed after the other, with workers in processes and in this one by turns."""
    progress = Search(end=time.monotonic() + seconds)
    seeds = itertools.count(first)
    for way in itertools.cycle(WAYS):
        with WAYS[way]() as workers:
            for seed in itertools.islice(seeds, PROGRAMS_AT_A_TIME):
                progress.run(seed, workers, way)
                if progress.is_over:
                    progress.tell(seed)
                    return progress
    raise AssertionError("seeds never end")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.search", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="how long to search")
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--only", type=int, metavar="SEED", help="run the program of this seed alone")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.only is None:
        found = search(options.seconds, options.seed)
        for kind, seed in found.findings.items():
            print(f"FOUND (--only {seed}): {kind}")
        print(f"{found.programs} programs, {found.lenient} backwards where one process would have refused")
        return 1 if found.findings else 0
    return only(options.only)


def only(seed: int) -> int:
    """The program of one seed, with workers of both kinds."""
    program = draw(seed)
    print_program(program)
    found = False
    for way, start in WAYS.items():
        with start() as workers:
            verdict = run_in_time(program, workers, seed)
            print(f"workers in {way}: {verdict.finding or verdict.ended}")
            if verdict.finding is not None:
                found = True
                print_program(smallest(program, verdict, workers, seed))
    return int(found)


if __name__ == "__main__":
    sys.exit(main())
