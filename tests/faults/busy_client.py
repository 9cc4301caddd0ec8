"""A client that forks, or is signalled, while its links live: ``main`` runs in a process of its own.

Its arguments are what is to happen, what carries its session, and a worker that serves `test_signals.SERVED`.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
from tests.faults.carriers import SETTINGS, carrier_of

import gradwire as gw

__all__ = ["main"]

INTERRUPTS = 40
ALARM_SECONDS = 0.001


def check(worker: gw.RemoteWorker, size: int) -> None:
    x = torch.full((size,), 2.0, requires_grad=True)
    y = worker.triple(x)
    y.sum().backward()
    assert torch.equal(y, torch.full((size,), 6.0))
    assert torch.equal(x.grad, torch.full((size,), 3.0))


def fork(worker: gw.RemoteWorker, marker: str) -> None:
    """While a call and a large transfer are under way. The child tries to use the link, drops all that it has
    of it, and ends as processes do, exit handlers included."""
    link, stream = worker._link, worker._link._carrier
    futures = [worker.call_async("wait_for", marker), worker.call_async("triple", torch.ones(1 << 23))]
    warnings.simplefilter("ignore", DeprecationWarning)  # there are threads, which is the point
    child = os.fork()
    if child == 0:
        with pytest.raises(gw.ForkedProcess):
            worker.triple(torch.ones(3))
        with pytest.raises(gw.ForkedProcess):
            gw.connect(worker.target)
        del link, stream, worker, futures[:]
        gc.collect()
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    Path(marker).touch()
    assert futures[0].result(60) == 1
    assert torch.equal(futures[1].result(60), torch.full((1 << 23,), 3.0))
    check(worker, 1 << 18)
    assert worker._link is link
    assert link._carrier is stream, "the link was cut"


def outlived(worker: gw.RemoteWorker, marker: str) -> None:
    """Forks a child that lives on when this process is killed."""
    warnings.simplefilter("ignore", DeprecationWarning)
    worker.count(0)
    if os.fork() == 0:
        for _ in range(600):
            if os.path.exists(marker):
                break
            time.sleep(0.1)
        os._exit(0)
    print("forked", flush=True)
    signal.pause()


def interrupts(worker: gw.RemoteWorker, marker: str) -> None:
    """Ctrl-C at any moment of calls and backwards, small and large."""
    main, token = threading.get_ident(), 0
    for number in range(INTERRUPTS):
        caught = threading.Event()

        def interrupt(seconds: float = number / 4000, caught: threading.Event = caught) -> None:
            while not caught.wait(seconds):
                signal.pthread_kill(main, signal.SIGINT)
                seconds = 1.0  # Python drops what is raised within a destructor: then once more

        thread = threading.Thread(target=interrupt)
        with pytest.raises(KeyboardInterrupt):  # noqa: PT012 - at any moment of this
            thread.start()
            while True:
                token += 1
                assert worker.count(token) == 1
                check(worker, 10 if number % 2 else 1 << 18)
        caught.set()
        thread.join()
    check(worker, 1 << 18)
    assert all(times == 1 for times in worker.counted().values())


def alarms(worker: gw.RemoteWorker, marker: str) -> None:
    """Signals whose handlers return interrupt system calls of any thread all the time."""
    rung = []
    signal.signal(signal.SIGALRM, lambda *_: rung.append(1))
    signal.setitimer(signal.ITIMER_REAL, ALARM_SECONDS, ALARM_SECONDS)
    rounds = 0
    while len(rung) < 300 or rounds < 30:
        check(worker, (10, 1 << 18, 1 << 21)[rounds % 3])
        rounds += 1
    signal.setitimer(signal.ITIMER_REAL, 0)


HAPPENINGS = {happening.__name__: happening for happening in (fork, outlived, interrupts, alarms)}


def main() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    happening, carrier, address, marker = sys.argv[1:]
    with gw.connect(address, lost_after=30.0, **SETTINGS[carrier]) as worker:
        check(worker, 1 << 18)
        assert carrier_of(worker._link) == carrier
        HAPPENINGS[happening](worker, marker)
        assert worker._link.ended is None
    print("done", flush=True)
