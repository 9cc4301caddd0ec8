"""Starts the workers of the search: as processes, or in this one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.integration.daemons import Daemon
from tests.search.over_workers import real_site
from tests.search.site import NAMES, Cell

import gradwire as gw
import gradwire_server as gws

__all__ = ["Workers", "connected", "daemons", "in_processes", "in_this_process"]

ROOT = Path(__file__).resolve().parents[2]
FOLLOW = "127.0.0.1:*"
"""Refs to what one worker holds lead the others there."""

Workers = Mapping[str, gw.RemoteWorker]


@contextmanager
def daemons() -> Iterator[dict[str, str]]:
    """The addresses of a process for each worker."""
    with ExitStack() as stack:
        started = {}
        for name in NAMES:
            arguments = ["tests.search.serving", "--bind", "127.0.0.1:0", "--name", name, "--follow", FOLLOW]
            started[name] = Daemon(arguments, cwd=ROOT, env={"SITE": name})
            stack.callback(started[name].stop)
        yield {name: daemon.wait_until_ready().address for name, daemon in started.items()}


@contextmanager
def connected(addresses: dict[str, str]) -> Iterator[Workers]:
    """Handles to the workers, who know of one another."""
    with ExitStack() as stack:
        workers = {name: stack.enter_context(gw.connect(address)) for name, address in addresses.items()}
        for worker in workers.values():
            worker.meet(addresses)
        yield workers


@contextmanager
def in_processes() -> Iterator[Workers]:
    """A process for each worker."""
    with daemons() as addresses, connected(addresses) as workers:
        yield workers


@contextmanager
def in_this_process() -> Iterator[Workers]:
    """All workers in this process: other threads and other timing, and the same core for all."""
    with ExitStack() as stack:
        addresses = {}
        for name in NAMES:
            served = (*real_site(name).functions, Cell)
            worker = stack.enter_context(gws.Worker(*served, name=name, follow=[FOLLOW]))
            addresses[name] = worker.address
        yield stack.enter_context(connected(addresses))
