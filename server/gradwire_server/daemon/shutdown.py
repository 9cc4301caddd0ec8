"""How the daemon ends: signals tell it to, and nothing keeps its process alive past the grace period."""

from __future__ import annotations

import logging
import os
import signal
import threading
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from gradwire_server.daemon import logs

if TYPE_CHECKING:
    from gradwire_server.worker import Worker

__all__ = ["Signals", "exit_after"]

_log = logging.getLogger("gradwire.server")

_SIGNALS = (signal.SIGTERM, signal.SIGINT)

_FLUSH_SECONDS = 1.0
"""How long handlers of the log, which user code may have added, have to write the records they buffer."""


class Signals:
    """SIGTERM and SIGINT: the first tells the daemon to drain, the second ends the process.

    A thread of its own reads the numbers of the signals that arrive. Python runs signal handlers in the main
    thread only, and there the handler of a signal that arrives just before the thread blocks would not run
    until the next signal.
    """

    def __init__(self) -> None:
        self._first: signal.Signals | None = None
        self._first_arrived = threading.Event()
        self._is_loading = True
        self._reading_end, self._writing_end = os.pipe()
        os.set_blocking(self._writing_end, False)
        self._install()
        # A forked child, of a data loader say, must not write its signals to the pipe of its parent.
        os.register_at_fork(after_in_child=_restore_default_handlers)
        threading.Thread(target=self._read, name="gradwire-signals", daemon=True).start()

    def _install(self) -> None:
        signal.set_wakeup_fd(self._writing_end, warn_on_full_buffer=False)
        for number in _SIGNALS:
            signal.signal(number, _do_nothing)

    def _read(self) -> None:
        while True:
            for number in os.read(self._reading_end, 64):
                # Python writes every signal that has a handler to the pipe, also signals of the user's
                # modules.
                if number in _SIGNALS:
                    self._handle(signal.Signals(number))

    def _handle(self, number: signal.Signals) -> None:
        if self._is_loading:
            # Nothing is served yet, so there are no calls to wait for, and the import that runs may take
            # long.
            _exit_now(0)
        if self._first is not None:
            _exit_now(128 + number)
        self._first = number
        self._first_arrived.set()

    def loaded(self) -> None:
        """From now on the first signal drains. Handlers that the user's modules installed are replaced."""
        self._install()
        self._is_loading = False

    def wait(self) -> signal.Signals:
        """Blocks until the first signal."""
        self._first_arrived.wait()
        assert self._first is not None
        return self._first


def _do_nothing(number: int, frame: FrameType | None) -> None:
    """The handler in the main thread. Without a handler the signal would end the process."""


def _restore_default_handlers() -> None:
    signal.set_wakeup_fd(-1)
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def exit_after(seconds: float, worker: Worker) -> None:
    """Ends the process after that time, even if a call outlives the grace period and Python waits for its
    thread."""

    def exit_when_saved() -> None:
        # Saving may take as long as it needs. A second signal ends the process earlier.
        worker.wait_until_saved()
        _log.warning("a thread did not end; exiting without it", extra={"event": "abandoned"})
        _exit_now(0)

    timer = threading.Timer(seconds, exit_when_saved)
    timer.daemon = True
    timer.name = "gradwire-exit"
    timer.start()


def _exit_now(code: int) -> NoReturn:
    # `os._exit`, because the shutdown of Python and of gRPC could wait for the very call that is to be ended.
    # So could a log handler of the user's, which may need a lock that the call holds: it runs on another
    # thread.
    flushing = threading.Thread(target=logging.shutdown, name="gradwire-log-flush", daemon=True)
    flushing.start()
    flushing.join(_FLUSH_SECONDS)
    logs.finish()
    os._exit(code)
