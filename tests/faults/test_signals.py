"""Whatever a client goes through, a fork, Ctrl-C or another signal, its links live on, over every carrier."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.faults.carriers import CARRIERS
from tests.faults.test_deaths import wait_for
from tests.integration.conftest import Launch
from tests.integration.daemons import DEADLINE, Daemon
from tests.integration.forking import Forked

import gradwire as gw

SERVED = """
import pathlib, time
import torch
import gradwire as gw
import gradwire_server as gws

weight = torch.full((1,), 3.0, requires_grad=True)
calls = {}

@gws.expose
def triple(x):
    return x * weight

@gws.expose
def wait_for(path):
    while not pathlib.Path(path).exists() and not gw.cancelled():
        time.sleep(0.001)
    return 1

@gws.expose
def count(token):
    calls[token] = calls.get(token, 0) + 1
    return calls[token]

@gws.expose
def counted():
    return calls
"""


@contextmanager
def client(happening: str, carrier: str, daemon: Daemon, marker: Path) -> Iterator[Forked]:
    args = [happening, carrier, daemon.address, str(marker)]
    started = Forked("tests.faults.busy_client", args, cwd=None, env=os.environ, stdout=True)
    assert started.stdout is not None
    with started.stdout, started.stderr:
        try:
            yield started
        finally:
            started.kill()
            started.wait(DEADLINE)


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("happening", ["fork", "interrupts", "alarms"])
def test_a_client_goes_on(launch: Launch, tmp_path: Path, happening: str, carrier: str) -> None:
    daemon = launch(SERVED)
    with client(happening, carrier, daemon, tmp_path / "marker") as started:
        assert started.stdout is not None
        said = started.stdout.read()
        assert said.endswith("done\n"), said + started.stderr.read()
    with gw.connect(daemon.address) as worker:
        wait_for(lambda: len(worker.inspect().clients) == 1, "the goodbye of the client")
        assert worker.inspect().calls == 0


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_client_that_is_killed_is_missed_though_a_child_of_it_lives(
    launch: Launch, tmp_path: Path, carrier: str
) -> None:
    """The child has the same sockets, so that no connection ends."""
    daemon = launch(SERVED, "--lease", "1", "--lost-after", "1", "--grace", "1")
    marker = tmp_path / "marker"
    with client("outlived", carrier, daemon, marker) as started, gw.connect(daemon.address) as worker:
        assert started.stdout is not None
        try:
            assert started.stdout.readline() == "forked\n", started.stderr.read()
            assert len(worker.inspect().clients) == 2
            started.send_signal(signal.SIGKILL)
            struck = time.monotonic()
            wait_for(lambda: len(worker.inspect().clients) == 1, "the lease running out")
            assert time.monotonic() - struck < 20
        finally:
            marker.touch()
