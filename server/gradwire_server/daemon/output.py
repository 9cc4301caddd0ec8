"""Standard output and error of the daemon, written in the background.

A pipe that nobody reads is full after 64 KiB, and a thread that writes to it then blocks. If that thread is
logging, it holds the locks of `logging`, so soon all threads block, the handling of signals included. Here
text goes to a queue of limited size, and only the thread that empties the queue blocks. Lines that find no
room in the queue are dropped and counted, and the log reports their number as soon as there is room. Output
of native code does not pass through the queue.
"""

from __future__ import annotations

import io
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any, TextIO

__all__ = ["BackgroundStream"]

_MOST_CHARACTERS = 8 << 20
"""How many characters may wait to be written."""
_MORE_FOR_REPORTS = 64 << 10
"""How many characters may wait beyond that, if they report how many lines were dropped."""
_LONGEST_UNFINISHED_LINE = 64 << 10
"""An unfinished line that is longer than this is queued without its end."""


class BackgroundStream(io.TextIOBase):
    """A text stream that a background thread writes to another stream. Writing to it never blocks.

    Whole lines are queued at once, an unfinished line when it is flushed. Other attributes, such as whether
    the stream is a terminal, are those of the other stream.
    """

    def __init__(self, stream: TextIO, report_dropped: Callable[[int], None]) -> None:
        """`report_dropped` is called with a number of lines, and may write to this stream."""
        self._stream = stream
        self._report_dropped = report_dropped
        self._reset(is_direct=False)
        # A forked child, of a data loader say, has no writer thread. It serves no requests, so it may block.
        os.register_at_fork(after_in_child=lambda: self._reset(is_direct=True))

    def _reset(self, *, is_direct: bool) -> None:
        self._is_direct = is_direct
        # Reentrant, because a destructor or a signal handler may write while its thread holds the lock.
        self._changed = threading.Condition(threading.RLock())
        self._queue: deque[str] = deque()
        self._characters = 0
        self._unfinished = ""
        self._is_writing = False
        self._dropped = 0
        self._reporting: set[int] = set()
        """The threads that report dropped lines now."""
        self._writer: threading.Thread | None = None
        self._is_finishing = False

    def write(self, text: str) -> int:
        if self._is_direct:
            return self._stream.write(text)
        with self._changed:
            lines, newline, self._unfinished = (self._unfinished + text).rpartition("\n")
            if len(self._unfinished) > _LONGEST_UNFINISHED_LINE:
                lines, newline, self._unfinished = lines + newline + self._unfinished, "", ""
            dropped = self._enqueue(lines + newline)
        self._report(dropped)
        return len(text)

    def flush(self) -> None:
        """Queues an unfinished line, too. Does not wait until it is written."""
        if self._is_direct:
            self._stream.flush()
            return
        with self._changed:
            text, self._unfinished = self._unfinished, ""
            dropped = self._enqueue(text)
        self._report(dropped)

    def finish(self, seconds: float) -> None:
        """Waits until the queue is written, for that time at most. To be called at the end of the process."""
        self.flush()
        give_up_at = time.monotonic() + seconds
        with self._changed:
            while self._queue or self._is_writing:
                if not self._changed.wait(give_up_at - time.monotonic()) and time.monotonic() >= give_up_at:
                    self._dropped += sum(map(_lines_in, self._queue))
                    self._queue.clear()
                    self._characters = 0
                    break
            dropped, self._dropped = self._dropped, 0
        self._report(dropped)
        with self._changed:
            self._is_finishing = True
            self._changed.notify_all()

    def _enqueue(self, text: str) -> int:
        """Queues text, or drops it. Returns how many dropped lines the caller should report now."""
        if not text:
            return 0
        is_report = threading.get_ident() in self._reporting
        most = _MOST_CHARACTERS + (_MORE_FOR_REPORTS if is_report else 0)
        if self._queue and self._characters + len(text) > most:
            self._dropped += _lines_in(text)
            return 0
        self._queue.append(text)
        self._characters += len(text)
        self._is_finishing = False
        if self._writer is None:
            self._writer = threading.Thread(target=self._write_all, name="gradwire-output", daemon=True)
            self._writer.start()
        self._changed.notify_all()
        if is_report:
            return 0  # lines that were dropped meanwhile are reported with the next line, not within this one
        dropped, self._dropped = self._dropped, 0
        return dropped

    def _report(self, dropped: int) -> None:
        # Called without the lock, because reporting takes the locks of `logging`, which other threads hold
        # when they write here.
        if dropped:
            self._reporting.add(threading.get_ident())
            try:
                self._report_dropped(dropped)
            finally:
                self._reporting.discard(threading.get_ident())

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._is_writing = False
                self._changed.notify_all()
                while not self._queue:
                    if self._is_finishing:
                        self._writer = None
                        return
                    self._changed.wait()
                text = self._queue.popleft()
                self._characters -= len(text)
                self._is_writing = True
            was_written = _write(self._stream, text)
            with self._changed:
                dropped = 0
                if not was_written:
                    self._dropped += _lines_in(text)
                elif not self._queue:
                    dropped, self._dropped = self._dropped, 0
            self._report(dropped)

    # -- the rest of a text stream

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self._stream.errors

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def _lines_in(text: str) -> int:
    return max(text.count("\n"), 1)


def _write(stream: TextIO, text: str) -> bool:
    """Writes all of a text. Returns whether that was possible."""
    try:
        # Past the stream's own buffer, whose last bytes Python would wait for when the process ends.
        descriptor = stream.fileno()
        left = memoryview(text.encode(stream.encoding or "utf-8", "backslashreplace"))
        while left:
            left = left[os.write(descriptor, left) :]
    except io.UnsupportedOperation:  # a stream in memory, of a test
        stream.write(text)
    except (OSError, ValueError):
        return False  # the reader is gone
    return True
