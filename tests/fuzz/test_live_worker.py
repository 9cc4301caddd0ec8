"""A worker that gets mutated messages, whatever way they come, serves an honest client as before.

In ``make test`` some thousands, in ``make test-slow`` a million, to one worker.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.integration.daemons import Daemon, _environment
from tests.integration.forking import Forked

import gradwire as gw
from gradwire.peers.current import default_peer

SENDERS = 2
SLOWEST = 250.0
"""Messages in a second, of all senders together, at least: else the test gives up."""
MOST_GROWTH = 200 << 20
"""From a worker that has served the first messages to one that has served all: threads and allocators get
warm, and what is limited is filled up to its limits."""
MOST_THREADS = 250
"""Each backward that runs has one, of some 200 requests at a time, and threads that are idle stay."""
RELEASE_SECONDS = 60.0
LIMITS = [
    *("--threads", "2", "--lease", "1", "--max-objects", "500", "--max-objects-per-client", "50"),
    *("--max-held-bytes-per-client", "16MiB", "--max-held-bytes", "32MiB"),
    *("--max-tensor-elements", "1000000"),
    *("--max-message-bytes", "64MiB"),
]


@dataclass
class Live:
    """The worker, and what it took when it had served its first messages."""

    daemon: Daemon
    resident: int


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    daemon = Daemon(
        ["serving", "--bind", "127.0.0.1:0", *LIMITS],
        cwd=Path(__file__).parent / "targets",
    )
    try:
        daemon.wait_until_ready()
        send(daemon, 1000, seed=0)
        yield Live(daemon, status(daemon, "VmRSS") << 10)
    finally:
        daemon.stop()


def status(daemon: Daemon, field: str) -> int:
    text = Path(f"/proc/{daemon.process.pid}/status").read_text()
    return next(int(line.split()[1]) for line in text.splitlines() if line.startswith(f"{field}:"))


def send(daemon: Daemon, messages: int, seed: int) -> dict[str, int]:
    """Has processes send so many messages. What was sent, and what came of it."""
    give_up_at = time.monotonic() + 120.0 + messages / SLOWEST
    arguments = [daemon.address, "--messages", str(messages // SENDERS)]
    senders = [
        Forked(
            "tests.fuzz.live",
            [*arguments, "--seed", str(SENDERS * seed + number)],
            cwd=None,
            env=_environment(None),
            stdout=True,
        )
        for number in range(SENDERS)
    ]
    counts: dict[str, int] = {}
    try:
        for sender in senders:
            code = sender.wait(max(give_up_at - time.monotonic(), 0.0))
            assert sender.stdout is not None
            written = sender.stdout.read()
            assert written, f"exit code {code}: {sender.stderr.read()}"
            outcome = json.loads(written)
            assert outcome["findings"] == {}
            assert code == 0
            for what, count in outcome["counts"].items():
                counts[what] = counts.get(what, 0) + count
    finally:
        for sender in senders:
            sender.kill()
            sender.wait(30.0)
            for stream in (sender.stdout, sender.stderr):
                if stream is not None:
                    stream.close()
    return counts


class Honest:
    """A client that trains a module on the worker, and the same module here, with the same numbers."""

    def __init__(self, address: str) -> None:
        self.handle = gw.connect(address)
        self.layer = self.handle.create("Layer", 3)
        self.optimizer = gw.optim.DistributedOptimizer(torch.optim.SGD, [self.layer], lr=0.01)
        self.weight = torch.nn.Parameter(torch.ones(3))
        self.local = torch.optim.SGD([self.weight], lr=0.01)
        self.steps = 0
        self._link = self.handle._link
        self._over = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._over.is_set():
                self.step()
        except BaseException as error:
            self._error = error

    def step(self) -> None:
        self.steps += 1
        x = torch.linspace(-1.0, 1.0, 3) * (self.steps % 7)
        for predict, optimizer in ((self.layer, self.optimizer), (self.weight.mul, self.local)):
            optimizer.zero_grad()
            (predict(x) - 0.5).square().sum().backward()
            optimizer.step()
        (there,) = self.layer.state_dict().values()
        assert torch.equal(there, self.weight.detach()), f"step {self.steps}: {there} is not {self.weight}"

    def stop(self) -> None:
        """Raises what went wrong, if anything did."""
        self._over.set()
        self._thread.join(60.0)
        assert not self._thread.is_alive(), "the honest client hangs"
        assert self.handle._link is self._link
        self.handle.close()
        if self._error is not None:
            raise self._error


def held(daemon: Daemon) -> dict[str, Any]:
    """What the worker holds, for others than whoever asks."""
    with gw.connect(daemon.address) as handle:
        found = handle.inspect()
        own = f"{default_peer().identity.id:016x}"
        return {
            "contexts": [context.id for context in found.contexts if not context.id.startswith(own)],
            "clients": [client.name for client in found.clients if client.peer != own],
            "calls": found.calls,
        }


def check(live: Live, messages: int, seed: int) -> None:
    daemon = live.daemon
    honest = Honest(daemon.address)
    started = time.monotonic()
    try:
        counts = send(daemon, messages, seed)
    finally:
        honest.stop()
    seconds = time.monotonic() - started
    assert honest.steps > 10
    for way in ("session", "unary", "raw"):
        assert counts[f"sent by {way}"] > messages / 1000, counts
    give_up_at = time.monotonic() + RELEASE_SECONDS
    while any((left := held(daemon)).values()) and time.monotonic() < give_up_at:
        time.sleep(0.1)
    assert not any(left.values()), left
    assert daemon.process.poll() is None
    grown = (status(daemon, "VmRSS") << 10) - live.resident
    threads = status(daemon, "Threads")
    print(
        f"{messages} messages in {seconds:.0f} s beside {honest.steps} steps, {counts}; "
        f"{grown / 1e6:.1f} MB more, {threads} threads"
    )
    assert grown < MOST_GROWTH
    assert threads < MOST_THREADS
    assert [line for line in daemon.lines if line.get("level") == "error"] == []


def test_thousands_of_mutated_messages_harm_nobody(live: Live) -> None:
    check(live, 3000, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("part", range(10))
def test_a_million_mutated_messages_harm_nobody(live: Live, part: int) -> None:
    check(live, 100_000, seed=100 + part)
