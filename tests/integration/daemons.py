"""Real daemons for tests: started as processes, waited for by what they say, never left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.integration.forking import Forked

__all__ = ["DEADLINE", "Daemon", "run", "server_command"]

DEADLINE = 60.0
"""Seconds after which what should have happened counts as never happening. Loading torch takes a few."""


def server_command(*args: str) -> list[str]:
    """The command line of ``gradwire-server`` with the interpreter that runs the tests."""
    return [sys.executable, "-m", "gradwire_server.daemon.cli", *args]


def _environment(extra: Mapping[str, str] | None) -> dict[str, str]:
    # A developer's own settings must not reach into the tests.
    clean = {key: value for key, value in os.environ.items() if not key.startswith("GRADWIRE_")}
    return {**clean, **(extra or {})}


def run(
    module: str, *args: str, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs the command of a module to its end and gives back its exit code and what it wrote."""
    process = Forked(module, args, cwd=cwd, env=_environment(env), stdout=True)
    assert process.stdout is not None
    try:
        with process.stdout, process.stderr, ThreadPoolExecutor(2) as pool:
            written = [pool.submit(stream.read) for stream in (process.stdout, process.stderr)]
            code = process.wait(DEADLINE)
            return subprocess.CompletedProcess([module, *args], code, *(one.result() for one in written))
    finally:
        process.kill()


class Daemon:
    """A ``gradwire-server serve`` process and the lines that it logs."""

    def __init__(self, args: Sequence[str], cwd: Path, env: Mapping[str, str] | None = None) -> None:
        self.lines: list[dict[str, Any]] = []
        """What it logged so far: JSON lines, parsed."""
        self.ready: dict[str, Any] = {}
        """The ready line."""
        self._ended = False
        self._changed = threading.Condition()
        self.process = Forked(
            "gradwire_server.daemon.cli",
            ["serve", *args, "--log-format", "json"],
            cwd=cwd,
            env=_environment(env),
            stdout=False,
        )
        self._reader = threading.Thread(target=self._read, name="daemon-log", daemon=True)
        self._reader.start()

    @property
    def address(self) -> str:
        """The first address that it listens on."""
        return str(self.ready["addresses"][0])

    def _read(self) -> None:
        for text in self.process.stderr:
            try:
                line = json.loads(text)
            except ValueError:
                line = {"not_json": text.rstrip()}
            with self._changed:
                self.lines.append(line)
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def wait_for(self, wanted: Callable[[dict[str, Any]], bool] | str) -> dict[str, Any]:
        """The first line that fits, or that has this ``event``, as soon as it is there."""

        def fits(line: dict[str, Any]) -> bool:
            return line.get("event") == wanted if isinstance(wanted, str) else wanted(line)

        end = time.monotonic() + DEADLINE
        with self._changed:
            while True:
                for line in self.lines:
                    if fits(line):
                        return line
                if self._ended or not self._changed.wait(end - time.monotonic()):
                    why = "ended" if self._ended else "timed out"
                    raise AssertionError(f"{why} waiting for {wanted!r}; the daemon logged {self.lines}")

    def wait_until_ready(self) -> Daemon:
        """Returns once it serves."""
        self.ready = self.wait_for("ready")
        return self

    def signal(self, number: signal.Signals) -> None:
        """Sends a signal. If it is to stop the process, returns when all its threads have stopped."""
        self.process.send_signal(number)
        give_up_at = time.monotonic() + DEADLINE
        while number == signal.SIGSTOP and not self._has_stopped():
            assert time.monotonic() < give_up_at
            time.sleep(0.001)

    def _has_stopped(self) -> bool:
        threads = Path(f"/proc/{self.process.pid}/task").glob("*/stat")
        return all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in threads)

    def wait(self) -> int:
        """Its exit code, once it and its log have ended."""
        code = self.process.wait(DEADLINE)
        self._reader.join(DEADLINE)
        return code

    def stop(self) -> None:
        """Ends it in any case, and releases what it used."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.wait()
        self.process.stderr.close()
