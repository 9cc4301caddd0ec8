"""The threads that handle what arrives over gRPC streams, and over sockets that no caller reads.

`native/event_loop.cpp` has the loop. Each thread here waits for it (`native.next_work`), and handles what it
finds on that very thread, until it finds more.
"""

from __future__ import annotations

import logging
import os
import threading

from gradwire.transport import native

__all__ = ["serves", "start"]

log = logging.getLogger("gradwire.link")


class _Threads:
    """The threads of the event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def start(self) -> None:
        """Starts a thread, unless one waits already. Threads start others when they are needed."""
        with self._lock:
            if native.needs_thread():
                self._start_one()

    def _start_one(self) -> None:
        """Starts a thread. The lock is held."""
        self._count += 1
        try:
            threading.Thread(target=self._run, name="gradwire-event-loop", daemon=True).start()
        except RuntimeError as error:
            self._count -= 1
            log.warning("cannot start a thread: %s", error)  # the next request, or socket, tries again

    def _run(self) -> None:
        while True:
            session, needs_thread = native.next_work()
            if session is None:
                with self._lock:
                    if self._count > 1 or not native.is_used():
                        self._count -= 1
                        return
                continue
            if needs_thread:
                with self._lock:
                    self._start_one()
            _this_thread.session = session
            try:
                session.handle_events(most_requests=1)
            except Exception:
                log.exception("the events of %s could not be handled", session.peer)
            finally:
                _this_thread.session = None
                del session  # the thread must not keep it alive


_threads = _Threads()
_this_thread = threading.local()
"""`session`: whose request the thread handles for the event loop."""


def _after_fork() -> None:
    global _threads, _this_thread
    native.after_fork()
    _threads, _this_thread = _Threads(), threading.local()


os.register_at_fork(after_in_child=_after_fork)


def start() -> None:
    """To be called when a session has got a connection: starts a thread, unless one waits already."""
    _threads.start()


def serves(session: object) -> bool:
    """Whether the calling thread handles a request of this session for the event loop."""
    return getattr(_this_thread, "session", None) is session
