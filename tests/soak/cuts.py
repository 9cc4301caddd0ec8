"""Sockets that go around gRPC die when a process, worker or client, gets a signal."""

from __future__ import annotations

import signal
from collections import Counter

from tests.faults.carriers import block, cut

__all__ = ["BLOCK", "CUT", "SOCKETS", "happened", "obey"]

SOCKETS = ("unix", "tcp")
CUT, BLOCK = signal.SIGUSR1, signal.SIGUSR2
happened: Counter[str] = Counter()
"""How many sockets of this process were cut, and how many that it listens at were blocked."""


def obey() -> None:
    """From now on. To be called by the main thread."""
    signal.signal(CUT, lambda *_: _count("cut", cut(SOCKETS)))
    signal.signal(BLOCK, lambda *_: _count("blocked", block(SOCKETS)))


def _count(what: str, count: Counter[str]) -> None:
    for carrier, number in count.items():
        happened[f"{carrier} {what}"] += number
