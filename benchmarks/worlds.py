"""The processes of one contender, started, paused and ended together."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from benchmarks.cases import Topology
from benchmarks.contenders import Contender, Kind
from benchmarks.daemons import Daemon, serve
from benchmarks.members import END_SECONDS, Answering, Member, wait_for
from benchmarks.trainers import make_rank, make_trainer

PAUSE_SECONDS = 5.0


class World:
    """A contender's trainers and workers."""

    def __init__(self, contender: Contender, topology: Topology) -> None:
        self.contender = contender
        self.trainers: list[Member] = []
        self._workers: list[Member] = []
        self._daemons: list[Daemon] = []
        self._topology = topology
        self._directory = tempfile.TemporaryDirectory(prefix="benchmark-")

    @property
    def pids(self) -> list[int]:
        return [*(member.pid for member in self._members), *(daemon.pid for daemon in self._daemons)]

    @property
    def _members(self) -> list[Member]:
        return [*self._workers, *self.trainers]

    def start(self) -> None:
        """Starts everything that can be started without waiting."""
        if self.contender.kind is Kind.GRADWIRE:
            self._daemons = [serve(self.contender) for _ in range(self._topology.workers)]
        elif self.contender.kind is Kind.TENSORPIPE:
            workers = [f"worker{index}" for index in range(self._topology.workers)]
            names = [*workers, *(f"trainer{index}" for index in range(self._topology.trainers))]
            rendezvous = Path(self._directory.name, "rendezvous").as_uri()
            for rank, name in enumerate(names):
                among = self._workers if name in workers else self.trainers
                among.append(self._member(name, make_rank, rendezvous, names, rank, workers))
        else:
            self._add_trainers([""] * self._topology.workers)

    def wait_until_ready(self) -> None:
        if self._daemons:
            self._add_trainers([daemon.wait_until_ready() for daemon in self._daemons])
        for member in self._members:
            member.wait_until_ready()

    def _add_trainers(self, workers: list[str]) -> None:
        for index in range(self._topology.trainers):
            self.trainers.append(self._member(f"trainer{index}", make_trainer, workers))

    def _member(self, name: str, make: Callable[..., Answering], *args: object) -> Member:
        label = f"{self.contender.name} {name}"
        return Member(label, make, self.contender, *args, environment=self.contender.environment)

    # -- one contender works at a time

    @contextmanager
    def awake(self, topology: Topology) -> Iterator[list[Member]]:
        """The trainers of as much of the world as a row needs; what polls and is not needed stays stopped."""
        workers, trainers = self._workers[: topology.workers], self.trainers[: topology.trainers]
        self._signal(signal.SIGCONT, [*workers, *trainers])
        yield trainers
        for member in (*trainers, *workers):  # in this order: a worker's calls come of a trainer's
            member.send_request("settle")
        self.pause()

    def pause(self) -> None:
        """Stops processes that would keep a core busy while others are measured."""
        self._signal(signal.SIGSTOP, self._members)
        if self.contender.polls:
            wait_for(
                lambda: all(_state(member.pid) == "T" for member in self._members),
                PAUSE_SECONDS,
                f"{self.contender.name} did not stop",
            )

    def _signal(self, number: signal.Signals, members: list[Member]) -> None:
        for member in members if self.contender.polls else ():
            try:
                os.kill(member.pid, number)
            except ProcessLookupError:
                pass  # asking it will say so

    def close(self) -> None:
        """Ends everything."""
        self._signal(signal.SIGCONT, self._members)
        for member in self._members:
            member.begin_to_end()
        give_up_at = time.monotonic() + END_SECONDS
        with ExitStack() as stack:  # all of them, even if one of them raises
            stack.callback(self._directory.cleanup)
            for daemon in self._daemons:
                stack.callback(daemon.end)
            for daemon in self._daemons:  # all at once, after the last trainer: what is last is done first
                stack.callback(daemon.begin_to_end)
            for member in self._members:
                stack.callback(member.end, give_up_at)


@contextmanager
def running(wanted: Sequence[tuple[Contender, Topology]]) -> Iterator[list[World]]:
    """Worlds of contenders, all started at once and paused."""
    with ExitStack() as stack:
        worlds = [World(contender, topology) for contender, topology in wanted]
        for world in worlds:
            stack.callback(world.close)
            world.start()
        for world in worlds:
            world.wait_until_ready()
            world.pause()
        yield worlds


def _state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "T"  # it has ended; asking it will say so
