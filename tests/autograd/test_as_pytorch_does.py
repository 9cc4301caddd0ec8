"""The scenarios of PyTorch's own distributed-autograd tests, on this API.

Named after those in torch/testing/_internal/distributed/rpc/dist_autograd_test.py, whose topologies they
re-enact. There, `t1` and `t2` are sent to the next worker and gradients are compared with local ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tests.autograd.comparing import Both, assert_close

import gradwire as gw

Call = Callable[..., Any]
Leaf = Callable[..., torch.Tensor]


def test_backward_simple(trio: Both, leaf: Leaf) -> None:
    trio.check(
        lambda call, t1, t2: call("a", "received_twice", t1, t2).sum(), leaf(0), leaf(1), backward="context"
    )


def test_backward_different_tensor_dims(trio: Both) -> None:
    t1 = torch.rand(4, 6, dtype=torch.float64, requires_grad=True)
    t2 = torch.rand(6, 5, dtype=torch.float64)
    t3 = torch.rand(5, 7, dtype=torch.float64, requires_grad=True)
    t4 = torch.rand(7, 9, dtype=torch.float64)

    def compute(call: Call, *tensors: torch.Tensor) -> torch.Tensor:
        return call("a", "chain_matmul", list(tensors)).sum()

    trio.check(compute, t1, t2, t3, t4, backward="context")


def test_backward_unused_tensors(trio: Both, leaf: Leaf) -> None:
    """Of a stack of three only one is used."""

    def compute(call: Call, t1: torch.Tensor, t2: torch.Tensor, t3: torch.Tensor) -> torch.Tensor:
        return call("a", "stacked", [t1, t2, t3])[1].sum()

    leaves = [leaf(0), leaf(1), leaf(2).detach()]
    trio.check(compute, *leaves, backward="context")


def test_backward_multiple_output_tensors(trio: Both) -> None:
    t = torch.rand(10, 3, dtype=torch.float64, requires_grad=True)

    def compute(call: Call, t: torch.Tensor) -> torch.Tensor:
        parts = call("a", "split", t)
        assert len(parts) == 5
        return (parts[0] * parts[2] * parts[4]).sum()

    trio.check(compute, t, backward="context")


def test_backward_unused_send_function(trio: Both, leaf: Leaf) -> None:
    """A result that nobody uses. PyTorch's suite asserts that its backward never returns here."""
    t1, t2 = leaf(0), leaf(1)
    took = []
    for _ in range(5):
        with gw.context() as context:
            unused = trio.a.received_twice(t1, t2)
            loss = trio.b.received_twice(t1, t2).sum()
            started = time.perf_counter()
            context.backward(loss)
            took.append(time.perf_counter() - started)
            assert set(context.gradients()) == {t1, t2}
            del unused
    # A few milliseconds; the best of some, because others use this machine, too.
    assert min(took) < 0.25


def test_backward_multiple_roots(trio: Both, leaf: Leaf) -> None:
    def compute(call: Call, t1: torch.Tensor, t2: torch.Tensor) -> list[torch.Tensor]:
        return [
            call("a", "received_twice", t1, t2).sum(),
            call("a", "several", t1, t2)[1].sum(),
            call("b", "affine", t1).sum(),
            call("c", "affine", t2).sum(),
        ]

    t1, t2 = leaf(0), leaf(1)
    copies = [leaf(0), leaf(1)]
    torch.autograd.backward(compute(trio.oracle_call, *copies))
    with gw.context() as context:
        context.backward(compute(trio.call, t1, t2))
        assert_close(context.gradients()[t1], copies[0].grad, "t1")
        assert_close(context.gradients()[t2], copies[1].grad, "t2")
        trio.check_parameters()


def test_backward_different_dtypes(trio: Both) -> None:
    t1 = torch.rand(2, 3, dtype=torch.float32, requires_grad=True)
    t2 = torch.rand(2, 3, dtype=torch.float64, requires_grad=True)

    def compute(call: Call, t1: torch.Tensor, t2: torch.Tensor) -> torch.Tensor:
        return call("a", "received_twice", t1, t2).sum()

    trio.check(compute, t1, t2, backward="context")


def test_backward_complex_python_udf(trio: Both, leaf: Leaf) -> None:
    """Nested calls, to other workers and back to the first."""

    def compute(call: Call, t1: torch.Tensor, t2: torch.Tensor) -> torch.Tensor:
        nested = call("a", "relay", "b", "received_twice", t1, t2)
        return (
            call("b", "relay", "a", "received_twice", nested, t1) * call("c", "hop", t2, ["a", "b"])
        ).sum()

    trio.check(compute, leaf(0), leaf(1), backward="context")


def test_backward_no_grad_on_tensor(trio: Both, leaf: Leaf) -> None:
    t1, t2 = leaf(0), leaf(1)
    with gw.context() as context:
        out = trio.a.received_twice(t1, t2)
        context.backward(out.sum(), retain_graph=True)
        with torch.no_grad():
            constant = trio.a.received_twice(t1, t2)
        assert not constant.requires_grad
        with pytest.raises(RuntimeError, match="does not require"):
            context.backward(constant.sum())
        with pytest.raises(RuntimeError, match="grad can be implicitly created only for scalar outputs"):
            context.backward(out)


def test_backward_multiple_round_trips(trio: Both, leaf: Leaf) -> None:
    def compute(call: Call, t1: torch.Tensor, t2: torch.Tensor) -> torch.Tensor:
        value = call("a", "received_twice", t1, t2)
        value = call("b", "several", t1, value)[1]
        value = call("a", "several", value, t2)[1]
        return call("c", "ignore", value, t1).sum()

    trio.check(compute, leaf(0), leaf(1), backward="context")


def test_grad_only_on_return_value(trio: Both) -> None:
    """No argument requires grad, the result does."""
    with gw.context() as context:
        constant = trio.a.constant()
        assert constant.requires_grad
        context.backward(constant.sum())
        assert context.gradients() == {}
        trio.places["a"].constant().sum().backward()
        trio.check_parameters()


def test_grad_copy_sparse_indices_extra_ref(trio: Both) -> None:
    table = torch.rand(5, 3, dtype=torch.float64, requires_grad=True)
    indices = torch.tensor([1, 2, 4, 1])
    with gw.context() as context:
        context.backward(trio.a.sparse_embedding(indices, table).sum())
        first = context.gradients()[table]
        assert first.layout == torch.sparse_coo
        kept = first.to_dense()
        context.backward(trio.a.sparse_embedding(indices, table).sum())
        assert_close(first, kept, "a gradient that was read before")
        assert_close(context.gradients()[table], 2 * kept, "table")


def test_error_in_context_of_the_engine(trio: Both, leaf: Leaf) -> None:
    """`backward_autograd_engine_error`: simulated in the middle of a chain."""
    t1 = leaf()
    with gw.context() as context:
        value = trio.a.received_twice(t1, t1)
        value = trio.b.raising_in_backward(value)
        value = trio.c.affine(value)
        with pytest.raises(gw.RemoteError, match="always fails"):
            context.backward(value.sum())


def test_backward_accumulate_grads(trio: Both, leaf: Leaf) -> None:
    t1, t2 = leaf(0), leaf(1)
    copies = [leaf(0), leaf(1)]
    with gw.context() as context:
        for _ in range(2):
            context.backward(trio.a.received_twice(t1, t2).sum())
            trio.places["a"].received_twice(*copies).sum().backward()
        assert_close(context.gradients()[t1], copies[0].grad, "t1")
        assert_close(context.gradients()[t2], copies[1].grad, "t2")


def test_verify_context_ids_are_passed_on(trio: Both) -> None:
    """`context_cleanup_nested_rpc` and `dist_autograd_profiling` check the ids on the way."""
    with gw.context() as context:
        assert trio.a.context_of(["b", "c", "b", "a"]) == [str(context.id)] * 5


def test_nested_context_is_its_own(trio: Both, leaf: Leaf) -> None:
    """PyTorch refuses a context within a context; here it is one of its own."""
    t1 = leaf()
    with gw.context() as outer:
        outer.backward(trio.a.affine(t1).sum())
        with gw.context() as inner:
            assert inner.gradients() == {}
            inner.backward((2 * trio.a.affine(t1)).sum())
            assert_close(inner.gradients()[t1], 2 * outer.gradients()[t1], "t1")


def test_post_hooks(trio: Both, leaf: Leaf) -> None:
    """Hooks on the leaf of the trainer run once for each backward."""
    t1 = leaf()
    calls = 0

    def hook(*_: object) -> None:
        nonlocal calls
        calls += 1

    t1.register_hook(hook)
    for _ in range(3):
        (trio.a.affine(t1) * trio.b.affine(t1)).sum().backward()
    assert calls == 3


def test_graph_for_builtin_like_calls_has_send_and_recv(trio: Both, leaf: Leaf) -> None:
    """`graph_for_py_nested_call`: the shape of the graph on the caller's side."""
    out = trio.a.received_twice(leaf(0), leaf(1))
    recv = out.grad_fn
    assert recv is not None
    assert "RecvRpc" in recv.name()
    send = recv.next_functions[0][0]
    assert send is not None
    assert "SendRpc" in send.name()
    assert [node.name() for node, _ in send.next_functions if node] == ["torch::autograd::AccumulateGrad"] * 2


def test_no_graph_with_tensors_that_require_no_grad(trio: Both) -> None:
    ones = torch.ones(2, 3, dtype=torch.float64)
    out = trio.a.ignore(ones, ones)
    assert not out.requires_grad
    assert out.grad_fn is None


def test_mixed_requires_grad(trio: Both, leaf: Leaf) -> None:
    t1, t2 = leaf(0), leaf(1).detach()
    trio.check(lambda call, t1, t2: call("a", "received_twice", t1, t2).sum(), t1, t2, backward="context")


def test_thread_safety_of_hogwild_training(trio: Both, leaf: Leaf) -> None:
    """`thread_local_context_id` and hogwild: contexts of threads never mix. More in test_contexts."""

    def train(index: int) -> torch.Tensor:
        t1 = leaf(index)
        with gw.context() as context:
            context.backward((trio.a.received_twice(t1, t1) * index).sum())
            return context.gradients()[t1] - index * (2 + 2 * t1.detach())

    with ThreadPoolExecutor(4) as pool:
        for difference in pool.map(train, range(1, 13)):
            assert_close(difference, torch.zeros(2, 3, dtype=torch.float64), "difference")
