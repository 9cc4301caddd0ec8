"""Daemons to measure."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

__all__ = ["daemon"]


@contextmanager
def daemon(module: str, folder: Path, *options: str, prefix: Sequence[str] = ()) -> Iterator[str]:
    """A `gradwire-server` that serves a module of a folder, with one torch thread; its address."""
    command = [*prefix, sys.executable, "-m", "gradwire_server", "serve", module, *options]
    settings = ["--torch-threads", "1", "--log-format", "json"]
    process = subprocess.Popen([*command, *settings], cwd=folder, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            event = json.loads(line)
            if event.get("event") == "ready":
                yield event["addresses"][0]
                break
        else:
            raise RuntimeError("the worker did not start")
    finally:
        process.terminate()
        process.communicate(timeout=60)
