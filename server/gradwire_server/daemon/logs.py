"""The daemon's log: readable lines on a terminal, JSON lines anywhere else, always on stderr.

A JSON line holds ``time`` (UTC), ``level``, ``logger``, ``message``, whatever the code passed as ``extra``,
and ``exception`` with the traceback where there is one. A line that other programs look for has an ``event``
too: "ready" once the worker serves, "draining" and "stopped" on its way out.

Nobody ever waits for whoever reads the log: what finds no room is dropped, and a line with the event
"dropped" says how much it was (`output`). The same goes for what code prints.

Code that logs uses `logging` alone and knows nothing of this module; only the daemon calls `configure`,
never a program that runs a `Worker` inside itself.
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
"""How long the end of the process waits for whoever reads each of its outputs."""

_outputs: list[BackgroundStream] = []
"""What code prints to, and then the log."""

# What every record has; anything else on a record was passed as `extra`.
_STANDARD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


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
            if key not in _STANDARD:
                line.setdefault(key, value)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = record.stack_info
        # An extra that JSON does not know must never cost the line.
        return json.dumps(line, default=repr)


def configure(level: str = "info", format: str = "auto", stream: TextIO | None = None) -> None:
    """Sends all logging, warnings and uncaught exceptions of the process to `stream` (stderr).

    Standard output and error no longer make anybody wait from then on.
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
    # A warning of the user's modules is a line of the log, not two lines of its own form.
    logging.captureWarnings(True)
    threading.excepthook = _thread_raised
    sys.excepthook = _raised
    sys.unraisablehook = _unraisable


def _in_background(stream: TextIO | None, name: str) -> TextIO:
    # Python has none where the process was started with it closed.
    stream = open(os.devnull, "w") if stream is None else stream  # noqa: SIM115 - for as long as the process

    def tell_dropped(lines: int) -> None:
        _log.warning(
            "%d lines of %s were dropped: they were not read in time",
            lines,
            name,
            extra={"event": "dropped", "lines": lines},
        )

    output = BackgroundStream(stream, tell_dropped)
    _outputs.append(output)
    return cast(TextIO, output)


def finish() -> None:
    """Waits a moment for what was printed and logged last to be written, then gives it up."""
    for output in _outputs:
        output.finish(_FINISH_SECONDS)


def _thread_raised(args: threading.ExceptHookArgs) -> None:
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


def _raised(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
    _log.critical("uncaught %s", kind.__name__, exc_info=(kind, value, traceback))


def _unraisable(args: sys.UnraisableHookArgs) -> None:
    value = args.exc_value if args.exc_value is not None else args.exc_type()
    _log.error(
        "%s: %r",
        args.err_msg or "exception ignored in",
        args.object,
        exc_info=(args.exc_type, value, args.exc_traceback),
    )
