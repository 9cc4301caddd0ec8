"""Who computes with parameters and who changes them: no computation sees half a step.

Calls and backwards *read* parameters, any number at once. Optimizer steps and loaded states *change* them,
one at a time: a change waits until nobody computes with the parameters, and a call or backward that begins
then waits for the change. A call that waits for another process computes nothing, so a change does not wait
for it: so nested calls, and backwards that are held open for gradients, cannot deadlock with a step.

Before that, trainers that want to step the same parameters take *turns*, in the order in which they came. A
turn may last from a trainer's prepare to its commit. Calls and backwards go on meanwhile; they wait for the
change itself only.
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

__all__ = ["Access", "ParameterLock", "Reading"]

_LONGEST_READING_SECONDS = 10.0
"""A change waits for calls and backwards that have computed for less than this without a pause. One that
takes longer, or never ends, is overtaken, and its backward is refused: else one function that hangs would
keep all trainers from stepping."""
_GIVE_WAY_SECONDS = 1.0
"""A call or backward that begins lets a change go first, but goes ahead after so long: the change may wait
for another call that waits for this very one, in a way that cannot be seen from here (in the user's code)."""
_KEPT_PLACE_SECONDS = 1.0
"""How long a trainer that could not wait any longer keeps its place among those who want to step."""


class ParameterLock:
    """Stands for parameters that are changed together."""

    __slots__ = ("__weakref__", "unversioned_changes")

    def __init__(self) -> None:
        self.unversioned_changes = 0
        """How often they were changed and their version counters put back afterwards."""


Locks = frozenset[ParameterLock]


class Reading:
    """A block that computes with parameters. It is for one use."""

    __slots__ = ("_access", "_reset", "_scope", "is_overtaken", "locks", "since")

    def __init__(self, access: Access, locks: Locks) -> None:
        self._access = access
        self.locks = locks
        self.since = 0.0
        """When it last began to compute, on time.monotonic's clock."""
        self.is_overtaken = False
        """Whether parameters were changed under its hands, because it took too long."""

    def __enter__(self) -> Reading:
        self._access._begin(self, is_outermost=_current.get() is None)
        scope = current_scope()
        self._scope: ScopeToken = enter(replace(scope, around_wait=partial(self._paused, scope.around_wait)))
        self._reset = _current.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _current.reset(self._reset)
        leave(self._scope)
        self._access._end(self)

    @contextmanager
    def _paused(self, around_wait: Callable[[], AbstractContextManager[None]] | None) -> Iterator[None]:
        """Around a wait for another process: nothing is computed meanwhile."""
        self._access._end(self)
        with nullcontext() if around_wait is None else around_wait():
            try:
                yield
            finally:
                # This is a wait already, so it is not made one. A reading within this one is there again.
                is_outermost = _current.get() is self
                self._access._begin(self, is_outermost=is_outermost, wait=lambda begin: begin())


_current: ContextVar[Reading | None] = ContextVar("gradwire_reading", default=None)


class _Turn:
    """One who wants to step, in its place among the others."""

    __slots__ = ("locks", "until", "who")

    def __init__(self, locks: Locks, who: str | None) -> None:
        self.locks = locks
        self.who = who
        self.until: float | None = None
        """Set while it is away: until when it may come back. None: it waits here."""


class _Change:
    """One who waits to change parameters, or changes them."""

    __slots__ = ("is_under_way", "locks", "since", "thread")

    def __init__(self, locks: Locks) -> None:
        self.locks = locks
        self.since = time.monotonic()
        self.is_under_way = False
        self.thread = threading.get_ident()
        """Whose readings it does not keep out: a method may step the module that it belongs to."""


class Access:
    """Keeps those apart who read and who change the parameters of one worker.

    One lock for all, and everybody takes at one moment all that it needs: so nobody waits for a part while
    holding another.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._readings: set[Reading] = set()
        self._changes: list[_Change] = []
        self._turns: list[_Turn] = []
        """Those who wait for their turn, in the order in which they came."""
        self._taken: set[ParameterLock] = set()
        """What those have who have their turn."""
        self.waiting_readings = 0
        """How many wait for a change."""

    # -- reading

    def reading(self, locks: Iterable[ParameterLock]) -> Reading | None:
        """To be entered around what computes with parameters; None if there are none."""
        wanted = frozenset(locks)
        return Reading(self, wanted) if wanted else None

    def _begin(
        self, reading: Reading, *, is_outermost: bool, wait: Callable[[Callable[[], None]], None] = waiting
    ) -> None:
        with self._changed:
            # There is no change most of the time.
            if not self._changes or not self._is_kept_out(reading, is_outermost, gives_way=is_outermost):
                self._add(reading)
                return
        # The change may need the slot that this thread computes in.
        wait(partial(self._wait_to_read, reading, is_outermost))

    def _wait_to_read(self, reading: Reading, is_outermost: bool) -> None:
        goes_ahead_at = time.monotonic() + _GIVE_WAY_SECONDS
        with self._changed:
            self.waiting_readings += 1
            try:
                while self._is_kept_out(
                    reading, is_outermost, gives_way=is_outermost and time.monotonic() < goes_ahead_at
                ):
                    left = goes_ahead_at - time.monotonic()
                    self._changed.wait(left if left > 0 else _GIVE_WAY_SECONDS)
                self._add(reading)
            finally:
                self.waiting_readings -= 1

    def _is_kept_out(self, reading: Reading, is_outermost: bool, *, gives_way: bool) -> bool:
        # A change that has waited for too long has all who begin give way, however long that takes. Those who
        # compute then end, or are overtaken. One within another goes ahead: the change waits for the other.
        too_long_ago = time.monotonic() - _LONGEST_READING_SECONDS
        me = threading.get_ident()
        return any(
            change.is_under_way or gives_way or (is_outermost and change.since < too_long_ago)
            for change in self._changes
            if change.thread != me and not change.locks.isdisjoint(reading.locks)
        )

    def _add(self, reading: Reading) -> None:
        reading.since = time.monotonic()
        self._readings.add(reading)

    def _end(self, reading: Reading) -> None:
        with self._changed:
            self._readings.discard(reading)
            if self._changes:
                self._changed.notify_all()

    # -- changing

    @contextmanager
    def changing(self, locks: Locks) -> Iterator[None]:
        """For who has the turn: nobody computes with the parameters meanwhile."""
        change = _Change(locks)
        with self._changed:
            self._changes.append(change)
        try:
            waiting(partial(self._wait_to_change, change))
            yield
        finally:
            with self._changed:
                self._changes.remove(change)
                self._changed.notify_all()

    def _wait_to_change(self, change: _Change) -> None:
        with self._changed:
            while True:
                readings = [one for one in self._readings if not one.locks.isdisjoint(change.locks)]
                now = time.monotonic()
                left = max((one.since - now for one in readings), default=-_LONGEST_READING_SECONDS)
                if left + _LONGEST_READING_SECONDS <= 0:
                    break
                self._changed.wait(left + _LONGEST_READING_SECONDS)
            for reading in readings:
                reading.is_overtaken = True
            change.is_under_way = True

    # -- turns

    def turn(self, locks: Locks, give_up_at: float, who: str | None = None) -> ExitStack | None:
        """Takes the turn to change parameters, to be closed when it is over; None if it did not come in time.

        The one who came first has it first. Who has a name keeps its place for a while when it gives up, and
        comes back to it.
        """
        turn: _Turn | None = None
        with self._changed:
            turn = next(
                (one for one in self._turns if who and one.who == who and one.until and one.locks == locks),
                None,
            )
            if turn is None:
                turn = _Turn(locks, who)
                self._turns.append(turn)
            turn.until = None
            if self._is_first(turn):
                return self._take(turn)
        # Who has the turn may need the slot that this thread computes in to go on, and to end it.
        return waiting(partial(self._wait_for_turn, turn, give_up_at))

    def _wait_for_turn(self, turn: _Turn, give_up_at: float) -> ExitStack | None:
        with self._changed:
            try:
                while not self._is_first(turn):
                    now = time.monotonic()
                    if now >= give_up_at:
                        if turn.who is not None:
                            turn.until = now + _KEPT_PLACE_SECONDS
                        return None
                    absences_end = (one.until for one in self._turns if one.until is not None)
                    self._changed.wait(max(min([give_up_at, *absences_end]) - now, 0.0))
                return self._take(turn)
            finally:
                if turn.until is None and turn in self._turns:
                    self._turns.remove(turn)
                self._changed.notify_all()

    def _is_first(self, turn: _Turn) -> bool:
        now = time.monotonic()
        self._turns = [one for one in self._turns if one.until is None or one.until > now]
        before = self._turns[: self._turns.index(turn)]
        return self._taken.isdisjoint(turn.locks) and all(one.locks.isdisjoint(turn.locks) for one in before)

    def _take(self, turn: _Turn) -> ExitStack:
        self._turns.remove(turn)
        self._taken |= turn.locks
        stack = ExitStack()
        stack.callback(self._give_back, turn.locks)
        return stack

    def _give_back(self, locks: Locks) -> None:
        with self._changed:
            self._taken -= locks
            self._changed.notify_all()
