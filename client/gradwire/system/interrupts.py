"""Holding Ctrl-C back while something goes on that must not stop halfway."""

from __future__ import annotations

# What `signal` wraps, which takes thirty times as long: too long for each message that is read.
import _signal  # type: ignore[import-not-found]
import signal
import threading
from types import FrameType, TracebackType

__all__ = ["Uninterrupted"]


_SIGINT = int(signal.SIGINT)


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
        handler = _signal.getsignal(_SIGINT)
        if callable(handler):  # else it raises nothing: it is ignored, say
            _signal.signal(_SIGINT, self._note)
            self._handler = handler

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if callable(self._handler):
            _signal.signal(_SIGINT, self._handler)
            if self._has_come:
                signal.raise_signal(signal.SIGINT)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._has_come = True
