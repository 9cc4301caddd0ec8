"""The call scheduler: a limited number of calls computes at once, and the rest waits in a fair queue."""

from __future__ import annotations

import itertools
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

__all__ = ["CallScheduler", "QueueLimits"]

log = logging.getLogger("gradwire.server")

Task = Callable[[], None]


_LATENESS_SECONDS = 2.0
"""No room is held for a refused client that is this much later than its retry hint said."""
_MOST_LATENESS_SECONDS = 60.0
"""A refused client that is this late has lost its place."""
_SHORTEST_RETRY_SECONDS, _LONGEST_RETRY_SECONDS = 0.005, 5.0


@dataclass(frozen=True)
class QueueLimits:
    """How many calls a worker accepts."""

    threads: int = 64
    """Calls that compute at the same time."""
    threads_per_client: int | None = None
    """How many of these calls may be of the same client; None for all of them."""
    queued: int = 10_000
    """Calls that wait to run."""
    queued_per_client: int = 2_000
    """How many of these calls may be of the same client."""


class CallScheduler:
    """Gives calls, here called tasks, slots to compute in. Waiting tasks are taken from each client in turn.

    A task that waits for a call of its own gives up its slot during the wait, and takes it back without
    waiting when it goes on: the task may hold a lock that other tasks need, so queueing it could deadlock.
    For that moment more tasks than the limit run.

    Short tasks do not get a thread each, because those threads would only wait for one another and for the
    interpreter. While a thread has just begun a task, a new task waits for that thread to become free; if
    that takes long after all, the new task gets a thread of its own.

    When the queue is full, clients are refused, and their places are kept in the order in which they came.
    Otherwise a client whose call just finished would always take the freed place, and waiting clients would
    get none.
    """

    def __init__(self, pool: Executor, limits: QueueLimits) -> None:
        self._pool = pool
        self._limits = limits
        self._most_of_one_client = limits.threads_per_client or limits.threads
        self._lock = threading.Lock()
        self._idle = threading.Condition(self._lock)
        self._idleness_is_awaited = False
        self._running = 0
        self._running_of: dict[int, int] = {}
        self._unfinished = 0
        self._queued = 0
        self._queues: OrderedDict[int, deque[Task]] = OrderedDict()
        """The waiting tasks of each client that has any. The first client is served next, and then goes to
        the end."""
        self._places: OrderedDict[int, float] = OrderedDict()
        """For each client that was refused, in the order of the first refusals: until when room is held for
        it. A client that is late keeps its place, but others need not wait for it."""
        self._seconds_per_task = 0.01
        """A moving average."""
        self._last_start = 0.0
        """When a thread last began a task."""
        self._is_watched = False
        """Whether a timer will look for tasks that have waited too long for a busy thread."""
        self._most_started_at_once = 1

    def submit(self, task: Task, client: int = 0, may_run_inline: Callable[[], bool] = lambda: False) -> None:
        """Runs a task on a thread of the pool as soon as a slot is free and it is the client's turn.

        If a slot is free and `may_run_inline` agrees, the task runs on the calling thread.

        Raises ResourceExhausted, with a hint when to retry, if too many tasks wait already.
        """
        with self._lock:
            has_slot = self._has_slot(client)
            if not has_slot or self._places:
                self._check_queue(client, has_slot)
            self._unfinished += 1
            if not has_slot:
                self._enqueue(task, client)
                return
            runs_here = not self._queued and may_run_inline()
            if not runs_here and self._thread_is_nearly_free() and self._can_enqueue(client):
                self._enqueue(task, client)
                self._watch()
                return
            self._take_slot(client)
        if runs_here:
            self._run(task, client, only_this=True)
        else:
            self._start(task, client)

    @contextmanager
    def slot_given_up(self, client: int = 0) -> Iterator[None]:
        """Around a wait in a client's task: another task has the slot meanwhile."""
        with self._lock:
            self._give_back_slot(client)
            following = self._dequeue()
        if following is not None:
            self._start(*following)
        try:
            yield
        finally:
            with self._lock:
                self._take_slot(client)

    def wait_until_idle(self, timeout: float) -> bool:
        """Whether all tasks finished in time."""
        with self._idle:
            self._idleness_is_awaited = True
            return self._idle.wait_for(lambda: self._unfinished == 0, timeout)

    @property
    def unfinished(self) -> int:
        """How many tasks run or wait."""
        return self._unfinished

    # -- callers of these methods hold the lock

    def _has_slot(self, client: int) -> bool:
        of_client = self._running_of.get(client, 0)
        return self._running < self._limits.threads and of_client < self._most_of_one_client

    def _take_slot(self, client: int) -> None:
        self._running += 1
        self._running_of[client] = self._running_of.get(client, 0) + 1

    def _give_back_slot(self, client: int) -> None:
        self._running -= 1
        running = self._running_of.pop(client) - 1
        if running:
            self._running_of[client] = running

    def _check_queue(self, client: int, has_slot: bool) -> None:
        """Raises ResourceExhausted if a client's call finds no room, or other clients come first."""
        own = len(self._queues.get(client, ()))
        if not has_slot and own >= self._limits.queued_per_client:
            raise self._refusal(f"{own} calls of this client wait already", own)
        ahead = self._places_ahead(client)
        # Any of the refused clients may take a free slot, since the first of them may retry much later.
        may_run = has_slot and (client in self._places or not ahead)
        if not may_run and self._limits.queued - self._queued <= ahead:
            refusal = self._refusal(f"{self._queued} calls wait already", ahead + 1)
            self._places[client] = time.monotonic() + _LATENESS_SECONDS + 3 * (refusal.retry_after or 0.0)
            raise refusal
        self._places.pop(client, None)

    def _places_ahead(self, client: int) -> int:
        """For how many clients that were refused before this client room is held."""
        now = time.monotonic()
        for gone in [other for other, until in self._places.items() if until < now - _MOST_LATENESS_SECONDS]:
            del self._places[gone]
        before = itertools.takewhile(lambda place: place[0] != client, self._places.items())
        return sum(until >= now for _, until in before)

    def _refusal(self, reason: str, calls_ahead: int) -> ResourceExhausted:
        error = ResourceExhausted(f"the worker is busy: {reason}")
        # About as long as the calls ahead take.
        expected = calls_ahead * self._seconds_per_task / self._limits.threads
        error.retry_after = min(max(expected, _SHORTEST_RETRY_SECONDS), _LONGEST_RETRY_SECONDS)
        error.not_started = True
        return error

    def _can_enqueue(self, client: int) -> bool:
        own = len(self._queues.get(client, ()))
        return self._queued < self._limits.queued and own < self._limits.queued_per_client

    def _enqueue(self, task: Task, client: int) -> None:
        self._queued += 1
        self._queues.setdefault(client, deque()).append(task)

    def _dequeue(self) -> tuple[Task, int] | None:
        """The next task and its client, with a slot taken; None if none may run."""
        client = next(filter(self._has_slot, self._queues), None)
        if client is None:
            return None
        queue = self._queues[client]
        task = queue.popleft()
        self._queued -= 1
        if queue:
            self._queues.move_to_end(client)
        else:
            del self._queues[client]
        self._take_slot(client)
        return task, client

    def _thread_is_nearly_free(self) -> bool:
        """Whether some thread began its task so recently that it will probably be free soon."""
        return self._running > 0 and time.monotonic() - self._last_start < INLINE_SECONDS

    def _watch(self) -> None:
        if not self._is_watched:
            self._is_watched = True
            call_later(INLINE_SECONDS, self._start_waiting_tasks)

    # -- callers of these methods do not hold the lock

    def _run(self, task: Task | None, client: int, *, only_this: bool = False) -> None:
        """Runs a task and, unless `only_this`, the tasks that wait for a thread."""
        while task is not None:
            self._last_start = started = time.monotonic()
            try:
                task()
            except BaseException:
                log.exception("a call failed outside of its function")
            seconds = time.monotonic() - started
            self._seconds_per_task += 0.1 * (seconds - self._seconds_per_task)
            task = None  # the task refers to the arguments of the call
            with self._lock:
                self._unfinished -= 1
                if self._idleness_is_awaited and not self._unfinished:
                    self._idle.notify_all()
                self._give_back_slot(client)
                if self._queued:
                    task, client = self._dequeue() or (None, 0)
            if only_this and task is not None:
                self._start(task, client)
                return

    def _start_waiting_tasks(self) -> None:
        """Starts threads for tasks that wait for a busy thread, if that turned out not to be free soon."""
        starting: list[tuple[Task, int]] = []
        with self._lock:
            self._is_watched = False
            if not self._thread_is_nearly_free():
                # Twice as many each time: the waiting tasks may take as long as the running ones.
                self._most_started_at_once *= 2
                while len(starting) < self._most_started_at_once:
                    following = self._dequeue()
                    if following is None:
                        break
                    starting.append(following)
            else:
                self._most_started_at_once = 1
            if self._queued and self._running < self._limits.threads:
                self._watch()
        for task, client in starting:
            self._start(task, client)

    def _start(self, task: Task, client: int) -> None:
        try:
            self._pool.submit(self._run, task, client)
        except RuntimeError:
            # The pool was shut down: nothing waits for this task any more, nor for the queued tasks.
            with self._idle:
                self._give_back_slot(client)
                self._unfinished -= 1 + self._queued
                self._queues.clear()
                self._queued = 0
                self._idle.notify_all()
