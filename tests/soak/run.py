"""The run: starts workers, proxies and clients, lets faults happen, kills clients, ends in time."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.carriers import CARRIERS, FLAGS
from tests.faults.proxy import FaultyProxy
from tests.integration.daemons import Daemon
from tests.soak import cuts
from tests.soak.client import FINISH_SECONDS, Orders, run_client
from tests.soak.journal import Account, read_account
from tests.soak.load import Place

__all__ = ["LEASE", "Outcome", "Size", "WorkerUse", "run"]

ROOT = Path(__file__).resolve().parents[2]
LEASE = 10.0
BYTES_BETWEEN_FAULTS = ((1_000, 60_000), (5_000, 400_000), (50_000, 16_000_000))
"""For the proxy of each worker. Small ones hit the messages, large ones the middle of large tensors."""
LARGEST_BYTES = 4_000_000
"""What is sent to a worker that has no proxy."""
SOCKETS_CUT_EVERY = (0.1, 0.6)
KILL_EVERY = (4.0, 10.0)
DISTURB_EVERY = (0.5, 2.5)
OUTAGE_SECONDS = (0.2, 1.5)


@dataclass(frozen=True)
class Size:
    """How much goes on."""

    seconds: float
    seed: int
    clients: int = 3
    threads: int = 3
    carrier: str = "mixed"
    """Of the sessions with all workers; mixed: another one with each."""

    @property
    def carriers(self) -> list[str]:
        """One for each worker."""
        if self.carrier == "mixed":
            return random.Random(self.seed).sample(CARRIERS, len(BYTES_BETWEEN_FAULTS))
        return [self.carrier] * len(BYTES_BETWEEN_FAULTS)


@dataclass
class WorkerUse:
    """What one worker used and said."""

    daemon: Daemon
    carrier: str
    proxy: FaultyProxy | None
    """Through which all reach it, if its sessions go over gRPC."""
    place: Place
    resident_at_first: int = 0
    resident_at_most: int = 0
    threads_at_most: int = 0

    def sample(self) -> tuple[int, int]:
        """Resident bytes and threads, as the system counts them."""
        status = Path(f"/proc/{self.daemon.process.pid}/status").read_text()
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        resident, threads = int(fields["VmRSS"].split()[0]) * 1024, int(fields["Threads"])
        self.resident_at_most = max(self.resident_at_most, resident)
        self.threads_at_most = max(self.threads_at_most, threads)
        return resident, threads


@dataclass
class Outcome:
    """What happened, as far as it is known before the workers are looked at."""

    size: Size
    workers: list[WorkerUse]
    account: Account = field(default_factory=Account)
    faults: Counter[str] = field(default_factory=Counter)
    clients_started: int = 0
    clients_killed: int = 0
    violations: list[str] = field(default_factory=list)


@contextmanager
def run(size: Size) -> Iterator[Outcome]:
    """Loads the workers for that long. They are still there in the block, with nobody using them."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="gradwire-soak-")))
        daemons = [_start_worker(index, carrier) for index, carrier in enumerate(size.carriers)]
        for daemon in daemons:
            stack.callback(daemon.stop)
        workers = []
        for index, (daemon, carrier) in enumerate(zip(daemons, size.carriers, strict=True)):
            address, proxy, largest_bytes = daemon.wait_until_ready().address, None, LARGEST_BYTES
            if carrier == "grpc":
                between = BYTES_BETWEEN_FAULTS[index]
                proxy = FaultyProxy(address, seed=size.seed * 10 + index, bytes_between=between)
                stack.enter_context(proxy.running())
                address, largest_bytes = proxy.address, between[1] // 4
            workers.append(WorkerUse(daemon, carrier, proxy, Place(index, address, largest_bytes)))
        outcome = Outcome(size, workers)
        for worker in workers:
            worker.resident_at_first, _ = worker.sample()
        crowd = _Crowd(outcome, folder)
        stack.callback(crowd.kill_all)
        _disturb(outcome, crowd)
        crowd.wait()
        for worker in workers:
            if worker.proxy is not None:
                worker.proxy.active = False
                outcome.faults.update(worker.proxy.fired)
        yield outcome


def _nothing() -> None:
    """What the first process does: when it ends, all is loaded."""


def _start_worker(index: int, carrier: str) -> Daemon:
    # Little room, so that clients are refused now and then and come again.
    limits = ("--threads", "4", "--max-queued-calls", "64", "--max-queued-calls-per-client", "16")
    options = ("--lease", str(LEASE), "--torch-threads", "1", "--name", f"worker-{index}")
    return Daemon(
        ["tests.soak.served", "--bind", "127.0.0.1:0", *FLAGS[carrier], *limits, *options], cwd=ROOT
    )


class _Crowd:
    """The clients. When one is killed the next takes its place."""

    def __init__(self, outcome: Outcome, folder: Path) -> None:
        self._outcome = outcome
        self._folder = folder
        # Loading torch takes seconds. A server that has done so, and has not used gradwire, forks clients.
        self._processes = multiprocessing.get_context("forkserver")
        self._processes.set_forkserver_preload(["gradwire._public", "tests.soak.client"])
        first = self._processes.Process(target=_nothing)
        first.start()
        first.join()
        self._end = time.monotonic() + outcome.size.seconds
        self._running: list[tuple[Orders, Any]] = []
        self._all: list[tuple[Orders, Any]] = []
        for _ in range(outcome.size.clients):
            self._start()

    def _start(self) -> None:
        outcome = self._outcome
        outcome.clients_started += 1
        orders = Orders(
            number=outcome.clients_started,
            seed=outcome.size.seed,
            seconds=max(self._end - time.monotonic(), 0.0),
            threads=outcome.size.threads,
            places=[worker.place for worker in outcome.workers],
            folder=self._folder,
        )
        process = self._processes.Process(target=run_client, args=(orders,), daemon=True)
        process.start()
        self._running.append((orders, process))
        self._all.append((orders, process))

    @property
    def pids(self) -> list[int]:
        return [process.pid for orders, process in self._running if orders.is_ready]

    def kill_one(self, chance: random.Random) -> None:
        victim = self._running.pop(chance.randrange(len(self._running)))
        victim[1].kill()
        self._outcome.clients_killed += 1
        self._start()

    def kill_all(self) -> None:
        for _, process in self._all:
            process.kill()
            process.join()

    def wait(self) -> None:
        """Until all have finished what they were at; then collects what they did."""
        outcome = self._outcome
        give_up_at = time.monotonic() + FINISH_SECONDS + 10
        for orders, process in self._running:
            process.join(max(give_up_at - time.monotonic(), 0.0))
            if process.exitcode != 0:
                stacks = orders.stacks.read_text() if orders.stacks.exists() else ""
                outcome.violations.append(
                    f"client {orders.number} did not end by itself (exit code {process.exitcode})\n{stacks}"
                )
        self.kill_all()
        for orders, _ in self._all:
            outcome.account.add(read_account(orders.journal))
        outcome.violations += [f"{kind}: {text}" for kind, text in outcome.account.violations]


def _disturb(outcome: Outcome, crowd: _Crowd) -> None:
    """Until the time is over: cuts, outages and deaths, and a look at what the workers use."""
    chance = random.Random(outcome.size.seed)
    started = now = time.monotonic()
    end = started + outcome.size.seconds
    next_fault, next_death = now + 2, now + chance.uniform(*KILL_EVERY)
    next_cut, next_block = now + 2, started + outcome.size.seconds / 2
    around = [worker.daemon.process.pid for worker in outcome.workers if worker.proxy is None]
    while now < end:
        for worker in outcome.workers:
            worker.sample()
        if now >= next_fault:
            next_fault = now + chance.uniform(*DISTURB_EVERY)
            _trouble(outcome, chance)
        if around and now >= next_cut:
            next_cut = now + chance.uniform(*SOCKETS_CUT_EVERY)
            _signal(chance.choice([*around, *crowd.pids]), cuts.CUT)
        if around and now >= next_block:
            # From now on there is only gRPC, or a direct socket, for who is cut from that worker.
            next_block = end
            _signal(chance.choice(around), cuts.BLOCK)
        # Not at the very end: a new client should have time for something.
        if next_death <= now < end - 3:
            next_death = now + chance.uniform(*KILL_EVERY)
            crowd.kill_one(chance)
        time.sleep(0.1)
        now = time.monotonic()


def _signal(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):  # a client may have ended
        os.kill(pid, number)


def _trouble(outcome: Outcome, chance: random.Random) -> None:
    """All connections of a worker are cut; one time in three none can be made for a while."""
    proxies = [worker.proxy for worker in outcome.workers if worker.proxy is not None]
    if not proxies:
        return
    proxy = chance.choice(proxies)
    if chance.random() < 1 / 3 and not proxy.refuse:
        outcome.faults["outage"] += 1
        proxy.refuse = True
        back = threading.Timer(chance.uniform(*OUTAGE_SECONDS), setattr, (proxy, "refuse", False))
        back.start()
    proxy.cut_all()


def logged(workers: Sequence[WorkerUse], text: str) -> int:
    """How many lines of the workers' logs have this text."""
    return sum(text in str(line.get("message", "")) for worker in workers for line in worker.daemon.lines)
