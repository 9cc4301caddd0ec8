"""Trainers that do not wait for one another: nobody computes with half a step, whenever it is made."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tests.training import models
from tests.training.conftest import Launch, Served, wait_until
from tests.training.test_shared import Prepared, Trainers, said, trainers

import gradwire as gw
import gradwire.training.distributed_step
import gradwire_server.objects.access

__all__ = ["trainers"]  # a fixture

X = torch.arange(1.0, 5.0, dtype=torch.float64)
OLD = torch.ones(4, dtype=torch.float64)
NEW = OLD - X
"""The weight before and after a step with the gradient X and the learning rate 1."""


def step(module: Any, optimizer_class: type[torch.optim.Optimizer] = torch.optim.SGD) -> None:
    """Another trainer's pass, with a step."""
    with gw.context() as context:
        context.backward((module(X)).sum())
        gw.optim.DistributedOptimizer(optimizer_class, [module], lr=1.0).step(context)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


def settles_or(asked: Future[Any], waits: Callable[[], bool]) -> None:
    """Returns when something that was asked is over, or is seen to wait."""
    assert wait_until(lambda: asked.done() or waits())


def waits_to_read(served: Served) -> Callable[[], bool]:
    return lambda: served.worker._objects.parameters.access.waiting_reads == 1


def waits_to_change(served: Served) -> Callable[[], bool]:
    access = served.worker._objects.parameters.access
    return lambda: any(not write.is_under_way for write in list(access._writes))


@pytest.mark.parametrize("stale", ["allow", "error"])
class TestInTheMiddleOfAStep:
    def test_a_forward_waits_for_the_new_parameters(
        self, a: Served, pool: ThreadPoolExecutor, stale: str
    ) -> None:
        module = a.handle.create("Stops", stale=stale)
        with models.in_a_step as stop:
            stepping = pool.submit(step, module, models.InTwoHalves)
            assert stop.reached.wait(20)
            with torch.no_grad():
                asked = pool.submit(module, X)
            settles_or(asked, waits_to_read(a))
            stop.go_on()
            stepping.result(20)
        bias = -OLD
        assert torch.equal(asked.result(20), X * NEW + bias)

    def test_a_backward_waits_for_the_new_parameters(
        self, a: Served, pool: ThreadPoolExecutor, stale: str
    ) -> None:
        module = a.handle.create("Stops", stale=stale)
        x = X.clone().requires_grad_()
        loss = module(x).sum()
        with models.in_a_step as stop:
            stepping = pool.submit(step, module, models.InTwoHalves)
            assert stop.reached.wait(20)
            asked = pool.submit(loss.backward)
            settles_or(asked, waits_to_read(a))
            stop.go_on()
            stepping.result(20)
        if stale == "error":
            with pytest.raises(gw.StaleParameters, match="weight, bias"):
                asked.result(20)
            assert x.grad is None
        else:
            asked.result(20)
            assert x.grad is not None
            assert torch.equal(x.grad, NEW)


@pytest.mark.parametrize("stale", ["allow", "error"])
class TestAStepInTheMiddle:
    def test_of_a_backward_waits_for_its_end(self, a: Served, pool: ThreadPoolExecutor, stale: str) -> None:
        module = a.handle.create("Stops", stale=stale)
        x = X.clone().requires_grad_()
        loss = module(x).sum()
        with models.in_a_backward as stop:
            backward = pool.submit(loss.backward)
            assert stop.reached.wait(20)
            stepping = pool.submit(step, module)
            settles_or(stepping, waits_to_change(a))
            stop.go_on()
            backward.result(20)
            stepping.result(20)
        assert x.grad is not None
        assert torch.equal(x.grad, OLD)
        assert torch.equal(module.state_dict()["weight"], NEW)

    def test_of_a_forward_waits_for_its_end(self, a: Served, pool: ThreadPoolExecutor, stale: str) -> None:
        module = a.handle.create("Stops", stale=stale)
        with gw.context() as context:
            context.backward(module(X).sum())
            optimizer = gw.optim.DistributedOptimizer(torch.optim.SGD, [module], lr=1.0)
            with models.in_a_forward as stop:
                asked = pool.submit(module, X)
                assert stop.reached.wait(20)
                stepping = pool.submit(optimizer.step, context)
                settles_or(stepping, waits_to_change(a))
                stop.go_on()
                stepping.result(20)
        assert torch.equal(asked.result(20), X)

    def test_of_a_forward_that_waits_for_another_worker_is_made_at_once(
        self, a: Served, b: Served, pool: ThreadPoolExecutor, stale: str
    ) -> None:
        module, other = a.handle.create("Stops", stale=stale), b.handle.create("Stops")
        with models.in_a_forward as stop:
            asked = pool.submit(module.through, X, other)
            assert stop.reached.wait(20)
            pool.submit(step, module).result(20)
            stop.go_on()
        assert torch.equal(asked.result(20), X)
        assert torch.equal(module.state_dict()["bias"], -OLD)

    def test_of_a_backward_that_waits_for_another_worker_is_noticed(
        self, a: Served, b: Served, pool: ThreadPoolExecutor, stale: str
    ) -> None:
        module, other = a.handle.create("Stops", stale=stale), b.handle.create("Stops")
        x = X.clone().requires_grad_()
        loss = module.through(x, other).sum()
        with models.in_a_backward as stop:
            backward = pool.submit(loss.backward)
            assert stop.reached.wait(20)
            pool.submit(step, module).result(20)
            stop.go_on()
        optimizer = gw.optim.DistributedOptimizer(torch.optim.SGD, [module], lr=1.0)
        if stale == "error":
            with pytest.raises(gw.StaleParameters, match="weight, bias"):
                backward.result(20)
            with pytest.raises(gw.StepRefused, match="no gradients"):  # it has left none
                optimizer.step()
        else:
            backward.result(20)
            assert x.grad is not None
            assert torch.equal(x.grad, OLD)
            optimizer.step()

    def test_of_a_backward_that_is_held_open_is_noticed(
        self, a: Served, pool: ThreadPoolExecutor, stale: str
    ) -> None:
        module = a.handle.create("Stops", stale=stale)
        x = X.clone().requires_grad_()
        second = module.recur(module.recur(x) * 2)

        def step_meanwhile(gradient: torch.Tensor) -> None:
            pool.submit(step, module).result(20)

        # In the trainer's backward, between the gradients of the last two calls.
        second.register_hook(step_meanwhile)
        loss = module.recur(second * 2).sum()
        if stale == "error":
            with pytest.raises(gw.StaleParameters, match="weight, bias"):
                loss.backward()
        else:
            loss.backward()
            assert x.grad is not None
            # In each of the two earlier calls, three times the gradient: once through the state, and twice
            # through the argument. They are all added up before they meet the weight.
            assert torch.equal(x.grad, 3 * NEW * 3 * NEW)


class TestWhatTakesTooLongToWaitFor:
    def test_a_backward_is_overtaken_and_refused(
        self, a: Served, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(gradwire_server.objects.access, "_LONGEST_READ_SECONDS", 0.1)
        module = a.handle.create("Stops", stale="allow")
        loss = module(X.clone().requires_grad_()).sum()
        with models.in_a_backward as stop:
            backward = pool.submit(loss.backward)
            assert stop.reached.wait(20)
            pool.submit(step, module).result(20)
            stop.go_on()
        with pytest.raises(gw.StaleParameters, match="too long"):
            backward.result(20)

    def test_the_backward_of_a_forward_that_was_overtaken_is_refused(
        self, a: Served, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(gradwire_server.objects.access, "_LONGEST_READ_SECONDS", 0.1)
        module = a.handle.create("Stops", stale="allow")
        with models.in_a_forward as stop:
            asked = pool.submit(module, X)
            assert stop.reached.wait(20)
            pool.submit(step, module).result(20)
            stop.go_on()
        with pytest.raises(gw.StaleParameters, match="too long"):
            asked.result(20).sum().backward()


def test_parameters_that_are_sent_themselves_are_those_of_one_moment(a: Served) -> None:
    """A large tensor is read while it is sent, and its version counter does not tell here that it changes."""
    module = a.handle.create("Stops", stale="allow")
    executor, results = a.worker._servicer._executor, []
    compute = executor._compute
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            executor,
            "_compute",
            lambda *args, **kwargs: results.append(compute(*args, **kwargs)) or results[-1],
        )
        module.weights()["weight"].sum().backward()
    ((sent, _),) = results
    step(module)
    assert torch.equal(sent["weight"], OLD)
    assert torch.equal(sent["bias"], OLD * 0)


def test_a_state_can_be_loaded_in_the_middle_of_a_pass_where_that_is_allowed(a: Served) -> None:
    module = a.handle.create("Stops", stale="allow")
    x = X.clone().requires_grad_()
    loss = module(x).sum()
    module.load_state_dict({"weight": X * 5, "bias": X})
    loss.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, X * 5)


class TestTurns:
    def test_trainers_step_in_the_order_in_which_they_came(
        self, a: Served, b: Served, pool: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # So that each is told many times that it has to come again, however slow this machine is.
        monkeypatch.setattr(gradwire.training.distributed_step, "_PATIENCE_SECONDS", 0.01)
        monkeypatch.setattr(gradwire_server.objects.access, "_KEEP_PLACE_SECONDS", 30.0)
        module = a.handle.create("Layer", 4, stale="allow")
        access = a.worker._objects.parameters.access
        models.stepped_in_order.clear()
        rates = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]
        held = Prepared(monkeypatch, [module, b.handle.create("Layer", 4)])

        def train(rate: float) -> None:
            optimizer = gw.optim.DistributedOptimizer(models.InOrder, [module], lr=rate)
            with gw.context() as context:
                context.backward(module(torch.ones(1, 4, dtype=torch.float64)).sum())
                optimizer.step(context)

        with ThreadPoolExecutor(len(rates)) as trainers:
            asked = []
            for count, rate in enumerate(rates, 1):
                asked.append(trainers.submit(train, rate))
                assert wait_until(lambda count=count: len(access._reservation_queue) == count)
            held.go_on()
            for one in asked:
                one.result(30)
        assert models.stepped_in_order == rates


TRAINER = """
import sys, torch, gradwire as gw
torch.set_num_threads(1)
module = gw.connect(sys.argv[1]).get("uniform")
opt = gw.optim.DistributedOptimizer(torch.optim.Adam, [module], lr=0.01)
print("ready", flush=True)
input()
for _ in range(int(sys.argv[2])):
    opt.zero_grad()
    module(torch.ones((), dtype=torch.float64)).backward()
    opt.step()
"""


def test_trainers_in_threads_never_meet_half_a_step(a: Served) -> None:
    module = a.handle.create("Uniform", 100_000, name="uniform", stale="allow")
    ready = threading.Barrier(3)

    def train() -> None:
        optimizer = gw.optim.DistributedOptimizer(torch.optim.Adam, [module], lr=0.01)
        ready.wait(20)
        for _ in range(20):
            with gw.context() as context:
                context.backward(module(torch.ones((), dtype=torch.float64)))
                optimizer.step(context)

    with ThreadPoolExecutor(3) as pool:
        for done in [pool.submit(train) for _ in range(3)]:
            done.result(60)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("size", [50, 1_000_000])
def test_trainers_in_processes_never_meet_half_a_step(daemon: Launch, trainers: Trainers, size: int) -> None:
    """4,500 steps of three trainers on a small module, and 300 on one of 8 MB."""
    steps = 1500 if size < 1000 else 100
    served = daemon()
    with gw.connect(served.address) as handle:
        module = handle.create("Uniform", size, name="uniform", stale="allow")
        started = [trainers.start(TRAINER, served.address, steps) for _ in range(3)]
        for process in started:
            assert said(process, "ready")
        for process in started:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        for process in started:
            assert process.wait(1500) == 0
        weight = module.state_dict()["weight"]
        assert weight.min() == weight.max() < -1.0
