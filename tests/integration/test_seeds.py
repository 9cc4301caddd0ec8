"""What gradwire draws at random is its own: a user's seed does not decide it, and it draws nothing of the
user's sequences."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from tests.faults.proxy import FaultyProxy
from tests.integration.conftest import Launch
from tests.integration.daemons import DEADLINE
from tests.integration.seeded_trainer import Trainer

import gradwire as gw
import gradwire_server as gws
from gradwire.peers.local import LocalPeer
from gradwire.training.distributed_step import DistributedStep
from gradwire_server.serving.scheduler import CallScheduler

SHARED = """
import random, numpy, torch
import gradwire as gw
import gradwire_server as gws

random.seed(0)
numpy.random.seed(0)
torch.manual_seed(0)

@gws.expose
class Weight(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.tensor(0.0))

    def forward(self, x):
        return self.weight * x

shared = Weight()

@gws.expose
def double(x):
    return 2 * x

@gws.expose
def drawn_around_a_call(address):
    \"\"\"Numbers that a served function draws before and after it called another worker.\"\"\"
    random.seed(1)
    numpy.random.seed(1)
    torch.manual_seed(1)
    numbers = []
    for _ in range(2):
        numbers += [random.random(), float(numpy.random.random()), float(torch.rand(()))]
        gw.connect(address).double(1)
    return numbers

@gws.expose
def relay(address, x):
    return gw.connect(address).double(x)
"""

ORDERS = {
    "both connect first": "a.connect b.connect a.backward b.backward a.step b.step",
    "one is at work when the other connects": "a.connect a.backward b.connect b.backward a.step b.step",
    "one was elsewhere before": "a.visit a.connect b.connect a.backward b.backward a.step b.step",
    "the later one was elsewhere": "a.connect a.backward b.visit b.connect b.backward b.step a.step",
    "both were elsewhere": "a.visit b.visit a.connect b.connect b.backward a.backward a.step b.step",
}


@pytest.mark.parametrize("order", ORDERS.values(), ids=ORDERS)
def test_two_trainers_that_seed_alike_do_not_mix(launch: Launch, order: str) -> None:
    daemon = launch(SHARED, "--expose-instance", "served:shared")
    elsewhere = launch(SHARED)
    addresses = {"visit": (elsewhere.address,), "connect": (daemon.address,)}
    expected = 0.0
    nodes = set()
    with Trainer.pair(1.0, 100.0) as (a, b):
        for word in order.split():
            who, what = word.split(".")
            result = (a if who == "a" else b).do(what, *addresses.get(what, ()))
            if what == "connect":
                nodes.add(result)
            if what == "step":
                expected -= 1.0 if who == "a" else 100.0
                assert result == expected
    assert len(nodes) == 2


def test_workers_whose_modules_seed_alike_can_call_one_another(launch: Launch) -> None:
    first, second = launch(SHARED), launch(SHARED)
    x = torch.ones(3, requires_grad=True)
    workers = gw.connect([first.address, second.address])
    assert len({worker._link.peer.id for worker in workers}) == 2
    with workers[0] as worker, workers[1]:
        worker.relay(second.address, x).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))


def test_a_served_function_draws_the_numbers_that_it_seeded(launch: Launch) -> None:
    first, second = launch(SHARED), launch(SHARED)
    with gw.connect(first.address) as worker:
        drawn = worker.drawn_around_a_call(second.address)
    with seeded(1):
        expected = [
            draw()
            for _ in range(2)
            for draw in (random.random, lambda: float(numpy.random.random()), lambda: float(torch.rand(())))
        ]
    assert drawn == expected


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds all generators for a block, and puts them back as they were."""
    before = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(before[0])
        numpy.random.set_state(before[1])
        torch.set_rng_state(before[2])


def draw() -> list[float]:
    return [random.random(), float(numpy.random.random()), float(torch.rand(()))]


@gws.expose
class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


class Occupied:
    """A function that occupies the only thread of a worker, and tells when it runs."""

    def __init__(self) -> None:
        self.runs, self.may_end = threading.Event(), threading.Event()

    def occupy(self) -> None:
        self.runs.set()
        assert self.may_end.wait(DEADLINE)


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def fail() -> None:
    raise ValueError("on purpose")


def call(address: str, _: Path) -> None:
    with gw.connect(address) as worker:
        worker.double(torch.ones(3))
        worker.call_async("double", torch.ones(100_000)).result()


def train(address: str, folder: Path) -> None:
    with gw.connect(address) as worker:
        model = worker.create("Layer")
        optimizer = gw.optim.DistributedOptimizer(torch.optim.Adam, [model], lr=0.1)
        with gw.context() as context:
            context.backward(model(torch.ones(3)).sum())
            optimizer.step(context)
        model(torch.ones(3)).sum().backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        gw.save(folder / "checkpoint", model, optimizer)
        gw.load(folder / "checkpoint", model, optimizer)


def compress(address: str, _: Path) -> None:
    x = torch.linspace(0, 1, 10_000, requires_grad=True)
    with gw.connect(address, compress=gw.Compression(forward="fp16", backward="int8")) as worker:
        worker.double(x).sum().backward()


def check_gradients(address: str, _: Path) -> None:
    with gw.connect(address) as worker:
        assert gw.gradcheck(worker.double, [torch.ones(2, dtype=torch.float64, requires_grad=True)])


def raise_there(address: str, _: Path) -> None:
    with gw.connect(address) as worker, pytest.raises(ValueError, match="on purpose"):
        worker.fail()


def connect_in_vain(_: str, folder: Path) -> None:
    """Tries a few times, after pauses at random."""
    with pytest.raises(gw.ConnectFailed):
        gw.connect(f"unix:{folder / 'nobody'}", connect_timeout=0.5)


def connect_again(address: str, _: Path) -> None:
    """The link is cut and mended."""
    with FaultyProxy(address, kinds=()).running() as proxy:
        proxy.active = False
        with gw.connect(proxy.address) as worker:
            worker.double(1)
            proxy.cut_all()
            worker.double(1)


@pytest.mark.parametrize(
    "use", [call, train, compress, check_gradients, raise_there, connect_in_vain, connect_again]
)
def test_the_users_sequences_go_on_as_if_gradwire_were_not_there(
    tmp_path: Path, use: Callable[[str, Path], None]
) -> None:
    with seeded(0):
        expected = draw() + draw()
    with seeded(0):
        # Both ends are in this process: neither may draw.
        with gws.Worker(double, fail, Layer, bind="127.0.0.1:0") as worker:
            drawn = draw()
            use(worker.address, tmp_path)
            assert drawn + draw() == expected


def test_the_users_sequences_go_on_after_a_call_was_refused_and_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    occupied = Occupied()
    refused = threading.Event()
    refuse = CallScheduler._refusal

    def noticed(*args: Any) -> gw.ResourceExhausted:
        refused.set()
        return refuse(*args)

    monkeypatch.setattr(CallScheduler, "_refusal", noticed)
    with seeded(0):
        expected = draw()
    with seeded(0):
        options = {"threads": 1, "max_queued_calls": 1}
        with (
            gws.Worker(double, occupied.occupy, bind="127.0.0.1:0", **options) as served,
            gw.connect(served.address) as worker,
        ):
            busy = worker.call_async("occupy")
            assert occupied.runs.wait(DEADLINE)
            waiting = [worker.call_async("double", index) for index in range(3)]
            assert refused.wait(DEADLINE)
            occupied.may_end.set()
            assert [call.result(DEADLINE) for call in (busy, *waiting)] == [None, 0, 2, 4]
            assert draw() == expected


def test_the_users_sequences_go_on_after_another_trainer_was_in_the_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with seeded(0):
        expected = draw()
    with seeded(0), gws.Worker(Layer, bind="127.0.0.1:0") as served, gw.connect(served.address) as worker:
        model = worker.create("Layer")
        optimizer = gw.optim.DistributedOptimizer(torch.optim.SGD, [model], lr=0.1)
        model(torch.ones(3)).sum().backward()
        refusals = [gw.StepRefused("another steps")] * 3
        for refusal in refusals:
            refusal.reason = "busy"
        make = DistributedStep.make

        def refused(step: DistributedStep, *, in_turn: bool) -> None:
            if refusals:
                raise refusals.pop()
            make(step, in_turn=in_turn)

        monkeypatch.setattr(DistributedStep, "make", refused)
        optimizer.step()
        assert not refusals
        assert draw() == expected


def test_nodes_and_links_of_one_seed_have_ids_of_their_own() -> None:
    identities = set()
    for _ in range(3):
        with seeded(0):
            node = LocalPeer()
        identities.add(node.identity.id)
        node.close()
    assert len(identities) == 3
