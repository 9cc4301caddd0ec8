"""When a client dies or stops, the workers let go of all that they do and hold for it, and serve the others.

`test_deaths` has the deaths of workers.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from tests.faults import dying_client
from tests.faults.test_deaths import SERVED, wait_for
from tests.integration.conftest import Launch
from tests.integration.daemons import DEADLINE, Daemon
from tests.integration.forking import Forked

import gradwire as gw
from gradwire.peers.current import default_peer

KILL, STOP = signal.SIGKILL, signal.SIGSTOP


@pytest.fixture(scope="module")
def pair(module_launch: Launch) -> tuple[Daemon, Daemon]:
    """Two workers that notice soon that a client is gone, each with a shared layer."""
    served = SERVED + "\nshared = Layer()\n"
    options = ("--lease", "1", "--lost-after", "1", "--expose-instance", "served:shared")
    return module_launch(served, *options), module_launch(served, *options)


def is_idle(worker: gw.RemoteWorker) -> bool:
    """Whether it holds and does nothing for anybody but whoever asks."""
    held = worker.inspect()
    others = [context for context in held.contexts if context.owner != default_peer().identity.name]
    return not held.calls and not others and len(held.clients) == 1


def train(workers: list[gw.RemoteWorker]) -> None:
    """A step of somebody else, with the same parameters: nobody may keep it from being made."""
    model = torch.nn.Sequential(*(worker.get("shared") for worker in workers))
    before = model.state_dict()
    optimizer = gw.optim.DistributedOptimizer(torch.optim.SGD, [model], lr=0.1)
    model(torch.ones(3).double()).sum().backward()
    optimizer.step()
    after = model.state_dict()
    assert not any(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("number", [KILL, STOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("phase", dying_client.PHASES)
def test_a_client_that_dies(
    pair: tuple[Daemon, Daemon], tmp_path: Path, phase: str, number: signal.Signals
) -> None:
    marker = tmp_path / "marker"
    args = [phase, *(daemon.address for daemon in pair), str(marker)]
    client = Forked("tests.faults.dying_client", args, cwd=None, env=os.environ, stdout=True)
    assert client.stdout is not None
    with client.stdout, client.stderr, gw.connect(pair[0].address) as first:
        with gw.connect(pair[1].address) as second:
            try:
                wait_for(marker.exists, f"the {phase}")
                client.send_signal(number)
                for worker in (first, second):
                    worker.block_in_step("")
                    wait_for(lambda worker=worker: is_idle(worker), "the worker letting go")  # type: ignore[misc]
                train([first, second])
                expected = [worker.get("shared").state_dict() for worker in (first, second)]
                if number == STOP:
                    # It wakes up and is told who has given it up; what is left of its pass does no harm.
                    client.send_signal(signal.SIGCONT)
                    assert client.wait(DEADLINE) == 0
                    said = client.stdout.read()
                    assert said.startswith(("WorkerLost", "StepTorn", "StepRefused")), (
                        said + client.stderr.read()
                    )
                    assert pair[0].address in said
                    for worker in (first, second):
                        wait_for(lambda worker=worker: is_idle(worker), "the worker letting go again")  # type: ignore[misc]
                for worker, state in zip((first, second), expected, strict=True):
                    assert torch.equal(worker.get("shared").state_dict()["weight"], state["weight"])
            finally:
                client.kill()
                client.wait(DEADLINE)
