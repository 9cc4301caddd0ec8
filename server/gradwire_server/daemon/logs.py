"""The daemon's log: readable lines on a terminal, JSON lines anywhere else, always on stderr.

A JSON line holds ``time`` (UTC), ``level``, ``logger``, ``message``, whatever the code passed as ``extra``,
and ``exception`` with the traceback where there is one. A line that other programs look for has an ``event``
too: "ready" once the worker serves, "draining" and "stopped" when it shuts down.

No thread ever waits for the reader of the log: lines that find no room in the queue are dropped, and a line
with the event "dropped" says how many (see `output`). The same goes for what code prints.

Code that logs uses `logging` alone and knows nothing of this module. Only the daemon calls `configure`; a
program that runs a `Worker` inside itself configures its own logging.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
from datetime import UTC, datetime
from types import TracebackType
from typing import TextIO, cast

from rich.console import Console
from rich.logging import RichHandler

from gradwire_server.daemon.output import BackgroundStream

__all__ = ["JsonFormatter", "configure", "finish"]

_log = logging.getLogger("gradwire.server")

_FINISH_SECONDS = 0.5
"""How long the process waits at its end for the reader of each of its outputs."""

_outputs: list[BackgroundStream] = []
"""Standard output, then standard error, which has the log."""

# The attributes that every record has. Any other attribute was passed as `extra`.
_STANDARD_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """One JSON object per record, on one line."""

    def format(self, record: logging.LogRecord) -> str:
        """The record as a JSON object without line breaks."""
        line: dict[str, object] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        for key, value in vars(record).items():
            if key not in _STANDARD_ATTRIBUTES:
                line.setdefault(key, value)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = record.stack_info
        # `repr` for extras that JSON has no form for, so that the line is logged all the same.
        return json.dumps(line, default=repr)


def configure(level: str = "info", format: str = "auto", stream: TextIO | None = None) -> None:
    """Sends all logging, warnings and uncaught exceptions of the process to `stream` (stderr).

    From then on writing to standard output and error never blocks.
    """
    if not _outputs:
        sys.stdout = _in_background(sys.stdout, "stdout")
        sys.stderr = _in_background(sys.stderr, "the log")
        atexit.register(finish)
    stream = sys.stderr if stream is None else stream
    if format == "auto":
        format = "text" if stream.isatty() else "json"

    handler: logging.Handler
    if format == "json":
        handler = logging.StreamHandler(stream)
        handler.setFormatter(JsonFormatter())
    elif stream.isatty():
        handler = RichHandler(
            console=Console(file=stream),
            show_path=False,
            omit_repeated_times=False,
            log_time_format="%H:%M:%S",
            rich_tracebacks=False,
        )
        handler.setFormatter(logging.Formatter("%(message)s"))
    else:
        # Not rich's handler: without a terminal it would fold lines at 80 columns.
        handler = logging.StreamHandler(stream)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))

    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.upper())
    # Makes a warning of the user's modules one line of the log, instead of two lines in another format.
    logging.captureWarnings(True)
    threading.excepthook = _log_thread_exception
    sys.excepthook = _log_exception
    sys.unraisablehook = _log_unraisable


def _in_background(stream: TextIO | None, name: str) -> TextIO:
    # None if the process was started with this stream closed.
    stream = open(os.devnull, "w") if stream is None else stream  # noqa: SIM115 - open until the process ends

    def report_dropped(lines: int) -> None:
        _log.warning(
            "%d lines of %s were dropped, because its reader was too slow",
            lines,
            name,
            extra={"event": "dropped", "lines": lines},
        )

    output = BackgroundStream(stream, report_dropped)
    _outputs.append(output)
    return cast(TextIO, output)


def finish() -> None:
    """Waits a moment until the last lines are written, then drops them."""
    for output in _outputs:
        output.finish(_FINISH_SECONDS)


def _log_thread_exception(args: threading.ExceptHookArgs) -> None:
    if args.exc_type is SystemExit:
        return
    name = args.thread.name if args.thread is not None else "unknown"
    value = args.exc_value if args.exc_value is not None else args.exc_type()
    _log.error(
        "uncaught %s in thread %s",
        args.exc_type.__name__,
        name,
        exc_info=(args.exc_type, value, args.exc_traceback),
        extra={"thread_name": name},
    )


def _log_exception(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
    _log.critical("uncaught %s", kind.__name__, exc_info=(kind, value, traceback))


def _log_unraisable(args: sys.UnraisableHookArgs) -> None:
    value = args.exc_value if args.exc_value is not None else args.exc_type()
    _log.error(
        "%s: %r",
        args.err_msg or "exception ignored in",
        args.object,
        exc_info=(args.exc_type, value, args.exc_traceback),
    )
