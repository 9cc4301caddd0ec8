"""Read and write access to parameters, so that no computation sees half an optimizer step.

Calls and backwards *read* parameters, any number of them at once. Optimizer steps and loaded states *write*
parameters, one at a time: a write waits until nothing computes with the parameters, and a call or backward
that begins meanwhile waits for the write. A call that waits for another process computes nothing, so a write
does not wait for such a call. That is why nested calls and suspended backwards cannot deadlock with a step.

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
from functools import partial

from gradwire.runtime.scope import Token as ScopeToken
from gradwire.runtime.scope import current_scope, enter, leave, waiting

__all__ = ["ParameterAccess", "ParameterSet", "ReadGuard"]

_LONGEST_READ_SECONDS = 10.0
"""A write waits for reads that have computed for less than this without a pause. A read that takes longer, or
never ends, is overtaken, and its backward is refused: else one function that hangs would keep all trainers
from stepping."""
_YIELD_TO_WRITE_SECONDS = 1.0
"""A read that begins lets a waiting write go first, for this long at most. After that the read goes ahead:
the write may be waiting for another read, whose user code waits for this read."""
_KEEP_PLACE_SECONDS = 1.0
"""How long a trainer whose reservation was not granted in time keeps its place in the queue."""


class ParameterSet:
    """A set of parameters that are read, reserved and written together."""

    __slots__ = ("__weakref__", "unversioned_writes")

    def __init__(self) -> None:
        self.unversioned_writes = 0
        """How many writes put the version counters of the parameters back afterwards."""


ParameterSets = frozenset[ParameterSet]


class ReadGuard:
    """Context manager around a computation with parameters. Each guard is entered once."""

    __slots__ = ("_access", "_reset", "_scope", "is_overtaken", "parameter_sets", "started_at")

    def __init__(self, access: ParameterAccess, parameter_sets: ParameterSets) -> None:
        self._access = access
        self.parameter_sets = parameter_sets
        self.started_at = 0.0
        """When the computation last began or resumed, on time.monotonic's clock."""
        self.is_overtaken = False
        """Whether parameters were written during the computation, because it took too long."""

    def __enter__(self) -> ReadGuard:
        self._access._begin_read(self, is_outermost=_current_read.get() is None)
        scope = current_scope()
        self._scope: ScopeToken = enter(scope._replace(around_wait=partial(self._paused, scope.around_wait)))
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


class _ReservationRequest:
    """A request to reserve parameters that was not granted yet, with its place in the queue."""

    __slots__ = ("parameter_sets", "place_kept_until", "trainer")

    def __init__(self, parameter_sets: ParameterSets, trainer: str | None) -> None:
        self.parameter_sets = parameter_sets
        self.trainer = trainer
        self.place_kept_until: float | None = None
        """None while a thread waits for the reservation. After the thread gave up: how long the trainer may
        come back to its place."""


class _Write:
    """A write that waits for reads to end, or is under way."""

    __slots__ = ("is_under_way", "parameter_sets", "requested_at", "thread")

    def __init__(self, parameter_sets: ParameterSets) -> None:
        self.parameter_sets = parameter_sets
        self.requested_at = time.monotonic()
        self.is_under_way = False
        self.thread = threading.get_ident()
        """The write does not block reads of its own thread: a method may step the module it belongs to."""


class ParameterAccess:
    """Coordinates all reads and writes of the parameters of one worker.

    There is one mutex for all of them, and every read, write and reservation takes all the parameter sets
    that it needs at one moment, so none waits for a set while it holds another.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._reads: set[ReadGuard] = set()
        """Reads that compute now."""
        self._writes: list[_Write] = []
        """Writes that wait or are under way."""
        self._reservation_queue: list[_ReservationRequest] = []
        """Requests that were not granted yet, in the order in which they came."""
        self._reserved: set[ParameterSet] = set()
        """The parameter sets of all granted reservations."""
        self.waiting_reads = 0
        """How many reads wait for a write."""

    # -- reads

    def read(self, parameter_sets: Iterable[ParameterSet]) -> ReadGuard | None:
        """The guard to enter around a computation with parameters; None if there are no parameters."""
        wanted = frozenset(parameter_sets)
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
        # A write that has waited too long blocks every new outermost read until current reads end or are
        # overtaken. A nested read may begin, because the write waits for the read around it.
        too_long_ago = time.monotonic() - _LONGEST_READ_SECONDS
        own_thread = threading.get_ident()
        return any(
            write.is_under_way or yields or (is_outermost and write.requested_at < too_long_ago)
            for write in self._writes
            if write.thread != own_thread and not write.parameter_sets.isdisjoint(read.parameter_sets)
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
    def write(self, parameter_sets: ParameterSets) -> Iterator[None]:
        """Around a write of parameters that the caller has reserved: nothing reads them meanwhile."""
        write = _Write(parameter_sets)
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
                reads = [
                    read for read in self._reads if not read.parameter_sets.isdisjoint(write.parameter_sets)
                ]
                latest_start = max((read.started_at for read in reads), default=-float("inf"))
                left = latest_start + _LONGEST_READ_SECONDS - time.monotonic()
                if left <= 0:
                    break
                self._changed.wait(left)
            for read in reads:
                read.is_overtaken = True
            write.is_under_way = True

    # -- reservations

    def reserve(
        self, parameter_sets: ParameterSets, give_up_at: float, trainer: str | None = None
    ) -> ExitStack | None:
        """Reserves parameters until the result is closed; None if that was not granted in time.

        Requests are granted in the order in which they came. A request that names its trainer keeps its place
        for a while after it gave up, and the trainer's next request takes that place.
        """
        with self._changed:
            request = self._place_of(trainer, parameter_sets)
            if request is None:
                request = _ReservationRequest(parameter_sets, trainer)
                self._reservation_queue.append(request)
            request.place_kept_until = None
            if self._can_grant(request):
                return self._grant(request)
        # `waiting` gives up the slot that this thread computes in: the trainer that holds the reservation may
        # need that slot to commit.
        return waiting(partial(self._wait_for_reservation, request, give_up_at))

    def _place_of(self, trainer: str | None, parameter_sets: ParameterSets) -> _ReservationRequest | None:
        """The place that was kept for a trainer."""
        if trainer is None:
            return None
        return next(
            (
                queued
                for queued in self._reservation_queue
                if queued.trainer == trainer
                and queued.place_kept_until is not None
                and queued.parameter_sets == parameter_sets
            ),
            None,
        )

    def _wait_for_reservation(self, request: _ReservationRequest, give_up_at: float) -> ExitStack | None:
        with self._changed:
            try:
                while not self._can_grant(request):
                    now = time.monotonic()
                    if now >= give_up_at:
                        if request.trainer is not None:
                            request.place_kept_until = now + _KEEP_PLACE_SECONDS
                        return None
                    kept_places_end = (
                        queued.place_kept_until
                        for queued in self._reservation_queue
                        if queued.place_kept_until is not None
                    )
                    self._changed.wait(max(min([give_up_at, *kept_places_end]) - now, 0.0))
                return self._grant(request)
            finally:
                if request.place_kept_until is None and request in self._reservation_queue:
                    self._reservation_queue.remove(request)
                self._changed.notify_all()

    def _can_grant(self, request: _ReservationRequest) -> bool:
        now = time.monotonic()
        self._reservation_queue = [
            queued
            for queued in self._reservation_queue
            if queued.place_kept_until is None or queued.place_kept_until > now
        ]
        ahead = self._reservation_queue[: self._reservation_queue.index(request)]
        return self._reserved.isdisjoint(request.parameter_sets) and all(
            queued.parameter_sets.isdisjoint(request.parameter_sets) for queued in ahead
        )

    def _grant(self, request: _ReservationRequest) -> ExitStack:
        self._reservation_queue.remove(request)
        self._reserved |= request.parameter_sets
        stack = ExitStack()
        stack.callback(self._end_reservation, request.parameter_sets)
        return stack

    def _end_reservation(self, parameter_sets: ParameterSets) -> None:
        with self._changed:
            self._reserved -= parameter_sets
            self._changed.notify_all()
