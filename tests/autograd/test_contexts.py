"""Explicit contexts: gradients of one pass apart from those of all others, on every worker."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tests.autograd.comparing import Both, assert_close

import gradwire as gw
import gradwire_server as gws
from gradwire.runtime.scope import current_scope

Leaf = Callable[..., torch.Tensor]


def expected_of(trio: Both, x: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients for x, and for the weights of a and b, of `loss_of`."""
    copy = x.detach().clone().requires_grad_()
    a, b = trio.places["a"], trio.places["b"]
    loss = loss_of(trio.oracle_call, copy, scale)
    found = torch.autograd.grad(loss, [copy, a.weight, b.weight])
    return found[0], found[1], found[2]


def loss_of(call: Callable[..., Any], x: torch.Tensor, scale: float) -> torch.Tensor:
    h = call("a", "hop", x * scale, ["b"])
    loss: torch.Tensor = (call("b", "affine", h) * h).sum()
    return loss


def check(trio: Both, context: gw.Context, x: torch.Tensor, scale: float) -> None:
    for_x, for_a, for_b = expected_of(trio, x, scale)
    assert_close(context.gradients()[x], for_x, "x")
    assert_close(trio.a.gradients()["weight"], for_a, "a.weight")
    assert_close(trio.b.gradients()["weight"], for_b, "b.weight")


def test_gradients_go_to_the_context_and_not_to_grad(trio: Both, leaf: Leaf) -> None:
    x = leaf()
    with gw.context() as context:
        context.backward(loss_of(trio.call, x, 1.0))
        check(trio, context, x, 1.0)
    assert x.grad is None
    assert all(found is None for found in trio.remote_gradients().values())


def test_any_number_of_roots_of_any_shape(trio: Both, leaf: Leaf) -> None:
    x, seed = leaf(0), leaf(1).detach()
    copy = x.detach().clone().requires_grad_()
    places = trio.places
    roots = [places["a"].affine(copy), places["b"].dot(copy), copy * 2]
    torch.autograd.backward(roots, [seed, None, seed])
    with gw.context() as context:
        context.backward([trio.a.affine(x), trio.b.dot(x), x * 2], [seed, None, seed])
        assert_close(context.gradients()[x], copy.grad, "x")
        trio.check_parameters()


def test_a_leaf_that_is_a_root_twice_counts_twice(trio: Both, leaf: Leaf) -> None:
    x, one, other = leaf(0), leaf(1).detach(), leaf(2).detach()
    with gw.context() as context:
        context.backward([x, x], [one, other])
        assert_close(context.gradients()[x], one + other, "here")
        found = [trio.a.leaf(), trio.a.leaf()]  # the same parameter of a worker
        context.backward(found, [one[0], other[0]])
        assert_close(trio.a.gradients()["bias"], one[0] + other[0], "on a worker")


def test_retained_graphs_accumulate_in_the_context(trio: Both, leaf: Leaf) -> None:
    x = leaf()
    with gw.context() as context:
        loss = loss_of(trio.call, x, 1.0)
        context.backward(loss, retain_graph=True)
        context.backward(loss)
        for_x, for_a, _ = expected_of(trio, x, 1.0)
        assert_close(context.gradients()[x], 2 * for_x, "x")
        assert_close(trio.a.gradients()["weight"], 2 * for_a, "a.weight")


def test_nested_contexts_keep_apart(trio: Both, leaf: Leaf) -> None:
    x = leaf()
    with gw.context() as outer:
        outer_loss = loss_of(trio.call, x, 1.0)
        with gw.context() as inner:
            assert inner.id != outer.id
            inner.backward(loss_of(trio.call, x, 2.0))
            check(trio, inner, x, 2.0)
            assert outer.gradients() == {}
        outer.backward(outer_loss)
        check(trio, outer, x, 1.0)


def test_a_context_collects_a_pass_over_calls_of_another(trio: Both, leaf: Leaf) -> None:
    x = leaf()
    with gw.context():
        loss = loss_of(trio.call, x, 1.0)
        with gw.context() as inner:
            inner.backward(loss)
            check(trio, inner, x, 1.0)
        assert all(found is None for found in trio.remote_gradients().values())


def test_served_functions_see_their_callers_context(trio: Both) -> None:
    with gw.context() as context:
        assert trio.a.context_of(["b", "c", "a"]) == [str(context.id)] * 4
        with gw.context() as inner:
            assert trio.a.context_of(["b"]) == [str(inner.id)] * 2
    ambient = str(gw.current_context().id)
    assert trio.a.context_of(["b"]) == [ambient] * 2
    assert ambient.endswith(":0")


def test_sixteen_threads_in_contexts_of_their_own_are_exact(trio: Both, leaf: Leaf) -> None:
    start = threading.Barrier(16)

    def train(index: int) -> None:
        x = leaf(index)
        start.wait(30)
        for step in range(5):
            scale = 1.0 + index + step / 10
            with gw.context() as context:
                context.backward(loss_of(trio.call, x, scale))
                check(trio, context, x, scale)

    with ThreadPoolExecutor(16) as pool:
        for done in [pool.submit(train, index) for index in range(16)]:
            done.result(90)


def test_sixteen_threads_without_contexts_add_up(trio: Both, leaf: Leaf) -> None:
    """Plain backward from many threads: one ambient context, sums as exact as addition is."""
    leaves = [leaf(index) for index in range(16)]

    def train(x: torch.Tensor) -> None:
        for _ in range(5):
            loss_of(trio.call, x, 1.0).backward()

    with ThreadPoolExecutor(16) as pool:
        for done in [pool.submit(train, x) for x in leaves]:
            done.result(90)
    for x in leaves:
        for _ in range(5):
            copy = x.detach().clone().requires_grad_()
            loss_of(trio.oracle_call, copy, 1.0).backward()
        assert_close(x.grad, 5 * copy.grad, "x")  # type: ignore[operator]
    expected = trio.oracle_gradients()
    for name, found in trio.remote_gradients().items():
        if found is not None:
            torch.testing.assert_close(found, expected[name], rtol=1e-10, atol=1e-10)


def test_asyncio_tasks_have_contexts_of_their_own(trio: Both, leaf: Leaf) -> None:
    async def train(index: int) -> None:
        x = leaf(index)
        with gw.context() as context:
            h = await trio.a.call_async("affine", x)
            await asyncio.sleep(0)
            out = await trio.b.call_async("affine", h)
            context.backward((out * h).sum())
            copy = x.detach().clone().requires_grad_()
            a, b = trio.places["a"], trio.places["b"]
            hidden = a.affine(copy)
            loss = (b.affine(hidden) * hidden).sum()
            expected = torch.autograd.grad(loss, [copy, a.weight, b.weight])
            assert_close(context.gradients()[x], expected[0], "x")
            assert_close((await trio.a.call_async("gradients"))["weight"], expected[1], "a.weight")
            assert_close((await trio.b.call_async("gradients"))["weight"], expected[2], "b.weight")

    async def main() -> None:
        await asyncio.wait_for(asyncio.gather(*(train(index) for index in range(8))), 60)

    asyncio.run(main())


def test_leaving_a_context_ends_it_on_every_worker(
    local_trio: tuple[Both, dict[str, gws.Worker]], leaf: Leaf
) -> None:
    trio, workers = local_trio
    with gw.context() as context:
        context.backward(trio.a.hop(leaf(), ["b", "c"]).sum())
        trio.a.affine(leaf())
        for worker in workers.values():
            assert worker._peer.engine.container.find(context.id) is not None
    # The word goes from worker to worker; a ping goes behind it on the same links.
    for name in ("a", "b", "c"):
        wait_until(lambda name=name: workers[name]._peer.engine.container.find(context.id) is None)  # type: ignore[misc]


def test_a_context_that_has_ended_says_so(trio: Both, leaf: Leaf) -> None:
    x = leaf()
    with gw.context() as context:
        loss = trio.a.affine(x).sum()
    with pytest.raises(gw.NotFound, match="ended"):
        context.backward(loss)
    with pytest.raises(gw.NotFound, match="context has ended"):
        loss.backward()
    with context, pytest.raises(gw.NotFound, match="has ended"):
        trio.a.affine(x)


def test_gradients_of_a_context_have_memory_of_their_own(trio: Both, leaf: Leaf) -> None:
    """They can be clipped in place, one by one."""
    x, y, seed = leaf(0), leaf(1), leaf(2).detach()
    kept = seed.clone()
    with gw.context() as context:
        context.backward([x + y, x], [seed, seed])
        for gradient in context.gradients().values():
            gradient.mul_(10)
        assert_close(context.gradients()[x], 20 * kept, "x")
        assert_close(context.gradients()[y], 10 * kept, "y")
        assert_close(seed, kept, "the gradient that was passed in")
    with gw.context() as context:
        context.backward((x.sum() + y.sum()) * 2)
        for gradient in context.gradients().values():
            gradient.mul_(10)
        assert_close(context.gradients()[x], torch.full((2, 3), 20.0, dtype=torch.float64), "x")


def wait_until(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    """Returns when it holds; fails if it never does."""
    give_up_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up_at, "it did not come to hold"
        time.sleep(0.005)


class Weighted:
    """Served functions that enter the context that they are called in."""

    def __init__(self) -> None:
        self.weight = torch.ones(3, requires_grad=True)

    def scale(self, x: torch.Tensor) -> torch.Tensor:
        with gw.current_context():
            return self.weight * x

    def gradient(self) -> torch.Tensor | None:
        with gw.current_context() as context:
            return context.gradients().get(self.weight)


def test_a_served_function_that_enters_its_callers_context_does_not_end_it() -> None:
    weighted = Weighted()
    x = torch.full((3,), 2.0, requires_grad=True)
    with gws.Worker(weighted.scale, weighted.gradient) as served, gw.connect(served.address) as worker:
        with gw.context() as context:
            for passes in (1, 2, 3):
                context.backward(worker.scale(x).sum())
                assert_close(worker.gradient(), torch.full((3,), 2.0 * passes), "weight")
            assert_close(context.gradients()[x], torch.full((3,), 3.0), "x")
        # With plain backward, too, where the context is the ambient one of this process.
        for passes in (1, 2, 3):
            worker.scale(x).sum().backward()
            assert_close(worker.gradient(), torch.full((3,), 2.0 * passes), "weight")


def test_a_context_that_is_entered_again_ends_with_the_outermost_block() -> None:
    weighted = Weighted()
    x = torch.full((3,), 2.0, requires_grad=True)
    with gws.Worker(weighted.scale, weighted.gradient) as served, gw.connect(served.address) as worker:
        with gw.context() as context:
            context.backward(worker.scale(x).sum())
            with context:
                assert_close(worker.gradient(), torch.full((3,), 2.0), "weight")
            with gw.current_context() as same:
                assert same.id == context.id
            assert_close(worker.gradient(), torch.full((3,), 2.0), "weight")
            assert_close(context.gradients()[x], torch.ones(3), "x")
        assert context.gradients() == {}
        with gw.current_context():  # the ambient one
            worker.scale(x).sum().backward()
        assert_close(worker.gradient(), torch.full((3,), 2.0), "weight")


def test_a_scope_is_never_changed() -> None:
    scope = current_scope()
    with pytest.raises(AttributeError):
        scope.context = None  # type: ignore[misc]


def test_a_plain_backward_fills_grad_even_if_it_comes_back_by_way_of_a_callback() -> None:
    """Over a call that was made in a context: that is where a worker's gradients go, not one's own."""
    weight = torch.ones(2, requires_grad=True)

    def weigh(x: torch.Tensor) -> torch.Tensor:
        return x * weight

    def ask_back(x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = gw.caller().weigh(x)
        return result * 3

    def train(address: str) -> dict[str, torch.Tensor | None]:
        x = torch.full((2,), 5.0, requires_grad=True)
        with gw.context():
            loss = gw.connect(address).ask_back(x).sum()
            loss.backward()
        return {"weight": weight.grad, "x": x.grad}

    with gws.Worker(ask_back) as asked, gws.Worker(weigh, train) as trainer:
        with gw.connect(trainer.address) as worker:
            found = worker.train(asked.address)
    assert_close(found["weight"], torch.full((2,), 15.0), "weight")
    assert_close(found["x"], torch.full((2,), 3.0), "x")


def test_several_threads_and_tasks_may_be_in_one_context_and_the_last_ends_it() -> None:
    weighted = Weighted()
    x = torch.full((3,), 2.0, requires_grad=True)
    with gws.Worker(weighted.scale, weighted.gradient) as served, gw.connect(served.address) as worker:
        context = gw.context()
        is_in, may_leave = threading.Event(), threading.Event()

        def stay() -> None:
            with context:
                is_in.set()
                assert may_leave.wait(60)
                context.backward(worker.scale(x).sum())
                assert gw.current_context().id == context.id

        async def tasks() -> None:
            async def take_turns() -> None:
                with context:
                    await asyncio.sleep(0)
                    assert gw.current_context().id == context.id
                assert gw.current_context().id != context.id

            await asyncio.gather(*(take_turns() for _ in range(3)))

        with ThreadPoolExecutor(1) as pool:
            staying = pool.submit(stay)
            assert is_in.wait(60)
            with context:
                context.backward(worker.scale(x).sum())
            asyncio.run(tasks())
            with context:
                assert_close(worker.gradient(), torch.full((3,), 2.0), "weight")
                may_leave.set()
                staying.result(60)
                assert_close(worker.gradient(), torch.full((3,), 4.0), "weight")
        assert context.gradients() == {}
