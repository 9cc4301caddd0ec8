"""The order in which the call scheduler serves clients when there is no room for all, in simulated time."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import pytest

from gradwire.errors import ResourceExhausted
from gradwire_server.serving import scheduler
from gradwire_server.serving.scheduler import CallScheduler, QueueLimits

TASK_SECONDS = 0.02
CLIENTS = 200
ROUNDS = 12


class Simulation:
    """A clock, and what is to happen at which of its times."""

    def __init__(self) -> None:
        self.now = 100.0
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._counter = itertools.count()

    def monotonic(self) -> float:
        return self.now

    def after(self, seconds: float, action: Callable[[], object]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._counter), action))

    def run_until(self, is_over: Callable[[], bool]) -> None:
        while not is_over():
            self.now, _, action = heapq.heappop(self._events)
            action()


class Threads(Executor):
    """Threads of the simulation, on which the scheduler runs one task after the other."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        def run() -> None:
            self._simulation.now -= TASK_SECONDS  # the task began that long ago: it sets the clock right
            function(*args, only_this=True)

        self._simulation.after(TASK_SECONDS, run)
        return Future()


@pytest.mark.parametrize("thinks_for", [0.0, 4.0], ids=["all are eager", "some are slow to retry"])
def test_many_clients_are_served_alike(thinks_for: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients on a busy machine retry seconds later than they were told to, and still get their turn."""
    simulation = Simulation()
    monkeypatch.setattr(scheduler, "time", simulation)
    monkeypatch.setattr(scheduler, "call_later", simulation.after)
    calls = CallScheduler(Threads(simulation), QueueLimits(threads=4, queued=16))
    draw = random.Random(0)
    served: Counter[int] = Counter()
    waits: dict[int, list[float]] = {client: [] for client in range(CLIENTS)}

    def call(client: int) -> None:
        since = simulation.now

        def task() -> None:
            simulation.now += TASK_SECONDS
            served[client] += 1
            waits[client].append(simulation.now - since)
            simulation.after(0.0, lambda: call(client))

        def attempt() -> None:
            try:
                calls.submit(task, client)
            except ResourceExhausted as refusal:
                late = thinks_for if client % 10 == 0 else 0.0
                pause = (refusal.retry_after or 0.0) * draw.uniform(0.5, 1.5)
                simulation.after(late + pause, attempt)

        attempt()

    for client in range(CLIENTS):
        call(client)
    simulation.run_until(lambda: served[1] == ROUNDS * 5)
    eager = [served[client] for client in range(CLIENTS) if client % 10]
    slow = [served[client] for client in range(CLIENTS) if not client % 10]
    assert max(eager) <= 1.5 * min(eager)
    if not thinks_for:
        assert max(slow) <= 1.5 * min(eager)
        assert min(slow) * 1.5 >= max(eager)
    # A client that is late is served at one of its first attempts.
    longest = max(max(waits[client]) for client in range(0, CLIENTS, 10))
    assert longest <= 2 * thinks_for + 5 * CLIENTS * TASK_SECONDS / 4
