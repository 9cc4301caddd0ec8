"""Running calls: so many at once, the rest in a fair queue, and never a deadlock among those that wait."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass

from gradwire.errors import ResourceExhausted
from gradwire.system.timers import call_later
from gradwire.system.watchdog import INLINE_SECONDS

__all__ = ["QueueLimits", "Slots"]

log = logging.getLogger("gradwire.server")

Task = Callable[[], None]


_LATENESS_SECONDS = 2.0
"""Who comes so much later than it was asked to has lost its place."""
_SHORTEST_REST, _LONGEST_REST = 0.005, 5.0


@dataclass(frozen=True)
class QueueLimits:
    """How many calls a worker takes on."""

    threads: int = 64
    """Calls that compute at the same time."""
    threads_per_client: int | None = None
    """Of those, calls of one client; None: all of them may be."""
    queued: int = 10_000
    """Calls that wait to run."""
    queued_per_client: int = 2_000
    """Of those, calls of one client."""


class Slots:
    """Lets so many tasks compute at once. Those that wait are taken from each client in turn.

    A task that waits for a call of its own gives up its slot meanwhile, and takes it back without
    waiting when it goes on: it may hold a lock that the others need, so making it queue could deadlock.
    For that moment more than the limit run.

    Short tasks do not get a thread each, for those would only wait for one another, and for the interpreter:
    as long as a thread has just begun a task, what comes waits for it to be ready; if that takes long after
    all, it gets a thread of its own.

    When no more can wait, clients are turned away, and their places are kept in the order in which they came:
    else whoever has just been served would find the room that it has made itself, time and again, while
    those who rest find none.
    """

    def __init__(self, pool: Executor, limits: QueueLimits) -> None:
        self._pool = pool
        self._limits = limits
        self._most_of_one = limits.threads_per_client or limits.threads
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._idleness_is_awaited = False
        self._running = 0
        self._running_of: dict[int, int] = {}
        self._unfinished = 0
        self._queued = 0
        self._queues: OrderedDict[int, deque[Task]] = OrderedDict()
        """For each client that has calls waiting. The first is served next, and then goes to the end."""
        self._places: OrderedDict[int, float] = OrderedDict()
        """For each client that was turned away: until when it may come before those who came later."""
        self._seconds_per_task = 0.01
        self._last_start = 0.0
        """When a thread last began a task."""
        self._is_watched = False
        self._at_once = 1

    def submit(self, task: Task, client: int = 0, here: Callable[[], bool] = lambda: False) -> None:
        """Runs a task on a thread of its own as soon as a slot is free and it is the client's turn.

        On this thread, if that can be at once and `here` says that it may.

        Raises ResourceExhausted, with a hint when to come again, if too many wait already.
        """
        with self._lock:
            may_run = self._may_run(client)
            if not may_run or self._places:
                self._check_turn(client, may_run)
            self._unfinished += 1
            if not may_run:
                self._append(task, client)
                return
            runs_here = not self._queued and here()
            if not runs_here and self._may_run_inline() and self._has_room(client):
                self._append(task, client)
                self._watch()
                return
            self._take(client)
        if runs_here:
            self._run(task, client, alone=True)
        else:
            self._start(task, client)

    @contextmanager
    def yielded(self, client: int = 0) -> Iterator[None]:
        """For a task of a client, around a wait."""
        self._release(client)
        try:
            yield
        finally:
            with self._lock:
                self._take(client)

    def wait_until_idle(self, timeout: float) -> bool:
        """Whether all tasks finished in time."""
        with self._idle:
            self._idleness_is_awaited = True
            return self._idle.wait_for(lambda: self._unfinished == 0, timeout)

    @property
    def unfinished(self) -> int:
        return self._unfinished

    # -- all with the lock held

    def _may_run(self, client: int) -> bool:
        return self._running < self._limits.threads and self._running_of.get(client, 0) < self._most_of_one

    def _take(self, client: int) -> None:
        self._running += 1
        self._running_of[client] = self._running_of.get(client, 0) + 1

    def _give_back(self, client: int) -> None:
        self._running -= 1
        running = self._running_of.pop(client) - 1
        if running:
            self._running_of[client] = running

    def _check_turn(self, client: int, may_run: bool) -> None:
        """Raises ResourceExhausted if there is no room for another call of a client, or others come first."""
        own = len(self._queues.get(client, ()))
        if not may_run and own >= self._limits.queued_per_client:
            raise self._refusal(f"{own} calls of this client wait already", own)
        ahead = self._places_ahead(client)
        # A free thread is for any of those who were turned away, since the first of them may be late.
        may_run &= client in self._places or not ahead
        if not may_run and self._limits.queued - self._queued <= ahead:
            refusal = self._refusal(f"{self._queued} calls wait already", ahead + 1)
            self._places[client] = time.monotonic() + _LATENESS_SECONDS + 3 * (refusal.retry_after or 0.0)
            raise refusal
        self._places.pop(client, None)

    def _append(self, task: Task, client: int) -> None:
        self._queued += 1
        self._queues.setdefault(client, deque()).append(task)

    def _has_room(self, client: int) -> bool:
        own = len(self._queues.get(client, ()))
        return self._queued < self._limits.queued and own < self._limits.queued_per_client

    def _may_run_inline(self) -> bool:
        """Whether some thread will soon be ready for another task, as far as one can tell."""
        return self._running > 0 and time.monotonic() - self._last_start < INLINE_SECONDS

    def _watch(self) -> None:
        if not self._is_watched:
            self._is_watched = True
            call_later(INLINE_SECONDS, self._look)

    def _places_ahead(self, client: int) -> int:
        """How many others were turned away before this client, and may still come."""
        now = time.monotonic()
        for absent in [other for other, until in self._places.items() if until < now]:
            del self._places[absent]
        return next((index for index, other in enumerate(self._places) if other == client), len(self._places))

    def _refusal(self, why: str, before_it: int) -> ResourceExhausted:
        error = ResourceExhausted(f"the worker is busy: {why}")
        # About as long as it takes until it is its turn.
        until_turn = before_it * self._seconds_per_task / self._limits.threads
        error.retry_after = min(max(until_turn, _SHORTEST_REST), _LONGEST_REST)
        error.not_started = True
        return error

    def _next(self) -> tuple[Task, int] | None:
        client = next(filter(self._may_run, self._queues), None)
        if client is None:
            return None
        queue = self._queues[client]
        task = queue.popleft()
        self._queued -= 1
        if queue:
            self._queues.move_to_end(client)
        else:
            del self._queues[client]
        self._take(client)
        return task, client

    # -- without the lock

    def _run(self, task: Task | None, client: int, *, alone: bool = False) -> None:
        """Runs a task and, unless `alone`, those that wait for a thread."""
        while task is not None:
            self._last_start = started = time.monotonic()
            try:
                task()
            except BaseException:
                log.exception("a task failed")
            took = time.monotonic() - started
            self._seconds_per_task += 0.1 * (took - self._seconds_per_task)
            task = None  # it holds the arguments of the call
            with self._lock:
                self._unfinished -= 1
                if self._idleness_is_awaited and not self._unfinished:
                    self._idle.notify_all()
                self._give_back(client)
                if self._queued:
                    task, client = self._next() or (None, 0)
            if alone and task is not None:
                self._start(task, client)
                return

    def _look(self) -> None:
        """Gives those that wait behind tasks which turned out not to be brisk threads of their own."""
        starting: list[tuple[Task, int]] = []
        with self._lock:
            self._is_watched = False
            if not self._may_run_inline():
                # Twice as many each time: they may be of the same kind.
                self._at_once *= 2
                while len(starting) < self._at_once and (following := self._next()) is not None:
                    starting.append(following)
            else:
                self._at_once = 1
            if self._queued and self._running < self._limits.threads:
                self._watch()
        for task, client in starting:
            self._start(task, client)

    def _release(self, client: int) -> None:
        with self._lock:
            self._give_back(client)
            following = self._next()
        if following is not None:
            self._start(*following)

    def _start(self, task: Task, client: int) -> None:
        try:
            self._pool.submit(self._run, task, client)
        except RuntimeError:
            # The pool was shut down: nobody waits for this task any more, nor for those behind it.
            with self._idle:
                self._give_back(client)
                self._unfinished -= 1 + self._queued
                self._queues.clear()
                self._queued = 0
                self._idle.notify_all()
