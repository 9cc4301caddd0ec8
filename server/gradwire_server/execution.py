"""Running calls: so many at once, the rest in a fair queue, and never a deadlock among those that wait."""

from __future__ import annotations

import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

from gradwire.errors import ResourceExhausted

__all__ = ["QueueLimits", "Slots"]

log = logging.getLogger("gradwire.server")

Task = Callable[[], None]


@dataclass(frozen=True)
class QueueLimits:
    """How many calls a worker takes on."""

    threads: int = 64
    """Calls that compute at the same time."""
    queued: int = 10_000
    """Calls that wait to run."""
    queued_per_client: int = 2_000
    """Of those, calls of one client."""


class Slots:
    """Lets so many tasks compute at once. Those that wait are taken from each client in turn.

    A task that waits for a call of its own gives up its slot meanwhile, and takes it back without
    waiting when it goes on: it may hold a lock that the others need, so making it queue could deadlock.
    For that moment more than the limit run.
    """

    def __init__(self, pool: ThreadPoolExecutor, limits: QueueLimits) -> None:
        self._pool = pool
        self._limits = limits
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._running = 0
        self._unfinished = 0
        self._queued = 0
        self._queues: OrderedDict[int, deque[Task]] = OrderedDict()
        """For each client that has calls waiting. The first is served next, and then goes to the end."""
        self._seconds_per_task = 0.01

    def submit(self, task: Task, client: int = 0) -> None:
        """Runs a task on a thread of its own as soon as a slot is free and it is the client's turn.

        Raises ResourceExhausted, with a hint when to come again, if too many wait already.
        """
        with self._lock:
            if self._running >= self._limits.threads:
                self._enqueue(task, client)
                return
            self._unfinished += 1
            self._running += 1
        self._start(task)

    @contextmanager
    def yielded(self) -> Iterator[None]:
        """For a task, around a wait."""
        self._release()
        try:
            yield
        finally:
            with self._lock:
                self._running += 1

    def wait_until_idle(self, timeout: float) -> bool:
        """Whether all tasks finished in time."""
        with self._idle:
            return self._idle.wait_for(lambda: self._unfinished == 0, timeout)

    @property
    def unfinished(self) -> int:
        return self._unfinished

    def _enqueue(self, task: Task, client: int) -> None:
        own = len(self._queues.get(client, ()))
        limits = self._limits
        if self._queued >= limits.queued or own >= limits.queued_per_client:
            whose = "of this client " if own >= limits.queued_per_client else ""
            error = ResourceExhausted(f"too many calls {whose}wait already ({own or self._queued})")
            # About as long as it takes until there is room again.
            error.retry_after = min(max(self._seconds_per_task, 0.005), 1.0)
            error.not_started = True
            raise error
        self._unfinished += 1
        self._queued += 1
        self._queues.setdefault(client, deque()).append(task)

    def _next(self) -> Task | None:
        if not self._queues:
            return None
        client, queue = next(iter(self._queues.items()))
        task = queue.popleft()
        self._queued -= 1
        if queue:
            self._queues.move_to_end(client)
        else:
            del self._queues[client]
        return task

    def _run(self, task: Task) -> None:
        started = time.monotonic()
        try:
            task()
        except BaseException:
            log.exception("a task failed")
        finally:
            took = time.monotonic() - started
            self._seconds_per_task += 0.1 * (took - self._seconds_per_task)
            self._finish()

    def _release(self) -> None:
        with self._lock:
            self._running -= 1
            task = self._next() if self._running < self._limits.threads else None
            if task is None:
                return
            self._running += 1
        self._start(task)

    def _start(self, task: Task) -> None:
        try:
            self._pool.submit(self._run, task)
        except RuntimeError:
            # The pool was shut down: nobody waits for this task any more, nor for those behind it.
            with self._idle:
                self._running -= 1
                self._unfinished -= 1 + self._queued
                self._queues.clear()
                self._queued = 0
                self._idle.notify_all()

    def _finish(self) -> None:
        with self._idle:
            self._unfinished -= 1
            if not self._unfinished:
                self._idle.notify_all()
        self._release()
