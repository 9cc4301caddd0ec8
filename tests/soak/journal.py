"""What a client did, written as it does it: a client that is killed leaves it behind."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Account", "Journal", "read_account"]


class Journal:
    """Lines of JSON in a file, each of them written whole or not at all."""

    def __init__(self, path: Path) -> None:
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._lock = threading.Lock()

    def _write(self, **entry: Any) -> None:
        with self._lock:
            os.write(self._descriptor, json.dumps(entry).encode() + b"\n")

    def begin(self, worker: int, tokens: Iterable[int]) -> None:
        """Calls with these tokens are about to be made: from now on each may have run once."""
        self._write(begin=list(tokens), worker=worker)

    def done(self, tokens: Iterable[int]) -> None:
        """They were answered: each must have run once."""
        self._write(done=list(tokens))

    def did(self, kind: str, seconds: float, **counts: int) -> None:
        self._write(did=kind, seconds=seconds, counts=counts)

    def violation(self, kind: str, text: str) -> None:
        self._write(violation=kind, text=text)

    def end(self, **counts: int) -> None:
        self._write(end=True, counts=counts)


@dataclass
class Account:
    """What the journals of some clients say together."""

    begun: dict[int, int] = field(default_factory=dict)
    """For each token the worker that was called with it."""
    done: set[int] = field(default_factory=set)
    operations: Counter[str] = field(default_factory=Counter)
    slowest: dict[str, float] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)
    violations: list[tuple[str, str]] = field(default_factory=list)
    ended: bool = False

    def add(self, other: Account) -> None:
        self.begun |= other.begun
        self.done |= other.done
        self.operations += other.operations
        self.counts += other.counts
        self.violations += other.violations
        for kind, seconds in other.slowest.items():
            self.slowest[kind] = max(self.slowest.get(kind, 0.0), seconds)


def read_account(path: Path) -> Account:
    account = Account()
    for entry in _entries(path):
        account.begun.update(dict.fromkeys(entry.get("begin", ()), entry.get("worker")))
        account.done.update(entry.get("done", ()))
        account.counts.update(entry.get("counts", {}))
        account.ended |= "end" in entry
        if "violation" in entry:
            account.violations.append((entry["violation"], entry["text"]))
        if "did" in entry:
            kind = entry["did"]
            account.operations[kind] += 1
            account.slowest[kind] = max(account.slowest.get(kind, 0.0), entry["seconds"])
    return account


def _entries(path: Path) -> Iterator[dict[str, Any]]:
    if path.exists():
        for line in path.read_text().splitlines():
            yield json.loads(line)
