"""The checks after a run: every call ran once, and the workers hold nothing any more."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass

from tests.faults.proxy import KINDS
from tests.soak.run import LEASE, Outcome, WorkerUse

import gradwire as gw
from gradwire.peers.current import default_peer

__all__ = ["Remains", "check"]

RELEASE_SECONDS = LEASE + 30.0
"""How long what killed clients held may take to go."""
MOST_GROWTH_BYTES = 200_000_000
"""From a worker that has not served anything yet: some 100 MB are threads, gRPC and torch getting warm."""
MOST_THREADS = 250


@dataclass
class Remains:
    """What a worker holds and uses when all clients are gone."""

    held: dict[str, int]
    """By what it is; empty if nothing is left."""
    resident: int
    threads: int


def check(outcome: Outcome) -> list[Remains]:
    """Looks at the workers, and adds to the outcome's violations."""
    give_up_at = time.monotonic() + RELEASE_SECONDS
    remains = [_wait_for_release(worker, give_up_at) for worker in outcome.workers]
    for index, (worker, left) in enumerate(zip(outcome.workers, remains, strict=True)):
        found = outcome.violations
        if left.held:
            found.append(f"worker {index} still holds {left.held}")
        growth = left.resident - worker.resident_at_first
        if growth > MOST_GROWTH_BYTES:
            found.append(f"worker {index} has grown by {growth / 1e6:.0f} MB")
        if worker.threads_at_most > MOST_THREADS:
            found.append(f"worker {index} had {worker.threads_at_most} threads")
        found += [f"worker {index} logged {line}" for line in worker.daemon.lines if _is_error(line)]
        _check_counts(outcome, index)
    wanted: set[str] = set()
    if "grpc" in outcome.size.carriers:
        # In less time than that some may well not come up.
        wanted = set(KINDS) if outcome.size.seconds >= 20 else {"cut"}
    for worker in outcome.workers:
        if worker.proxy is None:
            wanted.add(f"{worker.carrier} cut")
            with gw.connect(worker.daemon.address) as handle:
                outcome.faults.update(handle.faults())
    if wanted - set(KINDS):
        wanted.add("blocked")
        outcome.faults["blocked"] = sum(n for what, n in outcome.faults.items() if what.endswith(" blocked"))
    if missing := wanted - set(outcome.faults):
        outcome.violations.append(f"these faults never happened: {', '.join(sorted(missing))}")
    return remains


def _wait_for_release(worker: WorkerUse, give_up_at: float) -> Remains:
    with gw.connect(worker.daemon.address) as handle:
        while True:
            census: dict[str, int] = handle.census()
            inspected = handle.inspect()
            held = {key: number for key, number in census.items() if key != "threads"}
            held["calls"] = inspected.calls
            for context in inspected.contexts:
                for kind in ("results", "arguments", "gradients"):
                    held[kind] = held.get(kind, 0) + getattr(context, kind)
            if inspected.contexts:
                held["contexts"] = len(inspected.contexts)
            # Workers that called this one stay connected, and whoever looks.
            held["clients"] = sum(not _is_expected(client.name) for client in inspected.clients)
            held = {key: number for key, number in held.items() if number}
            if not held or time.monotonic() > give_up_at:
                resident, threads = worker.sample()
                return Remains(held, resident, threads)
            time.sleep(0.2)


def _is_expected(client: str) -> bool:
    return client.startswith("worker-") or client == default_peer().identity.name


def _is_error(line: dict[str, object]) -> bool:
    return str(line.get("level", "")).lower() in ("error", "critical") or "not_json" in line


def _check_counts(outcome: Outcome, index: int) -> None:
    account = outcome.account
    with gw.connect(outcome.workers[index].daemon.address) as handle:
        counted: dict[int, int] = handle.counted()
    begun = {token for token, worker in account.begun.items() if worker == index}
    wrong = Counter(
        twice=sum(times > 1 for times in counted.values()),
        lost=len((account.done & begun) - set(counted)),
        unknown=len(set(counted) - begun),
    )
    if +wrong:
        outcome.violations.append(f"worker {index}: calls counted wrongly: {dict(+wrong)}")
