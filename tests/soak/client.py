"""One client process: some threads that load the workers until it is time, or until it is killed."""

from __future__ import annotations

import faulthandler
import itertools
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tests.soak import cuts
from tests.soak.journal import Journal
from tests.soak.load import Load, Place

from gradwire.peers.current import reset_default_peer
from gradwire.transport import Session

__all__ = ["FINISH_SECONDS", "Orders", "run_client"]

FINISH_SECONDS = 60.0
"""How long what was begun may take to finish, with faults going on."""
_MOST_VIOLATIONS = 5
_TOKENS_PER_CLIENT = 1_000_000_000


@dataclass(frozen=True)
class Orders:
    number: int
    """Of the client; no two have the same."""
    seed: int
    seconds: float
    threads: int
    places: Sequence[Place]
    folder: Path

    @property
    def journal(self) -> Path:
        return self.folder / f"client-{self.number}.jsonl"

    @property
    def is_ready(self) -> bool:
        """Whether it obeys signals: before that, they would end it."""
        return self.journal.exists()

    @property
    def stacks(self) -> Path:
        """Where its threads were, if it did not end in time."""
        return self.folder / f"client-{self.number}.stacks"


def run_client(orders: Orders) -> None:
    torch.set_num_threads(1)
    cuts.obey()
    journal = Journal(orders.journal)
    tokens = itertools.count(orders.number * _TOKENS_PER_CLIENT)
    end = time.monotonic() + orders.seconds
    retries = _count_retries()
    with orders.stacks.open("w") as stacks:
        faulthandler.dump_traceback_later(orders.seconds + FINISH_SECONDS, exit=True, file=stacks)
        threads = [
            threading.Thread(
                target=_work, args=(orders, journal, f"{orders.seed}/{orders.number}/{index}", tokens, end)
            )
            for index in range(orders.threads)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        # Processes of multiprocessing run no exit handlers, which would say goodbye.
        reset_default_peer()
        faulthandler.cancel_dump_traceback_later()
    counts = {"refused and asked again, by clients that ended well": sum(retries)}
    journal.end(**counts, **{f"{what}, by clients that ended well": n for what, n in cuts.happened.items()})


def _work(orders: Orders, journal: Journal, seed: str, tokens: itertools.count[int], end: float) -> None:
    violations = 0
    load: Load | None = None
    while violations < _MOST_VIOLATIONS and time.monotonic() < end:
        try:
            load = load or Load(orders.places, journal, seed, tokens)
            load.one()
        except Exception as error:
            # No error is expected that the load does not handle itself: nobody but clients dies here.
            violations += 1
            journal.violation(type(error).__name__, f"client {orders.number}: {traceback.format_exc()}")
    try:
        if load is not None:
            load.close()
    except Exception as error:
        journal.violation(type(error).__name__, f"client {orders.number}: {traceback.format_exc()}")


def _count_retries() -> list[int]:
    """How many calls a worker had no room for, which the library hides from its user: of each link that has
    ended."""
    counts: list[int] = []
    make = Session.__init__

    def making(self: Session, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        self.when_ended(lambda _: counts.append(self._native.statistics()["retries"]))

    Session.__init__ = making  # type: ignore[method-assign]
    return counts
