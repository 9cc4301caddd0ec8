"""Standard output and error of the daemon, written in the background.

A pipe that nobody reads is full after 64 KiB, and whoever writes to it then waits: the function that logs,
and with it the locks of `logging`, so soon everybody, the handling of signals included. Here what is written
goes to a queue of limited size, and a thread of its own does the waiting. Lines that find no room are
dropped, counted, and told of in the log as soon as there is room. What native code writes does not come this
way.
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
"""What may wait to be written."""
_MORE_FOR_NOTICES = 64 << 10
"""What may wait beyond that, if it says how much was dropped."""
_LONGEST_REST = 64 << 10
"""An unfinished line of this length counts as one."""


class BackgroundStream(io.TextIOBase):
    """Text that a thread of its own writes to a stream. Writing never waits.

    Whole lines are queued; an unfinished one is when it is flushed. What else there is to know of the stream,
    such as whether it is a terminal, is as it was.
    """

    def __init__(self, stream: TextIO, tell_dropped: Callable[[int], None]) -> None:
        """`tell_dropped` is called with a number of lines, and may write to this stream."""
        self._stream = stream
        self._tell_dropped = tell_dropped
        self._reset(is_direct=False)
        # Threads do not come along into a child, of a data loader say. It serves nobody, and may wait.
        os.register_at_fork(after_in_child=lambda: self._reset(is_direct=True))

    def _reset(self, *, is_direct: bool) -> None:
        self._is_direct = is_direct
        # It can be entered again: a destructor, or the handler of a signal, may write at any moment.
        self._changed = threading.Condition(threading.RLock())
        self._queue: deque[str] = deque()
        self._characters = 0
        self._rest = ""
        self._is_writing = False
        self._dropped = 0
        self._telling: set[int] = set()
        """The thread that tells what was dropped."""
        self._writer: threading.Thread | None = None
        self._is_finishing = False

    def write(self, text: str) -> int:
        if self._is_direct:
            return self._stream.write(text)
        with self._changed:
            lines, newline, self._rest = (self._rest + text).rpartition("\n")
            if len(self._rest) > _LONGEST_REST:
                lines, newline, self._rest = lines + newline + self._rest, "", ""
            missing = self._put(lines + newline)
        self._tell(missing)
        return len(text)

    def flush(self) -> None:
        """Lets an unfinished line be written, too. Does not wait until it is."""
        if self._is_direct:
            self._stream.flush()
            return
        with self._changed:
            text, self._rest = self._rest, ""
            missing = self._put(text)
        self._tell(missing)

    def finish(self, seconds: float) -> None:
        """Waits until all has been written, but no longer than that: at the end of the process."""
        self.flush()
        give_up_at = time.monotonic() + seconds
        with self._changed:
            while self._queue or self._is_writing:
                if not self._changed.wait(give_up_at - time.monotonic()) and time.monotonic() >= give_up_at:
                    self._dropped += sum(map(_lines_in, self._queue))
                    self._queue.clear()
                    self._characters = 0
                    break
            missing, self._dropped = self._dropped, 0
        self._tell(missing)
        with self._changed:
            self._is_finishing = True
            self._changed.notify_all()

    def _put(self, text: str) -> int:
        """Queues text, or drops it. How many lines were dropped before it, if that can be told now."""
        if not text:
            return 0
        is_notice = threading.get_ident() in self._telling
        most = _MOST_CHARACTERS + (_MORE_FOR_NOTICES if is_notice else 0)
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
        if is_notice:
            return 0  # what was dropped meanwhile is told with the next line, not from within this one
        missing, self._dropped = self._dropped, 0
        return missing

    def _tell(self, missing: int) -> None:
        # Without the lock: the log has locks of its own, and others hold those when they come here.
        if missing:
            self._telling.add(threading.get_ident())
            try:
                self._tell_dropped(missing)
            finally:
                self._telling.discard(threading.get_ident())

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
                missing = 0
                if not was_written:
                    self._dropped += _lines_in(text)
                elif not self._queue:
                    missing, self._dropped = self._dropped, 0
            self._tell(missing)

    # -- what else a stream is asked

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
    """Writes all of a text; whether that could be done."""
    try:
        # Not by way of the stream, which has a buffer: Python would wait for its last bytes when it ends.
        descriptor = stream.fileno()
        left = memoryview(text.encode(stream.encoding or "utf-8", "backslashreplace"))
        while left:
            left = left[os.write(descriptor, left) :]
    except io.UnsupportedOperation:  # no file, but memory, of a test
        stream.write(text)
    except (OSError, ValueError):
        return False  # nobody can read it any more
    return True
