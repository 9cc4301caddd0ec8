"""Hooks on leaves: those of the trainer and those of workers, with each way to run backward."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import pytest
import torch
from tests.autograd.comparing import Both, assert_close
from tests.autograd.places import NAMES, Place, oracle, remote_place

import gradwire as gw
import gradwire_server as gws
from gradwire.peers.forking import live_peers

Call = Callable[..., Any]
Leaf = Callable[..., torch.Tensor]


def watched(leaf: torch.Tensor) -> list[torch.Tensor]:
    """What `.grad` was each time when a post-accumulate hook of the leaf ran."""
    seen: list[torch.Tensor] = []

    def hook(leaf: torch.Tensor) -> None:
        assert leaf.grad is not None
        assert not torch.is_grad_enabled()
        seen.append(leaf.grad.clone())

    leaf.register_post_accumulate_grad_hook(hook)
    return seen


def several_ways(call: Call, x: torch.Tensor) -> torch.Tensor:
    """Reaches the parameters of all places in several runs each, directly and by way of others."""
    h = call("a", "hop", x, ["b", "c"]) + call("b", "affine", x)
    h = call("a", "recur", h) * call("a", "recur", torch.sin(h))
    return (call("c", "affine", h) + call("a", "affine", h)).sum()


@pytest.fixture
def served() -> Iterator[tuple[Both, dict[str, Place]]]:
    """Three workers in this process beside the oracle, and the places that they serve."""
    places = {name: remote_place(name) for name in NAMES}
    workers = {name: gws.Worker(*place.functions, name=name).start() for name, place in places.items()}
    try:
        addresses = {name: worker.address for name, worker in workers.items()}
        handles = {name: gw.connect(address) for name, address in addresses.items()}
        for handle in handles.values():
            handle.meet(addresses)
        yield Both(handles, oracle()), places
        for handle in handles.values():
            handle.close()
    finally:
        for worker in workers.values():
            worker.stop()


@pytest.mark.parametrize("backward", ["plain", "context"])
def test_a_workers_hooks_run_once_with_the_whole_gradient(
    backward: str, served: tuple[Both, dict[str, Place]], leaf: Leaf
) -> None:
    both, places = served
    found = {name: watched(place.weight) for name, place in places.items()}
    expected = {name: watched(place.weight) for name, place in both.places.items()}
    both.check(several_ways, leaf(), backward=backward, times=1)
    for name, seen in found.items():
        assert len(seen) == len(expected[name]) == 1
        assert_close(seen[0], expected[name][0], f"{name}.weight")
        assert places[name].weight.grad is None


def test_hooks_of_the_trainers_leaves_run_in_a_context(trio: Both, leaf: Leaf) -> None:
    x, copy = leaf(), leaf()
    seen, expected = watched(x), watched(copy)
    both = several_ways(trio.oracle_call, copy)
    both.backward()
    with gw.context() as context:
        context.backward(several_ways(trio.call, x))
        assert_close(context.gradients()[x], copy.grad, "x")
    assert len(seen) == len(expected) == 1
    assert_close(seen[0], expected[0], "x")
    assert x.grad is None


def test_no_hook_runs_where_no_gradient_is_accumulated(
    served: tuple[Both, dict[str, Place]], leaf: Leaf
) -> None:
    both, places = served
    seen = [watched(place.weight) for place in places.values()]
    for place in places.values():
        place.weight.register_hook(seen[0].append)
    both.check(several_ways, leaf(), backward="grad")
    assert not any(seen)


def test_a_hook_may_step_and_clear_the_gradient(served: tuple[Both, dict[str, Place]], leaf: Leaf) -> None:
    """An optimizer that steps in backward: the weights of a pass change when all of it is done."""
    both, places = served

    def step(weight: torch.Tensor) -> None:
        weight.sub_(weight.grad, alpha=0.1)
        weight.grad = None

    for place in (*places.values(), *both.places.values()):
        place.weight.register_post_accumulate_grad_hook(step)
    for seed in range(3):
        x, copy = leaf(seed), leaf(seed)
        several_ways(both.call, x).backward()
        several_ways(both.oracle_call, copy).backward()
        assert_close(x.grad, copy.grad, "x")
        for name, place in places.items():
            assert_close(place.weight.detach(), both.places[name].weight.detach(), f"{name}.weight")
        for anywhere in (*places.values(), *both.places.values()):
            anywhere.kept.clear()
    assert all(found["weight"] is None for found in (w.gradients() for w in both.workers.values()))


def test_an_error_in_a_workers_hook_reaches_whoever_called_backward(
    served: tuple[Both, dict[str, Place]], leaf: Leaf
) -> None:
    both, places = served

    def fail(_: torch.Tensor) -> None:
        raise ValueError("this hook always fails")

    handle = places["c"].weight.register_post_accumulate_grad_hook(fail)
    with pytest.raises(ValueError, match="this hook always fails"):
        several_ways(both.call, leaf()).backward()
    handle.remove()
    both.reset()
    both.check(several_ways, leaf(), times=1)


def test_hooks_of_a_pass_that_failed_never_run(served: tuple[Both, dict[str, Place]], leaf: Leaf) -> None:
    both, places = served
    seen = watched(places["a"].bias)
    x = leaf()
    loss = (both.a.affine(both.b.raising_in_backward(x)) + both.a.dot(x)).sum()
    with pytest.raises(ValueError, match="always fails"):
        loss.backward()
    assert not seen
    both.reset()
    both.check(lambda call, x: call("a", "dot", x), leaf(), times=1)
    assert len(seen) == 1
    assert not any(peer.engine.passes.hooks._passes for peer in list(live_peers))


def test_a_hook_and_a_step_of_another_context_have_grad_to_themselves() -> None:
    """`.grad` is one for all contexts: a step must not take the gradient that a hook has there."""
    in_hook, may_end = threading.Event(), threading.Event()

    class Scale(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1))
            self.weight.register_post_accumulate_grad_hook(self._hook)

        def _hook(self, weight: torch.Tensor) -> None:
            if weight.grad is not None and weight.grad.item() == 100:
                in_hook.set()
                assert may_end.wait(30)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * x

    with gws.Worker(Scale) as served, gw.connect(served.address) as worker, ThreadPoolExecutor(2) as pool:
        module = worker.create("Scale")
        optimizer = gw.optim.DistributedOptimizer(torch.optim.SGD, [module], lr=1.0)
        with gw.context() as small, gw.context() as large:
            small.backward(module(torch.tensor([1.0])).sum())
            backward = pool.submit(large.backward, module(torch.tensor([100.0])).sum())
            assert in_hook.wait(30)
            step = pool.submit(optimizer.step, small)
            wait([step], timeout=1)  # it waits for the hook, as it should, or it is made
            may_end.set()
            backward.result(30)
            step.result(30)
            assert module.state_dict()["weight"].item() == -1
            optimizer.step(large)
            assert module.state_dict()["weight"].item() == -101
