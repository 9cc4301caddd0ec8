"""Links live on where the system runs short of descriptors, of memory for segments, or of any memory."""

from __future__ import annotations

import os

import pytest
import torch
from tests.faults.carriers import CARRIERS, SETTINGS, carrier_of
from tests.integration.conftest import Launch
from tests.integration.daemons import DEADLINE, Daemon
from tests.integration.forking import Forked

import gradwire as gw

LARGE = 1 << 20
"""Elements of what goes through shared memory, where there is any."""
TOO_LARGE = 1 << 26
"""Elements of what needs more than `shortages.ROOM_BYTES`."""

SERVED = """
import torch
from contextlib import ExitStack
import gradwire_server as gws
from tests.faults.shortages import SHORTAGES

weight = torch.full((1,), 3.0, requires_grad=True)
short = ExitStack()

@gws.expose
def triple(x):
    return x * weight

@gws.expose
def total(x):
    return float(x.sum())

@gws.expose
def zeros(size):
    return torch.zeros(size)

@gws.expose
def run_short(of):
    short.enter_context(SHORTAGES[of]())

@gws.expose
def have_enough():
    short.close()
"""


@pytest.fixture(scope="module")
def daemon(module_launch: Launch) -> Daemon:
    return module_launch(SERVED)


def check_calls(worker: gw.RemoteWorker, largest: int = LARGE) -> None:
    """Calls and their backward. With a larger one than before, new segments are wanted at both ends."""
    for size in (10, LARGE, largest):
        x = torch.full((size,), 2.0, requires_grad=True)
        y = worker.triple(x)
        y.sum().backward()
        assert torch.equal(y, torch.full((size,), 6.0))
        assert x.grad is not None
        assert torch.equal(x.grad, torch.full((size,), 3.0))


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("short_of", ["descriptors", "segments", "memory"])
def test_a_client_that_runs_short_goes_on(daemon: Daemon, short_of: str, carrier: str) -> None:
    args = [short_of, carrier, daemon.address]
    client = Forked("tests.faults.short_client", args, cwd=None, env=os.environ, stdout=True)
    assert client.stdout is not None
    with client.stdout, client.stderr:
        try:
            assert client.stdout.read() == "done\n", client.stderr.read()
        finally:
            client.kill()
            client.wait(DEADLINE)


@pytest.mark.parametrize("carrier", CARRIERS)
@pytest.mark.parametrize("short_of", ["descriptors", "segments", "memory"])
def test_a_worker_that_runs_short_goes_on(launch: Launch, short_of: str, carrier: str) -> None:
    daemon = launch(SERVED)
    with gw.connect(daemon.address, lost_after=30.0, **SETTINGS[carrier]) as worker:
        check_calls(worker)
        assert carrier_of(worker._link) == carrier
        worker.run_short(short_of)
        if short_of == "memory":
            with pytest.raises(gw.ResourceExhausted, match="no memory"):
                worker.total(torch.zeros(TOO_LARGE))
            assert worker.total(torch.ones(10)) == 10
        else:
            check_calls(worker, 8 * LARGE)
        if carrier == "unix":
            assert (carrier_of(worker._link) == "unix") == (short_of != "descriptors")
        worker.have_enough()
        check_calls(worker)
        assert worker.total(torch.ones(LARGE)) == LARGE
