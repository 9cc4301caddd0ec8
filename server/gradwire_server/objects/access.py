"""Read and write access to parameters, so that no computation sees half an optimizer step.

Calls and backwards *read* parameters, any number of them at once. Optimizer steps and loaded states *write*
parameters, one at a time: a write waits until nothing computes with the parameters, and a call or backward
that begins meanwhile waits for the write. A call that waits for another process computes nothing, so a write
does not wait for such a call. That is why nested calls, and backwards that are held open for gradients,
cannot deadlock with a step.

Before a trainer writes, it *reserves* the parameters. Reservations are granted in the order of the requests,
and may last from a trainer's prepare to its commit. Calls and backwards go on during a reservation; they wait
for the write itself only.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import replace
from functools import partial

from gradwire.runtime.scope import Token as ScopeToken
from gradwire.runtime.scope import current_scope, enter, leave, waiting

__all__ = ["ParameterAccess", "ParameterLock", "ReadGuard"]

_LONGEST_READ_SECONDS = 10.0
"""A write waits for reads that have computed for less than this without a pause. A read that takes longer, or
never ends, is overtaken, and its backward is refused: else one function that hangs would keep all trainers
from stepping."""
_YIELD_TO_WRITE_SECONDS = 1.0
"""A read that begins lets a waiting write go first, for this long at most. After that the read goes ahead,
because the write may wait for another read that waits for this read in a way that only the user's code knows
of."""
_KEEP_PLACE_SECONDS = 1.0
"""How long a trainer whose reservation was not granted in time keeps its place in the queue."""


class ParameterLock:
    """Stands for a set of parameters that are written together."""

    __slots__ = ("__weakref__", "unversioned_writes")

    def __init__(self) -> None:
        self.unversioned_writes = 0
        """How many writes put the version counters of the parameters back afterwards."""


Locks = frozenset[ParameterLock]


class ReadGuard:
    """Context manager around a computation with parameters. Each guard is entered once."""

    __slots__ = ("_access", "_reset", "_scope", "is_overtaken", "locks", "started_at")

    def __init__(self, access: ParameterAccess, locks: Locks) -> None:
        self._access = access
        self.locks = locks
        self.started_at = 0.0
        """When the computation last began or resumed, on time.monotonic's clock."""
        self.is_overtaken = False
        """Whether parameters were written during the computation, because it took too long."""

    def __enter__(self) -> ReadGuard:
        self._access._begin_read(self, is_outermost=_current_read.get() is None)
        scope = current_scope()
        self._scope: ScopeToken = enter(replace(scope, around_wait=partial(self._paused, scope.around_wait)))
        self._reset = _current_read.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _current_read.reset(self._reset)
        leave(self._scope)
        self._access._end_read(self)

    @contextmanager
    def _paused(self, around_wait: Callable[[], AbstractContextManager[None]] | None) -> Iterator[None]:
        """Ends the read around a wait for another process, since nothing is computed during the wait."""
        self._access._end_read(self)
        with nullcontext() if around_wait is None else around_wait():
            try:
                yield
            finally:
                # This thread has given up its slot for the wait already, so beginning again need not do that.
                # Nested reads resume before the read around them.
                is_outermost = _current_read.get() is self
                self._access._begin_read(self, is_outermost=is_outermost, wait=lambda begin: begin())


_current_read: ContextVar[ReadGuard | None] = ContextVar("gradwire_read", default=None)


class _Reservation:
    """A request to reserve parameters, with its place in the queue."""

    __slots__ = ("locks", "place_kept_until", "trainer")

    def __init__(self, locks: Locks, trainer: str | None) -> None:
        self.locks = locks
        self.trainer = trainer
        self.place_kept_until: float | None = None
        """None while a thread waits for the reservation. After the thread gave up: how long the trainer may
        come back to its place."""


class _Write:
    """A write that waits for reads to end, or is under way."""

    __slots__ = ("is_under_way", "locks", "requested_at", "thread")

    def __init__(self, locks: Locks) -> None:
        self.locks = locks
        self.requested_at = time.monotonic()
        self.is_under_way = False
        self.thread = threading.get_ident()
        """The write does not block reads of its own thread: a method may step the module it belongs to."""


class ParameterAccess:
    """Coordinates all reads and writes of the parameters of one worker.

    There is one mutex for all of them, and every read, write and reservation takes all the parameter locks
    that it needs at one moment, so none waits for a lock while it holds another.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._reads: set[ReadGuard] = set()
        """Reads that compute now."""
        self._writes: list[_Write] = []
        """Writes that wait or are under way."""
        self._reservation_queue: list[_Reservation] = []
        """Requests that were not granted yet, in the order in which they came."""
        self._reserved: set[ParameterLock] = set()
        """The locks of all granted reservations."""
        self.waiting_reads = 0
        """How many reads wait for a write."""

    # -- reads

    def read(self, locks: Iterable[ParameterLock]) -> ReadGuard | None:
        """The guard to enter around a computation with parameters; None if there are no parameters."""
        wanted = frozenset(locks)
        return ReadGuard(self, wanted) if wanted else None

    def _begin_read(
        self, read: ReadGuard, *, is_outermost: bool, wait: Callable[[Callable[[], None]], None] = waiting
    ) -> None:
        with self._changed:
            # The common case first: there is no write.
            if not self._writes or not self._must_wait(read, is_outermost, yields=is_outermost):
                self._add_read(read)
                return
        # `wait` gives up the slot that this thread computes in: the write may need that slot.
        wait(partial(self._wait_to_read, read, is_outermost))

    def _wait_to_read(self, read: ReadGuard, is_outermost: bool) -> None:
        yields_until = time.monotonic() + _YIELD_TO_WRITE_SECONDS
        with self._changed:
            self.waiting_reads += 1
            try:
                while self._must_wait(
                    read, is_outermost, yields=is_outermost and time.monotonic() < yields_until
                ):
                    left = yields_until - time.monotonic()
                    self._changed.wait(left if left > 0 else _YIELD_TO_WRITE_SECONDS)
                self._add_read(read)
            finally:
                self.waiting_reads -= 1

    def _must_wait(self, read: ReadGuard, is_outermost: bool, *, yields: bool) -> bool:
        # A write that has waited for too long blocks every outermost read that begins, for as long as it
        # takes until the reads that compute end or are overtaken. A nested read goes ahead, because the write
        # waits for the read around it.
        too_long_ago = time.monotonic() - _LONGEST_READ_SECONDS
        own_thread = threading.get_ident()
        return any(
            write.is_under_way or yields or (is_outermost and write.requested_at < too_long_ago)
            for write in self._writes
            if write.thread != own_thread and not write.locks.isdisjoint(read.locks)
        )

    def _add_read(self, read: ReadGuard) -> None:
        read.started_at = time.monotonic()
        self._reads.add(read)

    def _end_read(self, read: ReadGuard) -> None:
        with self._changed:
            self._reads.discard(read)
            if self._writes:
                self._changed.notify_all()

    # -- writes

    @contextmanager
    def write(self, locks: Locks) -> Iterator[None]:
        """Around a write of parameters that the caller has reserved: nothing reads them meanwhile."""
        write = _Write(locks)
        with self._changed:
            self._writes.append(write)
        try:
            waiting(partial(self._wait_to_write, write))
            yield
        finally:
            with self._changed:
                self._writes.remove(write)
                self._changed.notify_all()

    def _wait_to_write(self, write: _Write) -> None:
        with self._changed:
            while True:
                reads = [read for read in self._reads if not read.locks.isdisjoint(write.locks)]
                latest_start = max((read.started_at for read in reads), default=-float("inf"))
                left = latest_start + _LONGEST_READ_SECONDS - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            for read in reads:
                read.is_overtaken = True
            write.is_under_way = True

    # -- reservations

    def reserve(self, locks: Locks, give_up_at: float, trainer: str | None = None) -> ExitStack | None:
        """Reserves parameters until the result is closed; None if that was not granted in time.

        Requests are granted in the order in which they came. A request that names its trainer keeps its place
        for a while after it gave up, and the trainer's next request takes that place.
        """
        with self._changed:
            reservation = self._place_of(trainer, locks)
            if reservation is None:
                reservation = _Reservation(locks, trainer)
                self._reservation_queue.append(reservation)
            reservation.place_kept_until = None
            if self._can_grant(reservation):
                return self._grant(reservation)
        # `waiting` gives up the slot that this thread computes in: the trainer that holds the reservation may
        # need that slot to commit.
        return waiting(partial(self._wait_for_reservation, reservation, give_up_at))

    def _place_of(self, trainer: str | None, locks: Locks) -> _Reservation | None:
        """The place that was kept for a trainer."""
        if trainer is None:
            return None
        return next(
            (
                queued
                for queued in self._reservation_queue
                if queued.trainer == trainer and queued.place_kept_until is not None and queued.locks == locks
            ),
            None,
        )

    def _wait_for_reservation(self, reservation: _Reservation, give_up_at: float) -> ExitStack | None:
        with self._changed:
            try:
                while not self._can_grant(reservation):
                    now = time.monotonic()
                    if now >= give_up_at:
                        if reservation.trainer is not None:
                            reservation.place_kept_until = now + _KEEP_PLACE_SECONDS
                        return None
                    kept_places_end = (
                        queued.place_kept_until
                        for queued in self._reservation_queue
                        if queued.place_kept_until is not None
                    )
                    self._changed.wait(max(min([give_up_at, *kept_places_end]) - now, 0.0))
                return self._grant(reservation)
            finally:
                if reservation.place_kept_until is None and reservation in self._reservation_queue:
                    self._reservation_queue.remove(reservation)
                self._changed.notify_all()

    def _can_grant(self, reservation: _Reservation) -> bool:
        now = time.monotonic()
        self._reservation_queue = [
            queued
            for queued in self._reservation_queue
            if queued.place_kept_until is None or queued.place_kept_until > now
        ]
        ahead = self._reservation_queue[: self._reservation_queue.index(reservation)]
        return self._reserved.isdisjoint(reservation.locks) and all(
            queued.locks.isdisjoint(reservation.locks) for queued in ahead
        )

    def _grant(self, reservation: _Reservation) -> ExitStack:
        self._reservation_queue.remove(reservation)
        self._reserved |= reservation.locks
        stack = ExitStack()
        stack.callback(self._end_reservation, reservation.locks)
        return stack

    def _end_reservation(self, locks: Locks) -> None:
        with self._changed:
            self._reserved -= locks
            self._changed.notify_all()
