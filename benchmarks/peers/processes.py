"""The processes of peers, seen from the coordinator."""

from __future__ import annotations

import os
import selectors
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import IO

__all__ = ["PeerFailed", "PeerProcess"]

ROOT = Path(__file__).resolve().parents[2]
END_SECONDS = 15.0


class PeerFailed(Exception):
    """A peer that did not start, ended, raised or took too long. The message says which."""


class PeerProcess:
    """A module of this package, run by the interpreter of a peer's environment."""

    def __init__(self, python: Path, module: str) -> None:
        self._module = module
        self._folder = tempfile.TemporaryDirectory(prefix="peer-")  # for what peers leave where they run
        self._log: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed in `end`
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.peers.guard", python, "-m", f"benchmarks.peers.{module}"],
            cwd=self._folder.name,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C reaches the coordinator alone
        )
        self._received = b""

    def ask(self, request: str, seconds: float) -> str:
        """The answer to a line."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{request}\n".encode())
            self._process.stdin.flush()
        except BrokenPipeError:
            raise PeerFailed(f"{self._module} ended: {self._last_words()}") from None
        return self.answer(seconds)

    def answer(self, seconds: float) -> str:
        """The next line that it says."""
        assert self._process.stdout is not None
        give_up_at = time.monotonic() + seconds
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while b"\n" not in self._received:
                if not selector.select(max(0.0, give_up_at - time.monotonic())):
                    raise PeerFailed(f"{self._module} did not answer for {seconds:g} s: {self._last_words()}")
                piece = os.read(self._process.stdout.fileno(), 4096)
                if not piece:
                    raise PeerFailed(f"{self._module} ended: {self._last_words()}")
                self._received += piece
        line, _, self._received = self._received.partition(b"\n")
        return line.decode()

    def _last_words(self) -> str:
        self._log.seek(0)
        return "".join(self._log.read().strip().splitlines()[-1:]) or "it said nothing"

    def end(self) -> None:
        """Lets it end by itself, and ends it the hard way if that takes too long."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.close()
        except BrokenPipeError:
            pass  # it has ended
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.terminate()
            self._process.wait()
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._log.close()
        self._folder.cleanup()
