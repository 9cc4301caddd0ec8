"""A process ends when its program does, whatever gradwire was doing, and the others hear of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.faults.carriers import SETTINGS
from tests.integration.daemons import DEADLINE
from tests.integration.unstopped import Named, double, wait_until_cancelled

import gradwire as gw
import gradwire_server as gws
from gradwire.peers.current import default_peer

ROOT = Path(__file__).parents[2]
EXIT_CODES = {"end": 0, "exception": 1, "sys.exit": 3, "interrupt": -signal.SIGINT}


@contextmanager
def program(*args: str) -> Iterator[subprocess.Popen[str]]:
    """A real interpreter, whose end is not that of a forked process."""
    with subprocess.Popen(
        [sys.executable, "-m", "tests.integration.unstopped", *args],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def told_to_end(process: subprocess.Popen[str], how: str) -> str:
    """Lets the program end; what it wrote to stderr."""
    if how == "interrupt":
        process.send_signal(signal.SIGINT)
    _, errors = process.communicate("\n", timeout=DEADLINE)
    assert process.returncode == EXIT_CODES[how], errors
    return errors


def assert_is_quiet(errors: str, how: str) -> None:
    """Nothing but what Python itself says of an exception that nobody caught, and what was given up."""
    expected = {"exception": "ValueError: nobody catches this", "interrupt": "KeyboardInterrupt"}
    lines = [line for line in errors.splitlines() if "did not finish in time" not in line]
    if how in expected:
        assert lines[0] == "Traceback (most recent call last):", errors
        assert lines[-1] == expected[how], errors
        assert sum("Traceback" in line for line in lines) == 1, errors
    else:
        assert lines == []


@pytest.mark.parametrize("how", EXIT_CODES)
def test_a_process_with_a_worker_that_was_not_stopped_ends(how: str) -> None:
    """Its clients sit on this host and elsewhere; some wait for calls that never end, some for nothing."""
    with program("serve", how) as process:
        assert process.stdout is not None
        address = process.stdout.readline().strip()
        waiting = []
        for settings in SETTINGS.values():
            # A link that is cut without a word would be mended for this long.
            worker = gw.connect(address, **settings, lost_after=DEADLINE)
            assert worker.double(21) == 42
            if how != "sys.exit":  # in one case, nobody waits for anything
                waiting += [worker.call_async(function) for function in ("sleep", "compute")]
                x = torch.ones(2, requires_grad=True)
                y = worker.backward_that_computes(x)
                waiting.append(default_peer().pool.submit(y.sum().backward))
                assert worker.double(21) == 42  # so they have begun
        errors = told_to_end(process, how)
        assert_is_quiet(errors, how)
        for future in waiting:
            assert type(future.exception(DEADLINE)) in (gw.LinkClosed, gw.Cancelled)


def test_a_process_that_ends_saves_the_state_of_a_worker_that_was_not_stopped(tmp_path: Path) -> None:
    with program("serve", "exception", str(tmp_path)) as process:
        assert process.stdout is not None
        worker = gw.connect(process.stdout.readline().strip())
        weight = worker.create("Named", 2, 3, name="model").state_dict()["weight"]
        told_to_end(process, "exception")
    with gws.Worker(Named, state_dir=tmp_path) as server, gw.connect(server.address) as worker:
        torch.testing.assert_close(worker.get("model").state_dict()["weight"], weight)


@pytest.mark.parametrize("how", ["end", "interrupt"])
def test_a_client_that_holds_futures_ends(how: str) -> None:
    with (
        gws.Worker(double, wait_until_cancelled) as server,
        program("call", how, server.address) as process,
        gw.connect(server.address) as worker,
    ):
        assert process.stdout is not None
        assert process.stdout.readline() == "called\n"
        assert sum(client.connected for client in worker.inspect().clients) == 2
        errors = told_to_end(process, how)
        assert_is_quiet(errors, how)
        # It said goodbye. Else what the worker holds for it would be kept for the length of a lease.
        assert sum(client.connected for client in worker.inspect().clients) == 1
        assert len(worker.inspect().clients) == 1
