"""Delays Ctrl-C during work that must not stop halfway."""

from __future__ import annotations

# `_signal` is what `signal` wraps. The wrapper takes thirty times as long, too
# long for each received message.
import _signal  # type: ignore[import-not-found]
import signal
import threading
from types import FrameType, TracebackType

__all__ = ["Uninterrupted"]


_SIGINT = int(signal.SIGINT)


class Uninterrupted:
    """A block that Ctrl-C does not interrupt: an interrupt that arrives meanwhile takes effect at its end.

    Python interrupts the main thread only; on other threads this does nothing.
    """

    _handler: object = None
    """The handler that was installed before."""
    _has_come = False

    def __enter__(self) -> None:
        if threading.get_ident() != threading.main_thread().ident:
            return
        handler = _signal.getsignal(_SIGINT)
        if callable(handler):  # otherwise an interrupt raises nothing, for example because it is ignored
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
