"""When a worker dies or stops, everybody else gets a typed error that names it, and goes on.

Each is killed, and is stopped, in a call, in backward, in an optimizer step and in a large transfer: a
worker, the middle and the last of a chain here, a client in `test_client_deaths`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from concurrent import futures
from pathlib import Path

import pytest
import torch
from tests.integration.conftest import Launch
from tests.integration.daemons import DEADLINE, Daemon

import gradwire as gw
from gradwire.peers.current import default_peer

LOST_AFTER = 1.0

SERVED = """
import pathlib, time
import torch
import gradwire as gw
import gradwire_server as gws

weight = torch.ones(3, dtype=torch.float64, requires_grad=True)

def signal_and_wait(marker):
    pathlib.Path(marker).touch()
    end = time.monotonic() + 60
    while time.monotonic() < end and not gw.cancelled():
        time.sleep(0.01)

class Blocking(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, marker):
        ctx.marker = marker
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        signal_and_wait(ctx.marker)
        return gradient * 2, None

class BlockingSGD(torch.optim.SGD):
    marker = ""

    def step(self, closure=None):
        if BlockingSGD.marker:
            signal_and_wait(BlockingSGD.marker)
        return super().step(closure)

gws.expose(BlockingSGD)

@gws.expose
def scale(x):
    return x * weight

@gws.expose
def block(x, marker):
    signal_and_wait(marker)
    return x * weight

@gws.expose
def block_in_backward(x, marker):
    return Blocking.apply(x * weight, marker)

@gws.expose
def backward_there(x):
    x.sum().backward()

@gws.expose
def block_in_step(marker):
    BlockingSGD.marker = marker

@gws.expose
def echo(x):
    return x

@gws.expose
def through(address, function, *args):
    return gw.connect(address, lost_after=1.0).call(function, *args) * weight

@gws.expose
def relay(address, x, marker):
    worker = gw.connect(address, lost_after=1.0)
    pathlib.Path(marker).touch()
    return worker.echo(x)

@gws.expose
def train(address, marker):
    # One step with a layer that another worker shares, which blocks there.
    worker = gw.connect(address, lost_after=1.0)
    layer = worker.get("shared")
    optimizer = gw.optim.DistributedOptimizer(BlockingSGD, [layer], lr=0.1)
    layer(torch.ones(3).double()).sum().backward()
    worker.block_in_step(marker)
    optimizer.step()

@gws.expose
class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x):
        return x * self.weight
"""


def wait_for(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, f"{what} never happened"
        time.sleep(0.01)


def holds_nothing(address: str) -> bool:
    with gw.connect(address) as worker:
        return all(context.results == 0 and context.arguments == 0 for context in worker.inspect().contexts)


class Victim:
    """A daemon that is killed or stopped once it is in the middle of something."""

    def __init__(self, daemon: Daemon, number: signal.Signals, marker: Path) -> None:
        self.daemon, self.number, self.marker = daemon, number, marker

    def strike_when_marked(self) -> float:
        wait_for(self.marker.exists, "the marker")
        return self.strike()

    def strike(self) -> float:
        self.daemon.signal(self.number)
        return time.monotonic()

    def revive(self) -> None:
        """A stopped process must be able to end with the test."""
        if self.number == signal.SIGSTOP:
            self.daemon.signal(signal.SIGCONT)


@pytest.fixture(
    params=[
        pytest.param(signal.SIGKILL, id="killed"),
        pytest.param(signal.SIGSTOP, id="stopped"),
    ]
)
def number(request: pytest.FixtureRequest) -> signal.Signals:
    chosen: signal.Signals = request.param
    return chosen


def check_window(struck: float) -> None:
    # Noticed well before any default of gRPC's own, though not to the second: machines are noisy.
    assert time.monotonic() - struck < 20


def test_a_worker_that_dies_in_a_call(launch: Launch, tmp_path: Path, number: signal.Signals) -> None:
    daemon = launch(SERVED)
    victim = Victim(daemon, number, tmp_path / "marker")
    worker = gw.connect(daemon.address, lost_after=LOST_AFTER)
    future = worker.call_async("block", torch.ones(3).double(), str(victim.marker))
    struck = victim.strike_when_marked()
    with pytest.raises(gw.WorkerLost) as caught:
        future.result(DEADLINE)
    check_window(struck)
    victim.revive()
    assert daemon.address in str(caught.value)


def test_a_worker_that_dies_in_backward(launch: Launch, tmp_path: Path, number: signal.Signals) -> None:
    daemon, survivor = launch(SERVED), launch(SERVED)
    victim = Victim(daemon, number, tmp_path / "marker")
    dying = gw.connect(daemon.address, lost_after=LOST_AFTER)
    living = gw.connect(survivor.address)
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)

    def step() -> str:
        loss = dying.block_in_backward(living.scale(x), str(victim.marker)).sum() + living.scale(x).sum()
        try:
            loss.backward()
        except gw.WorkerLost as error:
            return str(error)  # not the error itself: its traceback keeps the graph
        return ""

    running = default_peer().pool.submit(step)
    struck = victim.strike_when_marked()
    assert daemon.address in running.result(DEADLINE)
    check_window(struck)
    wait_for(lambda: holds_nothing(survivor.address), "the survivor letting go")
    victim.revive()


def test_a_worker_that_dies_while_a_backward_that_it_set_off_waits_for_it(
    launch: Launch, tmp_path: Path, number: signal.Signals
) -> None:
    """The client runs that backward on behalf of the worker, which it asks for something meanwhile."""
    daemon = launch(SERVED)
    victim = Victim(daemon, number, tmp_path / "marker")
    worker = gw.connect(daemon.address, lost_after=LOST_AFTER)

    class Asking(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            asked.append(worker.call_async("block", gradient, str(victim.marker)))
            return asked[0].result() * 2

    asked: list[gw.CallFuture] = []
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    future = worker.call_async("backward_there", Asking.apply(x))
    futures.wait([future], 0)  # so that the connection's own threads read
    struck = victim.strike_when_marked()
    with pytest.raises(gw.WorkerLost, match=daemon.address):
        asked[0].result(DEADLINE)
    with pytest.raises(gw.WorkerLost, match=daemon.address):
        future.result(DEADLINE)
    check_window(struck)
    victim.revive()
    del future, asked[:]


def test_a_worker_that_dies_in_an_optimizer_step(
    launch: Launch, tmp_path: Path, number: signal.Signals
) -> None:
    daemon, survivor = launch(SERVED), launch(SERVED)
    victim = Victim(daemon, number, tmp_path / "marker")
    dying = gw.connect(daemon.address, lost_after=LOST_AFTER)
    living = gw.connect(survivor.address)
    model = torch.nn.Sequential(dying.create("Layer"), living.create("Layer"))

    class BlockingSGD(torch.optim.SGD):
        pass

    optimizer = gw.optim.DistributedOptimizer(BlockingSGD, [model], lr=0.1)
    dying.block_in_step(str(victim.marker))
    model(torch.ones(3).double()).sum().backward()
    step = default_peer().pool.submit(optimizer.step)
    struck = victim.strike_when_marked()
    # They had agreed, and the other has stepped: the error says where the step was made, and where not.
    with pytest.raises(gw.StepTorn, match=daemon.address) as caught:
        step.result(90)
    assert caught.value.made == (survivor.address,)
    assert caught.value.unknown + caught.value.failed == (daemon.address,)
    # It was lost after a second, and nobody asked it for long what became of its step.
    assert time.monotonic() - struck < LOST_AFTER + 8
    victim.revive()


USES: dict[str, Callable[[gw.RemoteWorker, torch.nn.Module, gw.optim.DistributedOptimizer], object]] = {
    "call": lambda worker, model, optimizer: worker.echo(1),
    "ping": lambda worker, model, optimizer: worker.ping(),
    "describe": lambda worker, model, optimizer: worker.describe(),
    "forward": lambda worker, model, optimizer: model(torch.ones(3).double()),
    "zero_grad": lambda worker, model, optimizer: optimizer.zero_grad(),
    "state_dict": lambda worker, model, optimizer: optimizer.state_dict(),
    "clip": lambda worker, model, optimizer: optimizer.clip_grad_norm_(1.0),
    "step": lambda worker, model, optimizer: optimizer.step(),
}


@pytest.mark.parametrize("use", USES)
def test_whoever_uses_dead_workers_is_told_as_soon_as_they_count_as_lost(launch: Launch, use: str) -> None:
    """However long connecting to them for the first time might have taken."""
    daemons = launch(SERVED), launch(SERVED)
    workers = gw.connect([daemon.address for daemon in daemons], lost_after=LOST_AFTER, connect_timeout=100.0)
    model = torch.nn.Sequential(*(worker.create("Layer") for worker in workers))
    optimizer = gw.optim.DistributedOptimizer(torch.optim.SGD, [model], lr=0.1)
    model(torch.ones(3).double()).sum().backward()
    for daemon in daemons:
        daemon.signal(signal.SIGKILL)
        daemon.wait()
    for _ in range(2):  # while the links may still be mended, and when they have ended
        start = time.monotonic()
        with pytest.raises((gw.WorkerLost, gw.StepRefused), match=daemons[0].address):
            USES[use](workers[0], model, optimizer)
        assert time.monotonic() - start < LOST_AFTER + 10


def test_threads_that_use_a_dead_worker_are_all_told_at_once(launch: Launch) -> None:
    daemon = launch(SERVED)
    worker = gw.connect(daemon.address, lost_after=LOST_AFTER, connect_timeout=100.0)
    daemon.signal(signal.SIGKILL)
    daemon.wait()
    with pytest.raises(gw.WorkerLost):
        worker.echo(0)
    start = time.monotonic()
    with futures.ThreadPoolExecutor(20) as pool:
        uses = [pool.submit(worker.echo, number) for number in range(20)]
        for one in uses:
            assert isinstance(one.exception(DEADLINE), gw.WorkerLost)
    assert time.monotonic() - start < LOST_AFTER + 10


def test_a_worker_that_dies_in_a_large_transfer(launch: Launch, number: signal.Signals) -> None:
    daemon = launch(SERVED)
    worker = gw.connect(daemon.address, lost_after=LOST_AFTER)
    worker.echo(1)
    future = worker.call_async("echo", torch.zeros(40_000_000))
    struck = Victim(daemon, number, Path()).strike()
    with pytest.raises(gw.WorkerLost, match=daemon.address):
        future.result(DEADLINE)
    check_window(struck)
    if number == signal.SIGSTOP:
        daemon.signal(signal.SIGCONT)


@pytest.mark.parametrize("who", ["middle", "last"])
@pytest.mark.parametrize("phase", ["block", "block_in_backward"])
def test_a_death_in_a_chain(
    launch: Launch, tmp_path: Path, number: signal.Signals, who: str, phase: str
) -> None:
    middle, last = launch(SERVED), launch(SERVED)
    marker = tmp_path / "marker"
    worker = gw.connect(middle.address, lost_after=LOST_AFTER)
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    victim = Victim(middle if who == "middle" else last, number, marker)

    def step() -> None:
        worker.through(last.address, phase, x, str(marker)).sum().backward()

    running = default_peer().pool.submit(step)
    struck = victim.strike_when_marked()
    with pytest.raises(gw.WorkerLost, match=victim.daemon.address):
        running.result(DEADLINE)
    check_window(struck)
    if who == "last":
        wait_for(lambda: holds_nothing(middle.address), "the middle letting go")
    victim.revive()


@pytest.mark.parametrize("who", ["middle", "last"])
def test_a_death_in_a_large_transfer_in_a_chain(
    launch: Launch, tmp_path: Path, number: signal.Signals, who: str
) -> None:
    middle, last = launch(SERVED), launch(SERVED)
    victim = Victim(middle if who == "middle" else last, number, tmp_path / "marker")
    worker = gw.connect(middle.address, lost_after=LOST_AFTER)
    future = worker.call_async("relay", last.address, torch.zeros(40_000_000), str(victim.marker))
    struck = victim.strike_when_marked()
    with pytest.raises(gw.WorkerLost, match=victim.daemon.address):
        future.result(DEADLINE)
    check_window(struck)
    victim.revive()


def test_a_middle_worker_that_dies_in_a_step(launch: Launch, tmp_path: Path, number: signal.Signals) -> None:
    """It trains what the last worker has, on behalf of a client."""
    served = SERVED + "\nshared = Layer()\n"
    middle = launch(served)
    last = launch(served, "--lease", "1", "--lost-after", "1", "--expose-instance", "served:shared")
    victim = Victim(middle, number, tmp_path / "marker")
    worker = gw.connect(middle.address, lost_after=LOST_AFTER)
    future = worker.call_async("train", last.address, str(victim.marker))
    struck = victim.strike_when_marked()
    with pytest.raises(gw.WorkerLost, match=middle.address):
        future.result(DEADLINE)
    check_window(struck)
    # The last one lets go of the step, and others can train.
    with gw.connect(last.address) as survivor:
        survivor.block_in_step("")
        wait_for(lambda: survivor.inspect().calls == 0, "the last one being done")
        layer = survivor.get("shared")
        before = layer.state_dict()["weight"]
        optimizer = gw.optim.DistributedOptimizer(torch.optim.SGD, [layer], lr=0.1)
        optimizer.zero_grad()  # the middle called in the context of its caller
        layer(torch.ones(3).double()).sum().backward()
        optimizer.step()
        expected = before - 0.1
        assert torch.equal(layer.state_dict()["weight"], expected)
        victim.revive()
        if number == signal.SIGSTOP:
            # Awake, it finds that it was given up, and has no part in this any more.
            with gw.connect(middle.address) as awake:
                wait_for(lambda: awake.inspect().calls == 0, "the middle giving up")
            assert torch.equal(layer.state_dict()["weight"], expected)


def test_the_next_step_with_a_restarted_worker_works(launch: Launch, tmp_path: Path) -> None:
    daemon = launch(SERVED)
    worker = gw.connect(daemon.address, lost_after=LOST_AFTER)
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    loss = worker.scale(x).sum()
    daemon.signal(signal.SIGKILL)
    daemon.wait()
    with pytest.raises(gw.LinkError):
        loss.backward()
    again = launch(SERVED, bind=daemon.address)
    assert again.address == daemon.address
    worker.scale(x).sum().backward()
    assert torch.equal(x.grad, torch.ones(3).double())


CLIENT = """
import sys, torch
import gradwire as gw
worker = gw.connect(sys.argv[1])
x = torch.ones(1000, dtype=torch.float64, requires_grad=True)
kept = [worker.echo(x * i) for i in range(20)]
layer = worker.create("Layer")
named = worker.remote("echo", x)
print("holding", flush=True)
sys.stdin.read()
"""


def test_what_a_client_held_goes_with_its_lease(launch: Launch, tmp_path: Path) -> None:
    daemon = launch(SERVED, "--lease", "1")
    (tmp_path / "client.py").write_text(textwrap.dedent(CLIENT))
    with gw.connect(daemon.address) as worker:
        clients = []
        for _ in range(3):
            client = subprocess.Popen(
                [sys.executable, str(tmp_path / "client.py"), daemon.address],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            assert client.stdout is not None
            assert client.stdout.readline() == "holding\n"
            clients.append(client)
        assert sum(context.results for context in worker.inspect().contexts) >= 60
        for client in clients:
            client.kill()
            client.wait(DEADLINE)
            for pipe in (client.stdin, client.stdout):
                assert pipe is not None
                pipe.close()
        wait_for(lambda: holds_nothing(daemon.address), "the lease running out")
        wait_for(lambda: len(worker.inspect().clients) <= 2, "the clients being forgotten")
