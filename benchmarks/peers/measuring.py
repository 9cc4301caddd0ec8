"""Measures a peer beside gradwire, in turns."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.environments import Peer
from benchmarks.peers.processes import PeerProcess
from benchmarks.results import Spread

__all__ = ["Found", "measure"]

START_SECONDS = 90.0
ANSWER_SECONDS = 60.0
TURN_SECONDS = 0.2
"""How long a turn takes, about."""


@dataclass(frozen=True)
class Found:
    """The seconds per operation of both, turn by turn."""

    peer: Peer
    case: str
    theirs: list[float]
    ours: list[float]

    @property
    def ratio(self) -> Spread:
        """gradwire's time by the peer's, of turns that followed one another."""
        return Spread.of([here / there for here, there in zip(self.ours, self.theirs, strict=True)])

    def as_json(self) -> dict[str, Any]:
        return {
            "peer": self.peer.name,
            "case": self.case,
            "ratio": self.ratio.median,
            "quartiles": [self.ratio.low, self.ratio.high],
            "seconds": {self.peer.name: self.theirs, "gradwire": self.ours},
        }


def measure(peer: Peer, python: Path, turns: int) -> list[Found]:
    """All cases that the peer has. Raises `PeerFailed`."""
    with ExitStack() as stack:
        processes = []
        for interpreter, module in ((python, peer.module), (Path(sys.executable), "gradwire_worker")):
            process = PeerProcess(interpreter, module)
            stack.callback(process.end)
            processes.append(process)
        theirs, ours = processes
        ours.answer(START_SECONDS)
        cases = theirs.answer(START_SECONDS).split("|")
        return [_measure(peer, case, theirs, ours, turns) for case in cases]


def _measure(peer: Peer, case: str, theirs: PeerProcess, ours: PeerProcess, turns: int) -> Found:
    counts = {}
    for process in (theirs, ours):
        process.ask(f"check {case}", ANSWER_SECONDS)  # warms up, too
        counts[process] = max(1, int(TURN_SECONDS / _seconds(process, case, 3)))
    times: dict[PeerProcess, list[float]] = {theirs: [], ours: []}
    for turn in range(turns):
        for process in (theirs, ours) if turn % 2 else (ours, theirs):
            times[process].append(_seconds(process, case, counts[process]))
    return Found(peer, case, times[theirs], times[ours])


def _seconds(process: PeerProcess, case: str, count: int) -> float:
    return float(process.ask(f"time {case} {count}", ANSWER_SECONDS))
