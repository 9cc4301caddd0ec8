"""For all tests: one torch thread, and nothing left behind."""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing import forkserver, resource_tracker
from pathlib import Path

import pytest
import torch
from tests.integration.daemons import Daemon

from gradwire.peers.current import reset_default_peer
from gradwire.torch_internals import is_stashed, stashed

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # As shells start what runs in the background; the tests' own processes would inherit it.
    signal.signal(signal.SIGINT, signal.default_int_handler)

SERVED = Path(__file__).parent / "integration" / "serving"
"""Where the module is that the shared workers serve."""

LEFTOVER_SECONDS = 10.0
"""How long threads, processes and sockets may take to end after a test."""


@dataclass(frozen=True)
class Workers:
    """Two daemons with two threads each, for tests that leave them as they were."""

    a: str
    b: str
    processes: tuple[Daemon, Daemon]


@pytest.fixture(scope="session")
def workers() -> Iterator[Workers]:
    """The addresses of two workers, "a" and "b", that serve `integration/serving/functions.py`."""
    daemons = [
        Daemon(["functions", "--bind", "127.0.0.1:0", "--threads", "2", "--name", name], cwd=SERVED)
        for name in ("a", "b")
    ]
    try:
        a, b = (daemon.wait_until_ready() for daemon in daemons)
        yield Workers(a.address, b.address, (a, b))
    finally:
        for daemon in daemons:
            daemon.stop()


@pytest.fixture(autouse=True)
def nothing_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that leaves a thread of gradwire, a child process, a listening socket, or a scope that it
    did not leave."""
    if "workers" in request.fixturenames:
        request.getfixturevalue("workers")  # they outlive the test
    before = _everything()
    yield
    reset_default_peer()
    left = _wait_until_empty(lambda: _everything() - before)
    if left:
        pytest.fail(f"left behind: {', '.join(sorted(map(str, left)))}", pytrace=False)


def _wait_until_empty(look: Callable[[], set[object]]) -> set[object]:
    give_up_at = time.monotonic() + LEFTOVER_SECONDS
    pause = 0.001
    while (left := look()) and time.monotonic() < give_up_at:
        gc.collect()
        time.sleep(pause)
        pause = min(2 * pause, 0.1)
    return left


def _everything() -> set[object]:
    return {*_threads(), *_children(), *_listening(), *_stashed()}


def _threads() -> Iterator[object]:
    for thread in threading.enumerate():
        # The timers' thread serves the whole process and ends by itself.
        if thread.name.startswith("gradwire") and thread.name != "gradwire-timers":
            yield f"thread {thread.name} ({thread.ident})"


def _stashed() -> Iterator[object]:
    """What gradwire keeps in torch's thread-local state of this thread while a block is entered."""
    for key in ("gradwire.scope", "gradwire.run"):
        if is_stashed(key):
            found = stashed(key)
            yield f"{key} = {getattr(found, 'value', found)}"


def _children() -> Iterator[object]:
    """Processes that this one started, and those that `tests.integration.forking` forked off for it."""
    parents, names = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = stat.read_text().rpartition(")")
        except OSError:
            continue  # it ended meanwhile
        pid = int(stat.parent.name)
        parents[pid], names[pid] = int(rest.split()[1]), f"process {name})"
    helpers = {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}
    for pid, parent in parents.items():
        if pid not in helpers and os.getpid() in (parent, parents.get(parent)):
            yield names[pid]


def _listening() -> Iterator[object]:
    own = set()
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            own.add(os.readlink(descriptor))
        except OSError:
            continue
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                yield f"listening socket {table} {fields[1]}"
    for line in Path("/proc/self/net/unix").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "00010000" and f"socket:[{fields[6]}]" in own:
            yield f"listening socket {fields[7] if len(fields) > 7 else 'unix'}"
