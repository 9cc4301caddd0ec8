"""Worker daemons on this machine, for as long as an example runs."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rich.console import Console

START_SECONDS = 120.0
"""What a worker gets to start. Loading torch from a cold disk takes a while."""
STOP_SECONDS = 15.0
LOG_LINES = 20
"""How much of its log is shown of a worker that failed."""


@contextmanager
def workers_for(module: str, addresses: str = "", names: Sequence[str] = ("a", "b")) -> Iterator[list[str]]:
    """The addresses of workers that serve `module`.

    Those of `addresses` ("host-a:50051,host-b:50051") if it is given. Else workers with these names are
    started on this machine, and stopped in the end whatever happens.
    """
    if addresses:
        given = [address.strip() for address in addresses.split(",")]
        if len(given) != len(names):
            sys.exit(f"{len(names)} addresses of workers are needed, with commas between, not {addresses!r}")
        yield given
        return
    # Ended from outside, the program still ends its workers.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: sys.exit(128 + number))
    with TemporaryDirectory() as folder:
        daemons: list[Daemon] = []
        try:
            for name in names:
                daemons.append(Daemon(module, name, Path(folder, f"{name}.log")))
            # Waited for only now: they load torch at the same time.
            with Console().status(f"starting {len(names)} workers"):
                started = [daemon.wait_until_ready() for daemon in daemons]
            yield started
        finally:
            for daemon in daemons:
                daemon.ask_to_stop()
            for daemon in daemons:
                daemon.wait_until_stopped()


class Daemon:
    """``gradwire-server serve`` on a free port, with its log in a file."""

    def __init__(self, module: str, name: str, log: Path) -> None:
        self.name = name
        self.log = log
        options = ["--bind", "127.0.0.1:0", "--name", name, "--torch-threads", "1", "--log-format", "json"]
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "gradwire_server", "serve", module, *options],
                cwd=Path(__file__).parent,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                process_group=0,  # Ctrl-C reaches this program alone, which then stops its workers
            )

    def wait_until_ready(self) -> str:
        """The address in its ready line."""
        give_up_at = time.monotonic() + START_SECONDS
        while time.monotonic() < give_up_at:
            # OutboundCall before reading: a daemon that has ended by now has written all that it will write.
            ended = self.process.poll()
            for entry in self._entries():
                if entry.get("event") == "ready":
                    return str(entry["addresses"][0])
            if ended is not None:
                sys.exit(f"Worker {self.name!r} did not start.")
            time.sleep(0.02)
        sys.exit(f"Worker {self.name!r} was not ready after {START_SECONDS:g} s.")

    def ask_to_stop(self) -> None:
        """If there is nobody to ask any more, something went wrong, and its log says what."""
        code = self.process.poll()
        if code is None:
            self.process.terminate()
        else:
            lines = [
                line
                for entry in self._entries()
                for line in (entry["message"], *entry.get("exception", "").splitlines())
            ]
            print(f"Worker {self.name!r} ended with status {code}. The end of its log:", file=sys.stderr)
            print(*lines[-LOG_LINES:], sep="\n", file=sys.stderr)

    def wait_until_stopped(self) -> None:
        try:
            self.process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def _entries(self) -> Iterator[dict[str, Any]]:
        """What it logged so far. What comes before logging is set up, or from elsewhere, is no JSON."""
        for line in self.log.read_text().splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                entry = line
            yield entry if isinstance(entry, dict) else {"message": line}
