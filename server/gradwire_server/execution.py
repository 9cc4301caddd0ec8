"""Running calls: so many at once, the rest in a queue, and never a deadlock among those that wait."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

__all__ = ["Slots"]

log = logging.getLogger("gradwire.server")

Task = Callable[[], None]


class Slots:
    """Lets at most `limit` tasks compute at once.

    A task that waits for a call of its own gives up its slot meanwhile, and takes it back without
    waiting when it goes on: it may hold a lock that the others need, so making it queue could deadlock.
    For that moment more than `limit` run.
    """

    def __init__(self, pool: ThreadPoolExecutor, limit: int) -> None:
        self._pool = pool
        self._limit = limit
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._running = 0
        self._unfinished = 0
        self._queue: deque[Task] = deque()

    def submit(self, task: Task) -> None:
        """Runs a task on a thread of its own as soon as a slot is free."""
        with self._lock:
            self._unfinished += 1
            if self._running >= self._limit:
                self._queue.append(task)
                return
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

    def _run(self, task: Task) -> None:
        try:
            task()
        except BaseException:
            log.exception("a task failed")
        finally:
            self._finish()

    def _release(self) -> None:
        with self._lock:
            self._running -= 1
            if not self._queue or self._running >= self._limit:
                return
            self._running += 1
            task = self._queue.popleft()
        self._start(task)

    def _start(self, task: Task) -> None:
        try:
            self._pool.submit(self._run, task)
        except RuntimeError:
            # The pool was shut down: nobody waits for this task any more.
            self._finish()

    def _finish(self) -> None:
        with self._idle:
            self._unfinished -= 1
            if not self._unfinished:
                self._idle.notify_all()
        self._release()
