"""A process that trains and serves: whom it calls can call it back, and gradients flow through."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.autograd import calling_back
from tests.autograd.comparing import assert_close
from tests.integration.daemons import Daemon

import gradwire as gw
import gradwire_server as gws
from gradwire_server.objects.exposing import Instance

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    daemon = Daemon(["tests.autograd.calling_back", "--bind", "127.0.0.1:0", "--name", "back"], cwd=ROOT)
    try:
        yield daemon.wait_until_ready().address
    finally:
        daemon.stop()


@pytest.fixture(params=[True, False], ids=["same host", "network"])
def back(address: str, request: pytest.FixtureRequest) -> Iterator[gw.RemoteWorker]:
    """A worker that calls back; nothing was computed there yet."""
    with gw.connect(address, same_host=request.param) as worker:
        yield worker


class Trainer:
    """What this process serves, with a parameter of its own."""

    def __init__(self) -> None:
        self.bias = torch.tensor([0.3, 0.7, -1.1], dtype=torch.float64, requires_grad=True)

    def answer(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(-x * self.bias) + x

    def rally(self, x: torch.Tensor, strokes: int) -> torch.Tensor:
        x = x * self.bias
        return x if strokes == 0 else torch.sin(gw.caller().rally(x, strokes - 1))

    def gradient_in_context(self) -> torch.Tensor | None:
        return gw.current_context().gradients().get(self.bias)

    @property
    def functions(self) -> tuple[Callable[..., Any], ...]:
        return self.answer, self.rally, self.gradient_in_context


class Oracle:
    """The same in one process."""

    def __init__(self) -> None:
        self.weight = calling_back.weight.detach().clone().requires_grad_()
        self.bias = Trainer().bias

    def answer(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(-x * self.bias) + x

    def between(self, x: torch.Tensor, times: int) -> torch.Tensor:
        for _ in range(times):
            x = self.answer(torch.sin(x) * self.weight) + x
        return x * self.weight

    def rally(self, x: torch.Tensor, strokes: int, is_trainer: bool = False) -> torch.Tensor:
        x = x * (self.bias if is_trainer else self.weight)
        if strokes == 0:
            return x
        answered = self.rally(x, strokes - 1, not is_trainer)
        return torch.sin(answered) if is_trainer else torch.tanh(answered)


def leaf() -> torch.Tensor:
    return torch.tensor([0.2, -0.4, 0.9], dtype=torch.float64, requires_grad=True)


SHAPES: dict[str, tuple[Callable[..., torch.Tensor], Callable[..., torch.Tensor]]] = {
    "once": (
        lambda back, trainer, x: back.between(x, "answer"),
        lambda oracle, x: oracle.between(x, 1),
    ),
    "three times": (
        lambda back, trainer, x: back.between(x, "answer", 3),
        lambda oracle, x: oracle.between(x, 3),
    ),
    "to and fro": (
        lambda back, trainer, x: back.rally(x, 7),
        lambda oracle, x: oracle.rally(x, 7),
    ),
    "beside what is local": (
        lambda back, trainer, x: back.between(x * trainer.bias, "answer") * trainer.answer(x),
        lambda oracle, x: oracle.between(x * oracle.bias, 1) * oracle.answer(x),
    ),
}


@pytest.mark.parametrize("how", ["plain", "twice", "context", "grad", "inputs"])
@pytest.mark.parametrize("shape", SHAPES)
def test_gradients_through_callbacks_are_those_of_one_process(
    shape: str, how: str, back: gw.RemoteWorker
) -> None:
    compute, in_one_process = SHAPES[shape]
    trainer, x = Trainer(), leaf()
    oracle, y = Oracle(), leaf()
    expected = in_one_process(oracle, y).sum()
    with gws.Worker(*trainer.functions):
        if how == "context":
            with gw.context() as context:
                context.backward(compute(back, trainer, x).sum())
                gradients = context.gradients()
                found = gradients[x], gradients[trainer.bias], back.gradient()
            assert x.grad is None
            assert trainer.bias.grad is None
            expected.backward()
        elif how in ("grad", "inputs"):
            back.forget_gradient()
            loss = compute(back, trainer, x).sum()
            if how == "grad":
                found = *torch.autograd.grad(loss, [x, trainer.bias]), None
            else:
                loss.backward(inputs=[x, trainer.bias])
                found = x.grad, trainer.bias.grad, back.gradient()
            expected.backward(inputs=[y, oracle.bias])
        else:
            back.forget_gradient()
            loss = compute(back, trainer, x).sum()
            for keep in [True, False] if how == "twice" else [False]:
                loss.backward(retain_graph=keep)
                expected.backward(retain_graph=keep)
            found = x.grad, trainer.bias.grad, back.gradient()
            # The parameter is this process's own, and so is the backward: nothing is in a context.
            assert gw.current_context().gradients() == {}
    for one, other, name in zip(found, (y.grad, oracle.bias.grad, oracle.weight.grad), "xbw", strict=True):
        assert_close(one, other, name)


def test_second_derivatives_through_a_callback(back: gw.RemoteWorker) -> None:
    trainer, x, oracle, y = Trainer(), leaf(), Oracle(), leaf()
    with gws.Worker(*trainer.functions):
        (first,) = torch.autograd.grad(back.between(x, "answer").sum(), x, create_graph=True)
        (first * first).sum().backward()
    (expected,) = torch.autograd.grad(oracle.between(y, 1).sum(), y, create_graph=True)
    (expected * expected).sum().backward()
    assert_close(x.grad, y.grad, "x")
    assert_close(trainer.bias.grad, oracle.bias.grad, "bias")


def test_a_worker_is_reached_whether_it_started_before_or_after_the_link_was_opened(address: str) -> None:
    trainer = Trainer()
    with gw.connect(address) as before:
        with pytest.raises(gw.UnknownFunction, match="serves no functions"):
            before.send_request("answer", leaf())
        with gws.Worker(trainer.answer), gw.connect(address, lost_after=9) as after:
            for worker in (before, after):
                torch.testing.assert_close(worker.send_request("answer", leaf()), trainer.answer(leaf()))
        # The worker is stopped; the link is this program's, and stays.
        with pytest.raises(gw.UnknownFunction, match="serves no functions"):
            before.send_request("answer", leaf())
        assert before.double(21) == 42
        with gws.Worker(trainer.rally):
            torch.testing.assert_close(before.send_request("rally", leaf(), 0), leaf() * trainer.bias)
            with pytest.raises(gw.UnknownFunction, match="answer"):
                before.send_request("answer", leaf())


def test_a_backward_through_a_worker_that_was_stopped_meanwhile(back: gw.RemoteWorker) -> None:
    """What it computed for this process is part of this process's graph, not of the worker."""
    trainer, x, oracle, y = Trainer(), leaf(), Oracle(), leaf()
    with gws.Worker(*trainer.functions):
        loss = back.between(x, "answer").sum()
    loss.backward()
    oracle.between(y, 1).sum().backward()
    assert_close(x.grad, y.grad, "x")
    assert_close(trainer.bias.grad, oracle.bias.grad, "bias")


def test_what_others_compute_here_stays_apart_from_what_this_process_trains(back: gw.RemoteWorker) -> None:
    trainer, oracle = Trainer(), Oracle()
    x, y = leaf(), leaf()
    with gws.Worker(*trainer.functions) as server:
        of_this_one = back.between(x, "answer").sum()
        gradient_of_other, bias_of_other = back.train_for_itself(server.address, "answer", leaf())
        assert trainer.bias.grad is None
        of_this_one.backward()
    oracle.between(y, 1).sum().backward()
    assert_close(x.grad, y.grad, "x")
    assert_close(trainer.bias.grad, oracle.bias.grad, "bias")
    other, z = Oracle(), leaf()
    other.answer(z).sum().backward()
    assert_close(gradient_of_other, z.grad, "x of the other")
    assert_close(bias_of_other, other.bias.grad, "bias of the other")


class Scale(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factor = torch.nn.Parameter(torch.tensor([0.5, 2.0, -1.0], dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Shift(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.offset = torch.nn.Parameter(torch.tensor([0.1, 0.2, -0.3], dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.offset


def test_a_process_that_calls_itself_is_its_own_worker(back: gw.RemoteWorker) -> None:
    """In one graph with calls to another worker, which calls it back."""
    trainer, oracle, x, y = Trainer(), Oracle(), leaf(), leaf()
    with gws.Worker(Scale, *trainer.functions) as server, gw.connect(server.address) as itself:
        scale = itself.create("Scale")
        optimizer = gw.optim.DistributedOptimizer(torch.optim.SGD, [scale], lr=0.5)
        (back.between(scale(x), "answer").sum() + itself.answer(x).sum()).backward()
        optimizer.step()
        local = Scale()
        (oracle.between(local(y), 1).sum() + oracle.answer(y).sum()).backward()
        torch.optim.SGD(local.parameters(), lr=0.5).step()
        assert_close(x.grad, y.grad, "x")
        assert_close(scale.state_dict()["factor"], local.factor.detach(), "factor")
        # Called back, it is this program that computes; called as a worker, the context has the gradients.
        assert trainer.bias.grad is not None
        assert_close(trainer.bias.grad + itself.gradient_in_context(), oracle.bias.grad, "bias")


@pytest.mark.parametrize("is_called_back", [True, False], ids=["called back", "calls itself"])
def test_parameters_that_a_process_changes_between_forward_and_backward_are_named(
    is_called_back: bool, back: gw.RemoteWorker
) -> None:
    """Also where torch does not notice: to add a parameter saves nothing for backward."""
    shift, x = Shift(), leaf()
    with gws.Worker(Instance("shift", shift)) as server, gw.connect(server.address) as itself:
        loss = (back.between(x, "shift") if is_called_back else itself.shift(x)).sum()
        with torch.no_grad():
            shift.offset.mul_(2)
        with pytest.raises(gw.StaleParameters, match="offset") as caught:
            loss.backward()
    assert caught.value.parameters == ("offset",)


def test_objects_that_are_made_by_calling_back(back: gw.RemoteWorker) -> None:
    """They are made, called and let go of over the link that this process opened."""
    trainer, x, y = Trainer(), leaf(), leaf()
    with gws.Worker(Scale, *trainer.functions) as server:
        made = server._objects.counts.total
        back.create_there("Scale")
        assert server._objects.counts.total == made + 1
        back.call_it(x).sum().backward()
        local = Scale()
        (torch.sin(local(y)) * calling_back.weight.detach()).sum().backward()
        assert_close(x.grad, y.grad, "x")
        back.drop_it()
        give_up_at = time.monotonic() + 20
        while server._objects.counts.total > made:
            back.double(1)  # carries what is let go of, if nothing else does
            assert time.monotonic() < give_up_at


def test_of_several_workers_the_first_is_called_back(address: str) -> None:
    trainer, other = Trainer(), Trainer()
    with gw.connect(address) as back:
        with gws.Worker(trainer.answer), gws.Worker(other.rally) as second:
            assert back.send_request("answer", leaf()).shape == (3,)
            with pytest.raises(gw.UnknownFunction, match="rally"):
                back.send_request("rally", leaf(), 0)
            with gw.connect(second.address) as handle:
                assert handle.rally(leaf(), 0).shape == (3,)
        with gws.Worker(other.rally):
            assert back.send_request("rally", leaf(), 0).shape == (3,)


def test_a_worker_that_could_not_start_leaves_the_process_to_the_next(address: str) -> None:
    trainer = Trainer()
    failed = gws.Worker(trainer.answer, bind="203.0.113.1:1")
    with pytest.raises(gws.BindFailed):
        failed.start()
    with gws.Worker(trainer.answer), gw.connect(address) as back:
        assert back.send_request("answer", leaf()).shape == (3,)


def test_of_several_workers_the_oldest_that_runs_is_called_back(back: gw.RemoteWorker) -> None:
    one, two = gws.Worker(Trainer().answer).start(), gws.Worker(*Trainer().functions).start()
    try:
        assert back.between(leaf(), "answer").shape == (3,)
        one.stop()
        assert back.between(leaf(), "answer").shape == (3,)
    finally:
        one.stop()
        two.stop()


def test_a_callback_that_outlasts_the_grace_period_is_cancelled(back: gw.RemoteWorker) -> None:
    began, ended = threading.Event(), threading.Event()

    def answer(x: torch.Tensor) -> torch.Tensor:
        began.set()
        give_up_at = time.monotonic() + 30
        while not gw.cancelled() and time.monotonic() < give_up_at:
            time.sleep(0.001)
        if gw.cancelled():
            ended.set()
        return x

    worker = gws.Worker(answer).start()
    call = back.call_async("between", leaf(), "answer")
    try:
        assert began.wait(30)
        assert not worker.stop(grace=0.05)
    finally:
        worker.stop()
    assert ended.wait(30)
    # Not Unavailable: the function has run, and a caller that repeats it would run it twice.
    with pytest.raises(gw.Cancelled, match="took too long"):
        call.result(30)
