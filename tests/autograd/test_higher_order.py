"""`create_graph` works through remote calls: the backward of a call can be differentiated again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.autograd.comparing import Both, assert_close

import gradwire as gw

Call = Callable[..., Any]
Leaf = Callable[..., torch.Tensor]


def one_worker(call: Call, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = call("a", "affine", torch.sin(x)) * x
    return out


def two_workers(call: Call, x: torch.Tensor) -> torch.Tensor:
    h = call("a", "affine", torch.sin(x))
    out: torch.Tensor = call("b", "affine", h) * h + x
    return out


def chained(call: Call, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = call("a", "hop", x, ["b", "c"])
    return out


def round_trip(call: Call, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = call("a", "hop", x, ["b", "a"])
    return out


def with_state(call: Call, x: torch.Tensor) -> torch.Tensor:
    first = call("a", "keep", torch.sin(x))
    out: torch.Tensor = call("a", "recall", x * x) * first
    return out


def state_on_a_third(call: Call, x: torch.Tensor) -> torch.Tensor:
    call("a", "keep_at", torch.sin(x), "b")
    out: torch.Tensor = call("b", "recall", torch.cos(x))
    return out


def several_results(call: Call, x: torch.Tensor) -> torch.Tensor:
    first, second, *_, last = call("a", "several", x, torch.sin(x))
    out: torch.Tensor = first * second * last
    return out


def itself(call: Call, x: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = call("a", "call_self", x)
    return out


FUNCTIONS = [
    one_worker,
    two_workers,
    chained,
    round_trip,
    with_state,
    state_on_a_third,
    several_results,
    itself,
]


def named(function: Callable[..., Any]) -> str:
    return function.__name__


@pytest.mark.parametrize("function", FUNCTIONS, ids=named)
def test_gradient_penalties(trio: Both, leaf: Leaf, function: Callable[..., torch.Tensor]) -> None:
    def compute(call: Call, x: torch.Tensor) -> torch.Tensor:
        out = function(call, x)
        (gradient,) = torch.autograd.grad(out.sum(), [x], create_graph=True)
        return (gradient**2).sum() + out.sum()

    trio.check(compute, leaf())
    trio.reset()
    trio.check(compute, leaf(1), backward="context")


@pytest.mark.parametrize("function", FUNCTIONS, ids=named)
def test_hessian_vector_products(trio: Both, leaf: Leaf, function: Callable[..., torch.Tensor]) -> None:
    v = leaf(7).detach()

    def product(call: Call, x: torch.Tensor) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(function(call, x).pow(2).sum(), [x], create_graph=True)
        (result,) = torch.autograd.grad((gradient * v).sum(), [x])
        return result

    expected = product(trio.oracle_call, leaf())
    trio.reset()
    assert_close(product(trio.call, leaf()), expected, "H v")
    assert all(found is None for found in trio.remote_gradients().values())


@pytest.mark.parametrize("function", [one_worker, two_workers, chained], ids=named)
def test_third_order(trio: Both, leaf: Leaf, function: Callable[..., torch.Tensor]) -> None:
    def compute(call: Call, x: torch.Tensor) -> torch.Tensor:
        value = function(call, x).sum()
        for _ in range(2):
            (gradient,) = torch.autograd.grad(value, [x], create_graph=True)
            value = (gradient**2).sum()
        return value

    trio.check(compute, leaf())


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
def test_backward_with_create_graph_fills_grad_with_a_graph(trio: Both, leaf: Leaf) -> None:
    x, copy = leaf(), leaf()
    for call, one in ((trio.call, x), (trio.oracle_call, copy)):
        one_worker(call, one).sum().backward(create_graph=True)
        assert one.grad is not None
        (gradient,) = torch.autograd.grad(one.grad.pow(2).sum(), [one])
        one.grad = None
        one.second = gradient  # type: ignore[attr-defined]
    assert_close(x.second, copy.second, "x")  # type: ignore[attr-defined]


def test_a_penalty_computed_on_the_worker(trio: Both, leaf: Leaf) -> None:
    trio.check(lambda call, x: call("a", "penalty", x), leaf())


def test_a_penalty_computed_on_a_worker_through_another(trio: Both, leaf: Leaf) -> None:
    trio.check(lambda call, x: call("a", "penalty", torch.sin(x), "b"), leaf())


def test_a_second_backward_through_a_penalty_needs_retain_graph(trio: Both, leaf: Leaf) -> None:
    x = leaf()
    (gradient,) = torch.autograd.grad(trio.a.affine(x).sum(), [x], create_graph=True)
    loss = gradient.pow(2).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()


def test_differentiating_only_for_what_was_asked(trio: Both, leaf: Leaf) -> None:
    """A gradient with respect to a tensor that the backward itself brought in."""
    x = leaf()
    seed = torch.ones(2, 3, dtype=torch.float64, requires_grad=True)

    def compute(call: Call, x: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(call("a", "affine", x), [x], [seed], create_graph=True)
        return (gradient * x).sum()

    trio.check(compute, x, seed)


def test_errors_in_the_backward_of_a_backward(trio: Both, leaf: Leaf) -> None:
    x = leaf()
    loss = trio.a.raising_in_backward(torch.sin(x)).sum()
    with pytest.raises(gw.RemoteError, match="always fails"):
        torch.autograd.grad(loss, [x], create_graph=True)


@pytest.mark.parametrize("backward", ["plain", "context", "grad"])
def test_autograd_grad_within_a_workers_backward_asks_for_its_own_gradients_only(
    backward: str, trio: Both, leaf: Leaf
) -> None:
    trio.check(lambda call, x: call("a", "grad_in_backward", x, "b").sum(), leaf(), backward=backward)


def test_backward_within_a_workers_backward_is_one_of_its_own(trio: Both, leaf: Leaf) -> None:
    """What it contributes to the argument is not part of what torch.autograd.grad asked for."""
    x, copy = leaf(), leaf()
    (found,) = torch.autograd.grad(trio.a.backward_in_backward(x).sum(), [x])
    (expected,) = torch.autograd.grad(trio.oracle_call("a", "backward_in_backward", copy).sum(), [copy])
    assert_close(found, expected, "asked for")
    assert_close(x.grad, copy.grad, ".grad")
