"""Holding Ctrl-C back while something goes on that must not stop halfway."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType

__all__ = ["Uninterrupted"]


class Uninterrupted:
    """A block that no key stops: an interrupt that comes meanwhile takes effect at its end.

    Only the main thread is ever interrupted; on others this does nothing.
    """

    _handler: object = None
    """What handles interrupts otherwise."""
    _has_come = False

    def __enter__(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        handler = signal.getsignal(signal.SIGINT)
        if callable(handler):  # else it raises nothing: it is ignored, say
            signal.signal(signal.SIGINT, self._note)
            self._handler = handler

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if callable(self._handler):
            signal.signal(signal.SIGINT, self._handler)
            if self._has_come:
                signal.raise_signal(signal.SIGINT)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._has_come = True
