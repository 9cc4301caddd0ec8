"""Commands that start in no time: forked off a process that has loaded torch and gradwire, and used neither.

Loading them takes some three seconds of computing, and the tests start hundreds of processes. What is forked
is a process like any other, with memory of its own, and is killed and stopped like any other.
"""

from __future__ import annotations

import atexit
import importlib
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TextIO

__all__ = ["Forked"]

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(
    [
        "gradwire._public",
        "gradwire_server.worker",
        "gradwire_server.daemon.loading",
        "gradwire_server.daemon.cli",
        "gradwire.cli",
    ]
)


class Forked:
    """As `subprocess.Popen`, for the ``main`` of a module."""

    def __init__(
        self, module: str, args: Sequence[str], *, cwd: Path | None, env: Mapping[str, str], stdout: bool
    ) -> None:
        self.stdout, output = _pipe() if stdout else (None, None)
        self.stderr, errors = _pipe()
        self._process = _processes.Process(
            target=_run,
            args=(module, list(args), str(cwd or os.getcwd()), dict(env), output, errors),
            daemon=True,
        )
        self._process.start()
        for end in filter(None, (output, errors)):
            end.close()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        if self._process.exitcode is None:
            with suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _pipe() -> tuple[TextIO, Connection]:
    """Something to read from, and the end to write to, which can go to the process."""
    reading, writing = os.pipe()
    return open(reading), Connection(writing, readable=False)


def _run(
    module: str, args: list[str], cwd: str, env: dict[str, str], output: Connection | None, errors: Connection
) -> None:
    """In the new process: what the interpreter does for a command."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    with open(os.devnull, "w") as nowhere:
        for stream, number in ((output or nowhere, 1), (errors, 2)):
            os.dup2(stream.fileno(), number)
            stream.close()
    # Those of the process that was forked may know that they wrote to a terminal.
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
    sys.argv = [module, *args]
    try:
        importlib.import_module(module).main()
    finally:
        # Processes of multiprocessing run no exit handlers.
        atexit._run_exitfuncs()
