"""Functions that step the worker's own parameters: what gradients they get, and what forgets them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tests.training import models
from tests.training.conftest import Launch, Served

import gradwire as gw
import gradwire_server as gws

ONE = torch.ones(3, dtype=torch.float64)


@pytest.fixture
def worker(a: Served) -> Iterator[gw.RemoteWorker]:
    a.handle.weight_now(0.0)
    yield a.handle
    a.handle.weight_now(0.0)


class TestAFunctionThatTrainsByItself:
    """It calls loss.backward() and optimizer.step() of torch: its own zero_grad() forgets."""

    def test_steps_as_in_one_process(self, worker: gw.RemoteWorker) -> None:
        for step in range(4):
            assert worker.fit(ONE) == -3.0 * step
            assert torch.equal(worker.weight_now(), ONE * -(step + 1))

    def test_does_so_in_a_process_of_its_own(self, daemon: Launch) -> None:
        with gw.connect(daemon().address) as handle:
            assert [handle.fit(ONE) for _ in range(3)] == [0.0, -3.0, -6.0]

    def test_sends_gradients_to_the_caller(self, worker: gw.RemoteWorker) -> None:
        worker.weight_now(5.0)
        x = ONE.clone().requires_grad_()
        worker.fit(x)
        assert x.grad is not None
        assert torch.equal(x.grad, ONE * 5)
        assert torch.equal(worker.weight_now(), ONE * 4)

    def test_has_nothing_to_do_with_the_gradients_of_callers(self, worker: gw.RemoteWorker) -> None:
        worker.weigh(ONE * 7).backward()
        worker.fit(ONE)
        assert torch.equal(worker.weight_now(), -ONE)
        assert torch.equal(worker.gradient_of_weight(), ONE * 7)


class TestAFunctionThatStepsFromTheContext:
    @pytest.mark.parametrize(
        "step", [lambda worker: worker.step_from_context(), lambda worker: worker.step_by_hand(True)]
    )
    def test_gets_the_gradients_since_the_last_step(
        self, worker: gw.RemoteWorker, step: Callable[[gw.RemoteWorker], None]
    ) -> None:
        for count in range(1, 5):
            worker.weigh(ONE).backward()
            step(worker)
            assert torch.equal(worker.weight_now(), ONE * -count)
            assert worker.gradient_of_weight() is None

    def test_gets_the_sum_of_several_backwards(self, worker: gw.RemoteWorker) -> None:
        for count in range(1, 3):
            for amount in (1, 10):
                worker.weigh(ONE * amount).backward()
                assert worker.gradient_of_weight() is not None  # to look at them does no harm
            worker.step_from_context()
            assert torch.equal(worker.weight_now(), ONE * -11 * count)

    def test_is_told_if_it_has_not_forgotten_those_of_the_last_step(self, worker: gw.RemoteWorker) -> None:
        worker.weigh(ONE).backward()
        worker.step_by_hand(False)
        worker.weigh(ONE).backward()
        with pytest.raises(gw.StepRefused, match="zero_grad"):
            worker.step_by_hand(False)
        assert torch.equal(worker.weight_now(), -ONE)

    def test_has_those_of_each_caller_apart(self, worker: gw.RemoteWorker) -> None:
        def train(amount: int) -> None:
            for _ in range(10):
                with gw.context() as context:
                    context.backward(worker.weigh(ONE * amount))
                    worker.step_from_context()

        with ThreadPoolExecutor(3) as pool:
            for done in [pool.submit(train, amount) for amount in (1, 100, 10000)]:
                done.result(60)
        assert torch.equal(worker.weight_now(), ONE * -10 * 10101)

    def test_without_gradients_is_refused(self, worker: gw.RemoteWorker) -> None:
        with pytest.raises(gw.StepRefused, match="no gradients") as caught:
            worker.step_from_context()
        assert caught.value.reason == "missing"
        assert torch.equal(worker.weight_now(), ONE * 0)

    def test_leaves_grad_alone(self, worker: gw.RemoteWorker) -> None:
        worker.weigh(ONE).backward()
        models.weight.grad = ONE * 9
        worker.step_from_context()
        assert torch.equal(models.weight.grad, ONE * 9)

    def test_keeps_the_gradients_of_a_step_that_failed(
        self, worker: gw.RemoteWorker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail() -> None:
            raise ArithmeticError("not now")

        worker.weigh(ONE).backward()
        with monkeypatch.context() as patch:
            patch.setattr(models.optimizer, "step", fail)
            with pytest.raises(ArithmeticError, match="not now"):
                worker.step_from_context()
        worker.step_from_context()
        assert torch.equal(worker.weight_now(), -ONE)

    def test_is_not_for_an_optimizer_over_workers(self, a: Served) -> None:
        layer = a.handle.create("Layer", 4)
        optimizer = gw.optim.DistributedOptimizer(torch.optim.SGD, [layer], lr=0.1)
        with gw.context() as context, pytest.raises(TypeError, match="its own step"):
            context.step(optimizer)


class SteppingNet(torch.nn.Module):
    """Steps itself from the caller's context."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=1e-3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(torch.tanh(self.first(x)))
        return result

    def step(self) -> None:
        gw.current_context().step(self.optimizer)


def test_trainers_whose_module_steps_itself_do_not_meet_half_a_step() -> None:
    """With stale="allow", a step in a method is kept apart from calls and backwards as any other step is."""

    def train(address: str) -> int:
        with gw.connect(address) as worker:
            module, steps = worker.get("net"), 0
            for _ in range(40):
                with gw.context() as context:
                    context.backward(module(torch.ones(4, 8)).sum())
                    module.step()
                    steps += 1
            return steps

    with gws.Worker(SteppingNet, threads=4) as served, gw.connect(served.address) as worker:
        worker.create("SteppingNet", name="net", stale="allow")
        with ThreadPoolExecutor(3) as pool:
            assert list(pool.map(train, [served.address] * 3)) == [40] * 3
