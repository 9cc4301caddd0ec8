"""What the kernel says of processes, and does for them."""

from __future__ import annotations

import ctypes
import signal
import time
from collections.abc import Iterable
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_COUNTED = ("Pss_Anon:", "Pss_Shmem:")


def die_with_parent(by: signal.Signals = signal.SIGKILL) -> None:
    """Asks the kernel to end this process when the one that started it is gone."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, by)


def inherit_orphans() -> None:
    """Makes what is left by a child of this process that ends a child of this process."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def held_bytes(pids: Iterable[int]) -> int:
    """What processes hold in memory of their own and in shared memory.

    The proportional set size: a page that two processes map counts half in each, so that shared memory
    counts once in the sum. Mapped files, which are code here, are left out.
    """
    return sum(_proportional_bytes(pid) for pid in pids)


def _proportional_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(_COUNTED))


def threads_of(pid: int) -> int:
    """How many threads a process has."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Threads:"))


def cpu_seconds_of(pid: int) -> float:
    """The time that all threads of a process, those that have ended among them, have computed for."""
    # As clock_getcpuclockid(3) makes it. /proc counts in hundredths of a second.
    return time.clock_gettime((~pid << 3) | 2)


def parents() -> dict[int, int]:
    """Every process, and the one that it is a child of."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            found[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it ended meanwhile
    return found


def descendants_of(pid: int) -> list[int]:
    """The children of a process, and theirs."""
    known, found, fresh = parents(), [], [pid]
    while fresh:
        fresh = [child for child, parent in known.items() if parent in fresh]
        found += fresh
    return found
