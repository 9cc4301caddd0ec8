"""gradwire: a daemon on the same host."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import gradwire as gw
from benchmarks.daemons import Daemon
from benchmarks.peers.member import Call, run


@contextmanager
def connected() -> Iterator[Call]:
    gw.tune_malloc()  # as workers do by themselves
    with Daemon("benchmarks.served") as daemon, gw.connect(daemon.wait_until_ready()) as worker:
        yield worker.call


if __name__ == "__main__":
    run(connected, has_backward=True)
