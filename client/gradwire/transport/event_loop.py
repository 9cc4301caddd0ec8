"""One thread that reads all local connections of a worker, and answers what it reads."""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from gradwire.errors import GradwireError, InternalError
from gradwire.transport import local_reader
from gradwire.transport.leader_followers import InlinePolicy, LeaderFollowers
from gradwire.transport.spinning import Spinning

__all__ = ["EventLoop"]

log = logging.getLogger("gradwire.link")

_STAY_SECONDS = 0.001
"""For so long one is attended to that has more to say, before it is the others' turn: answers to what came
together leave together, and whoever waits for them is woken once."""


class Source(local_reader.Source, Protocol):
    def flush(self) -> None:
        """Writes what waits."""

    def flush_elsewhere(self) -> None:
        """Has another thread do so."""


class _Connection:
    """A connection that is attended to."""

    def __init__(self, source: Source, receive: Callable[[bytes], None]) -> None:
        self.source = source
        self.descriptor = source.fileno()
        self.receive = receive
        self.pace = InlinePolicy()
        self.is_due = False
        """Whether there is something to read."""
        self.has_answers = False
        """That wait to be written."""
        self.gone = threading.Event()
        self.error: GradwireError | None = None


class EventLoop(LeaderFollowers):
    """Attends to connections in turn."""

    def __init__(self) -> None:
        super().__init__()
        self._guests: dict[int, _Connection] = {}
        self._due: deque[_Connection] = deque()
        """In the order in which they are attended to. For the one who reads."""
        self._looked_at = 0.0
        self._current: _Connection | None = None
        self._stays_until = 0.0
        self._arrivals = select.epoll()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._arrivals.register(self._wake, select.EPOLLIN)
        self._spin = Spinning(self._arrivals)
        self._threads = 0
        threading.Thread(target=self._take_turns, name="gradwire-event_loop", daemon=True).start()

    def attend(self, source: Source, receive: Callable[[bytes], None]) -> None:
        """Returns when the connection has ended. Raises if what came broke the protocol."""
        guest = _Connection(source, receive)
        with self._lock:
            if self._ended or guest.descriptor < 0:
                return
            self._arrivals.register(guest.descriptor, select.EPOLLIN)
            self._guests[guest.descriptor] = guest
        guest.gone.wait()  # whichever end closes shuts the socket down, which is noticed
        error = guest.error
        del guest, source, receive  # else the traceback of the error would keep them
        if error is not None:
            raise error

    def close(self, timeout: float = 0.0) -> None:
        """Attends to nobody any more. Waits for its threads, save one that is occupied for longer."""
        with self._lock:
            if self._ended:
                return
            self._ended = True
            os.eventfd_write(self._wake, 1)
            self._changed.notify_all()
            for guest in list(self._guests.values()):
                self._let_go(guest)
            self._changed.wait_for(lambda: not self._threads, timeout)

    def _take_turns(self, *, is_ready: bool = False) -> None:
        with self._lock:
            self._threads += 1
        try:
            super()._take_turns(is_ready=is_ready)
        finally:
            with self._lock:
                self._threads -= 1
                if not self._threads and self._wake >= 0:
                    # Nobody reads any more, or will.
                    self._arrivals.close()
                    os.close(self._wake)
                    self._wake = -1
                    self._changed.notify_all()

    def _read_on(self, me: object) -> None:
        while not self._ended and self._attend_to_next(me):
            pass

    def _attend_to_next(self, me: object) -> bool:
        """Reads a frame and answers it. Whether it is still one's turn."""
        if not self._due or time.monotonic() - self._looked_at > _STAY_SECONDS:
            self._look_for_arrivals()
        if not self._due:
            return True
        guest = self._next_guest()
        try:
            frame = next(guest.source)
            if frame is None:
                return True
            if guest.source.has_more:
                self._is_due(guest, is_next=True)
            guest.receive(frame)
            if guest.has_answers and not self._may_wait(guest):
                self._write_answers(guest)
        except StopIteration:
            self._dismiss(guest, None)
        except GradwireError as error:
            self._dismiss(guest, error)
        except BaseException as error:  # whatever it is, the others must go on being attended to
            log.exception("a connection could not be attended to")
            self._dismiss(guest, InternalError(f"the connection could not be attended to: {error!r}"))
        with self._lock:
            is_still_mine = self._is_dealt_with(me)
        if not is_still_mine and guest.has_answers:
            self._write_answers(guest)  # whoever stands in does not know of them
        return is_still_mine

    def _next_guest(self) -> _Connection:
        """The one who was attended to last, if it has more to say and its time is not up; else the next."""
        now, last = time.monotonic(), self._current
        # Answers that wait were left to its next turn.
        if now >= self._stays_until and self._due[0] is last and not last.has_answers:
            self._due.rotate(-1)
        guest = self._due.popleft()
        guest.is_due = False
        if guest is not last or now >= self._stays_until:
            self._current, self._pace = guest, guest.pace
            self._stays_until = now + _STAY_SECONDS
        return guest

    def _may_wait(self, guest: _Connection) -> bool:
        """Whether answers may wait for others to the same guest, who is the next then."""
        return guest.is_due and time.monotonic() < self._stays_until

    def _look_for_arrivals(self) -> None:
        if not self._due:
            self._current = None  # it may be gone, and is not to be kept
            self._spin()
        for descriptor, _ in self._arrivals.poll(0 if self._due else None):
            guest = self._guests.get(descriptor)
            if guest is not None:
                self._is_due(guest)
        self._looked_at = time.monotonic()

    def _is_due(self, guest: _Connection, *, is_next: bool = False) -> None:
        if not guest.is_due:
            guest.is_due = True
            if is_next:
                self._due.appendleft(guest)
            else:
                self._due.append(guest)

    def _dismiss(self, guest: _Connection, error: GradwireError | None) -> None:
        with self._lock:
            guest.error = guest.error or error
            self._let_go(guest)

    def _let_go(self, guest: _Connection) -> None:
        """With the lock held."""
        if self._guests.pop(guest.descriptor, None) is not None:
            try:
                self._arrivals.unregister(guest.descriptor)
            except (OSError, ValueError):
                pass  # it was closed already
        guest.gone.set()

    # -- answering

    def will_write(self, source: Source) -> bool:
        """Whether an answer that was put into an outbox is written soon: with others, if they come."""
        guest = self._current
        if guest is None or guest.source is not source or self._reader != threading.get_ident():
            return False
        guest.has_answers = True
        return True

    def _write_answers(self, guest: _Connection) -> None:
        guest.has_answers = False
        guest.source.flush()

    def _is_missed(self) -> bool:
        has_answers = self._current is not None and self._current.has_answers
        return has_answers or bool(self._due) or bool(self._arrivals.poll(0))

    def _is_needed_elsewhere(self) -> bool:
        return len(self._guests) > 1

    def _relieve(self) -> None:
        super()._relieve()
        guest, self._current = self._current, None
        if guest is not None and guest.has_answers:
            # Answers to what came before must not wait for what takes long.
            guest.has_answers = False
            guest.source.flush_elsewhere()
