"""Several trainers on the same modules: every step whole, nobody waits for ever, nothing piles up."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tests.training import models
from tests.training.conftest import HERE, Served, same, wait_until
from torch import nn

import gradwire as gw
import gradwire.training.optimizers
import gradwire_server as gws
import gradwire_server.objects.parameters
from gradwire.training.distributed_step import DistributedStep
from gradwire_server.objects.exposing import Instance

ONE = torch.ones(3, dtype=torch.float64)
X = torch.linspace(-1, 1, 20, dtype=torch.float64).reshape(5, 4)


def count(modules: list[nn.Module], amount: int, steps: int) -> None:
    """Steps so that every module counts `amount` down each time."""
    opt = gw.optim.DistributedOptimizer(torch.optim.SGD, modules, lr=1.0)
    for _ in range(steps):
        with gw.context() as context:
            context.backward(sum(module(ONE * amount) for module in modules))
            opt.step(context)


TRAINER = """
import sys, torch, gradwire as gw
torch.set_num_threads(1)
addresses, amount, steps = sys.argv[1].split(","), int(sys.argv[2]), int(sys.argv[3])
modules = [gw.connect(address).get("counter") for address in addresses]
opt = gw.optim.DistributedOptimizer(torch.optim.SGD, modules, lr=1.0)
print("ready", flush=True)
input()
for _ in range(steps):
    opt.zero_grad()
    sum(module(torch.full((3,), float(amount)).double()) for module in modules).backward()
    opt.step()
"""

HANGING = """
import sys, torch, gradwire as gw
from gradwire.training.distributed_step import DistributedStep
modules = [gw.connect(address).get("counter") for address in sys.argv[1].split(",")]
opt = gw.optim.DistributedOptimizer(torch.optim.SGD, modules, lr=1.0)
sum(module(torch.ones(3).double()) for module in modules).backward()
def hang(step):
    print("prepared", flush=True)
    input()
DistributedStep._commit = hang
opt.step()
"""


class Trainers:
    """Other processes."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, script: str, *args: object) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-c", script, *map(str, args)],
            cwd=HERE,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.processes.append(process)
        return process

    def stop(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.fixture
def trainers() -> Any:
    started = Trainers()
    yield started
    started.stop()


def said(process: subprocess.Popen[str], line: str) -> bool:
    assert process.stdout is not None
    return process.stdout.readline() == line + "\n"


def counter(served: Served) -> Any:
    return served.handle.create("Counting", name="counter", stale="allow")


class TestSeveralTrainers:
    def test_threads_on_one_module_lose_no_step(self, a: Served) -> None:
        module = counter(a)
        with ThreadPoolExecutor(4) as pool:
            for done in [pool.submit(count, [module], amount, 15) for amount in (1, 10, 100, 1000)]:
                done.result(60)
        assert torch.equal(module.state_dict()["total"], ONE * -15 * 1111)

    def test_threads_on_two_workers_in_opposite_order_do_not_block_one_another(
        self, a: Served, b: Served
    ) -> None:
        modules = [counter(a), counter(b)]
        with ThreadPoolExecutor(4) as pool:
            orders = (modules, modules[::-1], modules, modules[::-1])
            amounts = (1, 10, 100, 1000)
            for done in [
                pool.submit(count, order, amount, 8) for order, amount in zip(orders, amounts, strict=True)
            ]:
                done.result(60)
        for module in modules:
            assert torch.equal(module.state_dict()["total"], ONE * -8 * 1111)

    def test_processes_on_two_workers_lose_no_step(self, a: Served, b: Served, trainers: Trainers) -> None:
        modules = [counter(a), counter(b)]
        addresses = [a.worker.address, b.worker.address]
        started = [
            trainers.start(TRAINER, ",".join(order), amount, 15)
            for order, amount in ((addresses, 1), (addresses[::-1], 100))
        ]
        for process in started:
            assert said(process, "ready")
        for process in started:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in started:
            assert process.wait(60) == 0
        for module in modules:
            assert torch.equal(module.state_dict()["total"], ONE * -15 * 101)

    def test_one_optimizer_may_be_stepped_by_several_threads(self, a: Served, b: Served) -> None:
        modules = [counter(a), counter(b)]
        opt = gw.optim.DistributedOptimizer(torch.optim.SGD, modules, lr=1.0)

        def train() -> None:
            for _ in range(8):
                with gw.context() as context:
                    context.backward(sum(module(ONE) for module in modules))
                    opt.step(context)

        with ThreadPoolExecutor(3) as pool:
            for done in [pool.submit(train) for _ in range(3)]:
                done.result(60)
        for module in modules:
            assert torch.equal(module.state_dict()["total"], ONE * -24)

    def test_one_that_is_killed_between_yes_and_commit_lets_the_others_go_on(
        self, trainers: Trainers
    ) -> None:
        with (
            gws.Worker(models, lease=0.5) as one,
            gws.Worker(models, lease=0.5) as two,
            gw.connect(one.address) as handle_one,
            gw.connect(two.address) as handle_two,
        ):
            modules = [counter(Served(one, handle_one)), counter(Served(two, handle_two))]
            process = trainers.start(HANGING, f"{one.address},{two.address}")
            assert said(process, "prepared")
            finished = threading.Event()

            def step() -> None:
                count(modules, 1, 1)
                finished.set()

            with ThreadPoolExecutor(1) as pool:
                done = pool.submit(step)
                assert not finished.wait(1.0)  # it must wait for the other's step
                process.send_signal(signal.SIGKILL)
                process.wait(20)
                done.result(30)
            for module in modules:
                assert torch.equal(module.state_dict()["total"], -ONE)

    def test_modules_that_share_parameters_are_stepped_one_at_a_time(
        self, b: Served, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        outer = nn.Sequential(models.Layer(4))
        with (
            gws.Worker(Instance("outer", outer), Instance("inner", outer[0]), name="both") as worker,
            gw.connect(worker.address) as handle,
        ):
            held = Prepared(monkeypatch, [handle.get("outer"), b.handle.create("Layer", 4)])
            inner = handle.get("inner")
            opt = gw.optim.DistributedOptimizer(torch.optim.SGD, [inner], lr=0.1)
            inner(X).sum().backward()
            with monkeypatch.context() as patch:
                patch.setattr(gradwire.training.optimizers, "_STEP_SECONDS", 0.0)
                with pytest.raises(gw.StepRefused, match="inner") as caught:
                    opt.step()
                assert caught.value.reason == "busy"
            held.go_on()
            opt.step()


class Prepared:
    """A trainer that has everybody's yes, and waits before it commits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, modules: list[nn.Module]) -> None:
        self.opt = gw.optim.DistributedOptimizer(torch.optim.SGD, modules, lr=0.1)
        self._ready, self._go_on = threading.Event(), threading.Event()
        commit = DistributedStep._commit

        def later(step: DistributedStep) -> None:
            if step._remotes is self.opt._remote:
                self._ready.set()
                assert self._go_on.wait(20)
            commit(step)

        monkeypatch.setattr(DistributedStep, "_commit", later)
        self._pool = ThreadPoolExecutor(1)
        self._done = self._pool.submit(self._step, modules)
        assert self._ready.wait(20)

    def _step(self, modules: list[nn.Module]) -> None:
        with gw.context() as context:
            context.backward(sum(module(X).sum() for module in modules))
            self.opt.step(context)

    def go_on(self) -> None:
        self._go_on.set()
        self._done.result(20)
        self._pool.shutdown()


class TestWaitingForAStep:
    @pytest.mark.parametrize(
        "ask",
        [
            lambda module: module.state_dict(),
            lambda module: module.double(),
            lambda module: module.load_state_dict(models.Layer(4).state_dict()),
        ],
        ids=["state_dict", "double", "load_state_dict"],
    )
    def test_takes_no_slot_from_those_that_end_it(
        self, b: Served, monkeypatch: pytest.MonkeyPatch, ask: Callable[[nn.Module], object]
    ) -> None:
        with gws.Worker(models, threads=1) as worker, gw.connect(worker.address) as handle:
            layer = handle.create("Layer", 4)
            held = Prepared(monkeypatch, [layer, b.handle.create("Layer", 4)])
            with ThreadPoolExecutor(1) as pool:
                asked = pool.submit(ask, layer)
                assert wait_until(lambda: worker._scheduler.unfinished == 1)
                assert handle.kind_of(1) == "int"
                held.go_on()
                asked.result(20)

    def test_ends_if_the_other_trainer_stalls(self, b: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        layer = b.handle.create("Layer", 4, name="stalled")
        with gws.Worker(models) as worker, gw.connect(worker.address) as handle:
            held = Prepared(monkeypatch, [layer, handle.create("Layer", 4)])
            with monkeypatch.context() as patch:
                patch.setattr(gradwire_server.objects.parameters, "_RESERVATION_SECONDS", 0.2)
                for ask in (layer.state_dict, layer.double):
                    with pytest.raises(gw.StepRefused, match="stalled") as caught:
                        ask()
                    assert caught.value.reason == "busy"
            with gw.timeout(0.3), pytest.raises((gw.StepRefused, gw.DeadlineExceeded)):
                layer.state_dict()
            held.go_on()
            layer.state_dict()


def test_long_runs_leave_nothing_behind(a: Served, b: Served) -> None:
    lasting = nn.Sequential(models.Layer(4), a.handle.create("Layer", 4), b.handle.create("Layer", 4))
    opt = gw.optim.DistributedOptimizer(torch.optim.Adam, [lasting], lr=0.01)
    store = a.handle._shared_link.engine.container

    def held() -> tuple[int, ...]:
        here = len(store._arguments) + len(store._results)
        return a.objects, b.objects, a.messages, b.messages, here

    def train(steps: int) -> None:
        for step in range(steps):
            passing = a.handle.create("Layer", 4, seed=step)
            also = gw.optim.DistributedOptimizer(torch.optim.SGD, [passing], lr=0.1)
            for optimizer in (opt, also):
                optimizer.zero_grad()
            ref = b.handle.remote("square", X)
            passing(lasting(X) + ref.fetch()).sum().backward()
            opt.clip_grad_norm_(1.0)
            opt.step()
            also.step()
            with gw.context() as context:
                context.backward(lasting(X).sum())
                opt.step(context)

    train(3)
    assert wait_until(lambda: held() == (2, 2, 0, 0, 0)), held()
    contexts = a.contexts, b.contexts
    train(100)
    assert wait_until(lambda: held() == (2, 2, 0, 0, 0)), held()
    assert wait_until(lambda: (a.contexts, b.contexts) == contexts)
    assert len(a.worker._objects._by_identity) == 1 + a.objects
    assert len(a.worker._objects.optimizers) == 1
    before = lasting.state_dict()
    assert same(before, lasting.state_dict())
