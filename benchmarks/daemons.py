"""Daemons to measure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Self

from benchmarks.contenders import Contender
from benchmarks.members import END_SECONDS, START_SECONDS, MemberFailed, wait_for
from benchmarks.processes import die_with_parent
from benchmarks.runtimes.gradwire import CARRIER_VARIABLE

ROOT = Path(__file__).resolve().parent.parent


class Daemon:
    """A `gradwire-server serve` process, with one torch thread."""

    def __init__(
        self,
        module: str,
        *options: str,
        bind: str = "127.0.0.1:0",
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self._log: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in `end`
        command = [
            *prefix,
            sys.executable,
            "-m",
            "gradwire_server",
            "serve",
            module,
            "--bind",
            bind,
            *options,
        ]
        settings = ["--torch-threads", "1", "--log-format", "json"]
        self._process = subprocess.Popen(
            [*command, *settings],
            cwd=ROOT,
            env={**os.environ, **(environment or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._log,
            preexec_fn=die_with_parent,
            start_new_session=True,  # Ctrl-C reaches the coordinator alone
        )

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_until_ready(self) -> str:
        """Its address."""
        found: list[str] = []

        def look() -> bool:
            if self._process.poll() is not None:
                raise MemberFailed(f"gradwire-server did not start:\n{self._read_log()}")
            lines = self._read_log().splitlines()
            events = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
            found.extend(event["addresses"][0] for event in events if event.get("event") == "ready")
            return bool(found)

        wait_for(look, START_SECONDS, "gradwire-server did not start")
        return found[0]

    def _read_log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def begin_to_end(self) -> None:
        self._process.terminate()

    def end(self) -> None:
        """Waits until it has ended, and ends it the hard way if it takes too long."""
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.begin_to_end()
        self.end()


def serve(contender: Contender) -> Daemon:
    """A worker of gradwire with the functions of all contenders."""
    variables = {CARRIER_VARIABLE: contender.carrier.value}
    return Daemon("benchmarks.served", environment={**contender.environment, **variables})
