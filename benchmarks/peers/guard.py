"""Runs a command, and ends whatever is left of its processes when it ends: ``guard.py COMMAND...``

Some peers start processes that outlive the one that did. Those become children of the guard, which ends with
whoever started it, even if that is killed.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

from benchmarks.processes import descendants_of, die_with_parent, inherit_orphans


def main() -> int:
    inherit_orphans()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    die_with_parent(signal.SIGTERM)
    try:
        return subprocess.Popen(sys.argv[1:], preexec_fn=die_with_parent).wait()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while left := descendants_of(os.getpid()):
            for pid in left:
                _kill(pid)
            time.sleep(0.01)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, os.WNOHANG)  # it stays a child until somebody asks what became of it
    except (ProcessLookupError, ChildProcessError):
        pass


if __name__ == "__main__":
    sys.exit(main())
