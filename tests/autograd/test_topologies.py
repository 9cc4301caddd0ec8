"""Every shape that calls can form: gradients are those of single-process PyTorch."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.autograd.comparing import Both, assert_close

import gradwire as gw

Call = Callable[..., Any]
Leaf = Callable[..., torch.Tensor]
BACKWARDS = ("plain", "context", "grad", "twice")


def unused_result(call: Call, x: torch.Tensor) -> torch.Tensor:
    call("a", "affine", x)
    return (x * x).sum()


def some_outputs_unused(call: Call, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    first, product, *_ = call("a", "several", x, y)
    return (first * 2).sum() + product.sum()


def only_the_last_output_used(call: Call, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return call("a", "several", x, y)[-1].sum() + x.sum()


def integers_and_constants_mixed_in(call: Call, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    first, _, constant, integers, _ = call("a", "several", x, y)
    assert not constant.requires_grad
    assert not integers.requires_grad
    return (first * constant * integers).sum()


def result_without_grad(call: Call, x: torch.Tensor) -> torch.Tensor:
    plain = call("a", "plain", x)
    assert not plain.requires_grad
    return (plain * x).sum()


def grad_without_arguments(call: Call, x: torch.Tensor) -> torch.Tensor:
    constant = call("a", "constant")
    assert constant.requires_grad
    return (constant * x).sum()


def a_parameter_itself(call: Call, x: torch.Tensor) -> torch.Tensor:
    return (call("a", "leaf") * x).sum() + call("b", "leaf").sum()


def around_another_worker(call: Call, x: torch.Tensor) -> torch.Tensor:
    """On a worker, what leads to a call elsewhere and what goes around it meet again; no argument does."""
    first, second = (call("a", "hop", x.detach(), ["b"]) for _ in range(2))
    return (first * second * x).sum()


def the_argument_itself(call: Call, x: torch.Tensor) -> torch.Tensor:
    return (call("a", "same", x * 2) * x).sum()


def the_leaf_itself_there_and_back(call: Call, x: torch.Tensor) -> torch.Tensor:
    return (call("b", "same", call("a", "same", x)) * x).sum()


def one_tensor_to_several_workers(call: Call, x: torch.Tensor) -> torch.Tensor:
    h = torch.sin(x)
    return (call("a", "affine", h) * call("b", "affine", h) + call("c", "affine", h) * h).sum()


def residual_paths(call: Call, x: torch.Tensor) -> torch.Tensor:
    y = call("a", "affine", x) + x
    z = call("a", "affine", y) * y + x
    return (call("b", "affine", z) + z).sum()


def chain_back_to_the_first(call: Call, x: torch.Tensor) -> torch.Tensor:
    return call("a", "hop", x, ["b", "c", "a"]).sum()


def chain_back_to_the_first_around_state(call: Call, x: torch.Tensor) -> torch.Tensor:
    first = call("a", "keep", x)
    second = call("a", "hop", x * 0.3, ["b", "c", "a"])
    return (call("a", "recall", second + first) * x).sum()


def recursion(call: Call, x: torch.Tensor) -> torch.Tensor:
    return call("a", "recurse", x, 5, "b").sum()


def worker_that_calls_itself(call: Call, x: torch.Tensor) -> torch.Tensor:
    return (call("a", "call_self", x) * x).sum()


def fork_and_join_on_a_worker(call: Call, x: torch.Tensor) -> torch.Tensor:
    return call("a", "fork_join", x, ["b", "c", "b", "a"]).sum()


def state_between_calls(call: Call, x: torch.Tensor) -> torch.Tensor:
    first = call("a", "keep", torch.sin(x))
    return call("a", "recall", x * 2).sum() + first.sum()


def state_whose_first_result_is_dropped(call: Call, x: torch.Tensor) -> torch.Tensor:
    call("a", "keep", torch.sin(x))
    gc.collect()
    return call("a", "recall", x * 2).sum()


def state_read_by_a_call_that_ignores_its_argument(call: Call, x: torch.Tensor) -> torch.Tensor:
    call("a", "keep", torch.sin(x))
    return call("a", "forget", x * 2).sum()


def state_over_many_calls(call: Call, x: torch.Tensor) -> torch.Tensor:
    for step in range(4):
        h = call("a", "keep", x * step)
    return (call("a", "recall", x) * h).sum()


def state_on_a_third_worker_read_directly(call: Call, x: torch.Tensor) -> torch.Tensor:
    call("a", "keep_at", torch.sin(x), "b")
    return call("b", "recall", torch.cos(x)).sum()


def state_on_a_third_worker_without_a_send_of_this_call(call: Call, x: torch.Tensor) -> torch.Tensor:
    call("a", "keep_at", torch.sin(x), "b")
    return call("b", "forget", torch.zeros(2, 3, dtype=torch.float64)).sum()


def state_on_a_third_worker_read_by_another(call: Call, x: torch.Tensor) -> torch.Tensor:
    kept = call("a", "keep_at", torch.sin(x), "b")
    return (call("c", "recall_at", torch.cos(x), "b") * kept).sum()


def state_on_a_third_worker_sent_back_to_the_second(call: Call, x: torch.Tensor) -> torch.Tensor:
    call("a", "keep_at", torch.sin(x), "b")
    recalled = call("b", "recall", torch.cos(x))
    return (call("a", "affine", recalled) * recalled).sum()


def state_that_a_worker_kept_by_calling_itself(call: Call, x: torch.Tensor) -> torch.Tensor:
    call("a", "keep_by_calling_self", torch.sin(x))
    return (call("a", "recall", x) + call("a", "forget", x)).sum()


def same_tensor_twice(call: Call, x: torch.Tensor) -> torch.Tensor:
    h = torch.sin(x)
    return call("a", "received_twice", h, h).sum()


def same_tensor_in_containers(call: Call, x: torch.Tensor) -> torch.Tensor:
    h = torch.sin(x)
    found = call("a", "containers", {"list": [h, x, h], "one": (h,)})
    return (found["sum"] * found["deep"][0]["product"][0]).sum()


def shared_storage(call: Call, x: torch.Tensor) -> torch.Tensor:
    h = torch.sin(x)
    whole, part = call("a", "halves", h, h[0])
    return (whole * x).sum() + (part * part).sum()


def views(call: Call, x: torch.Tensor) -> torch.Tensor:
    h = torch.sin(x).t().contiguous().t()
    return (call("a", "affine", h[:1].expand(2, 3)) * call("b", "affine", h.flip(0))).sum()


def received_modified_in_place_and_sent_on(call: Call, x: torch.Tensor) -> torch.Tensor:
    h = call("a", "affine", x)
    h.mul_(x)
    h[0] += 1
    return (call("b", "bump", h) * x).sum()


def argument_modified_in_place(call: Call, x: torch.Tensor) -> torch.Tensor:
    h = torch.sin(x)
    return (call("a", "bump", h) * h).sum()


def no_grad_inside(call: Call, x: torch.Tensor) -> torch.Tensor:
    return call("a", "no_grad_inside", x).sum()


def argument_ignored(call: Call, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return call("a", "ignore", x, torch.sin(y)).sum()


def checkpoint_on_a_worker_around_a_call(call: Call, x: torch.Tensor) -> torch.Tensor:
    return call("a", "checkpointed", x, "b").sum()


def detached_in_between(call: Call, x: torch.Tensor) -> torch.Tensor:
    h = call("a", "affine", x)
    return (call("b", "affine", h.detach()) * h).sum()


def many_calls_of_one_worker(call: Call, x: torch.Tensor) -> torch.Tensor:
    outs = [call("a", "affine", x * k) for k in range(10)]
    return torch.stack(outs).prod(0).sum()


TOPOLOGIES = [
    function
    for function in list(globals().values())
    if callable(function) and getattr(function, "__annotations__", {}).get("call") == "Call"
]


@pytest.mark.parametrize("compute", TOPOLOGIES, ids=lambda function: function.__name__)
def test_gradients_are_those_of_one_process(
    compute: Callable[..., torch.Tensor], trio: Both, leaf: Leaf
) -> None:
    for backward in BACKWARDS:
        trio.reset()
        leaves = [leaf(0), leaf(1)][: compute.__code__.co_argcount - 1]
        trio.check(compute, *leaves, backward=backward)


def test_a_scalar_and_a_zero_dimensional_argument(trio: Both) -> None:
    x = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    trio.check(lambda call, x: call("a", "dot", x) * x, x)


def test_empty_tensors(trio: Both) -> None:
    x = torch.zeros(0, 3, dtype=torch.float64, requires_grad=True)
    trio.check(lambda call, x: call("a", "empty", x).sum(), x)
    assert x.grad is not None
    assert x.grad.shape == (0, 3)


def test_sparse_gradients_of_parameters_and_arguments(trio: Both) -> None:
    table = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)

    def compute(call: Call, table: torch.Tensor) -> torch.Tensor:
        indices = torch.tensor([[0, 2], [2, 4]])
        first = call("a", "sparse_embedding", indices, table)
        return (first * call("a", "sparse_embedding", indices.t(), table)).sum()

    trio.check(compute, table)
    assert table.grad is not None
    assert table.grad.layout == torch.sparse_coo
    gradient = trio.a.gradients()["table"]
    assert gradient.layout == torch.sparse_coo


SPARSE_PROGRAMS: dict[str, Callable[[Call, torch.Tensor], torch.Tensor]] = {
    "returned": lambda call, x: call("a", "same", x),
    "there and back twice": lambda call, x: call("b", "same", call("a", "same", x)),
    "sent on by a worker": lambda call, x: call("a", "relay", "b", "same", x),
    "a user's own function": lambda call, x: call("a", "own_function", x),
    "a user's own function, sent on": lambda call, x: call("a", "relay", "b", "own_function", x),
    "kept": lambda call, x: [call("a", "keep_sum", x) for _ in range(3)][-1],
    "added": lambda call, x: call("a", "keep_sum", x) + call("b", "own_function", x),
}


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr], ids=str)
@pytest.mark.parametrize("program", SPARSE_PROGRAMS)
@pytest.mark.filterwarnings("ignore:Sparse (CSR|invariant)")
def test_sparse_tensors_that_require_grad_are_sent_on(
    program: str, layout: torch.layout, trio: Both, leaf: Leaf
) -> None:
    def compute(call: Call, x: torch.Tensor) -> torch.Tensor:
        return SPARSE_PROGRAMS[program](call, x).to_dense().sum()

    for backward in ("plain", "context", "grad", "twice"):
        trio.reset()
        sparse = leaf().detach().clamp(min=0).to_sparse(layout=layout).requires_grad_()
        trio.check(compute, sparse, backward=backward)


def test_gradients_have_memory_of_their_own_if_they_are_sparse() -> None:
    table = torch.rand(5, 3, dtype=torch.float64, requires_grad=True)
    indices = torch.tensor([0, 3])
    with gw.context() as context:
        # The gradient of a sum repeats one element.
        context.backward(torch.nn.functional.embedding(indices, table, sparse=True).sum())
        gradient = context.gradients()[table]
        gradient._values().mul_(3)
    assert torch.equal(gradient.to_dense()[:, 0], torch.tensor([3, 0, 0, 3, 0], dtype=torch.float64))


def test_sparse_and_dense_contributions_add_up(trio: Both) -> None:
    table = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)

    def compute(call: Call, table: torch.Tensor) -> torch.Tensor:
        indices = torch.tensor([1, 1, 3])
        return call("a", "sparse_embedding", indices, table).sum() + call("b", "empty", table).sum()

    trio.check(compute, table)


def test_complex_tensors(trio: Both) -> None:
    z = torch.randn(3, 3, dtype=torch.complex128, requires_grad=True)

    def compute(call: Call, z: torch.Tensor) -> torch.Tensor:
        y = call("b", "same", call("a", "weigh_complex", z).conj()) * z
        return (y * y.conj()).real.sum()

    trio.check(compute, z)


def test_mixed_dtypes(trio: Both) -> None:
    x = torch.randn(2, 3, dtype=torch.float32, requires_grad=True)
    y = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)

    def compute(call: Call, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        wide, narrow = call("a", "mixed", x, y)
        return wide.sum() + narrow.double().pow(2).sum()

    trio.check(compute, x, y)


def test_half_precision_gradients_keep_their_dtype(trio: Both) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        x = torch.randn(2, 3).to(dtype).requires_grad_()
        (trio.a.same(x) * 2).sum().backward()
        assert x.grad is not None
        assert x.grad.dtype == dtype
        assert_close(x.grad.float(), torch.full((2, 3), 2.0), str(dtype))


def test_writing_to_one_of_two_arguments_that_share_memory_is_refused(trio: Both, leaf: Leaf) -> None:
    """Their values would depend on each other behind autograd's back."""
    h = torch.sin(leaf())
    whole, part = trio.a.halves(h, h[0])
    with pytest.raises(RuntimeError, match="modified inplace"):
        part.mul_(2)
    with pytest.raises(RuntimeError, match="modified inplace"):
        whole.mul_(2)


def test_writing_to_a_tensor_that_shares_memory_with_one_that_backward_needs_is_noticed(
    trio: Both, leaf: Leaf
) -> None:
    h = torch.sin(leaf())
    differentiable, constant = trio.a.call("same", [h, h.detach()])
    loss = (differentiable * differentiable).sum()
    constant.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_writing_to_the_one_that_requires_grad_is_exact(trio: Both, leaf: Leaf) -> None:
    x = leaf()
    h = x * 1
    differentiable, constant = trio.a.call("same", [h, h.detach()])
    differentiable.mul_(3)
    torch.testing.assert_close(constant, differentiable.detach())
    differentiable.sum().backward()
    assert_close(x.grad, torch.full((2, 3), 3.0, dtype=torch.float64), "x")


def test_a_result_is_what_it_was_when_it_was_sent(trio: Both, leaf: Leaf) -> None:
    """A worker that goes on to modify what it kept changes nothing for results that are out."""
    x = leaf()
    first = trio.a.keep_and_return(x)
    trio.a.bump_kept()
    first.sum().backward()
    copy = x.detach().clone().requires_grad_()
    (copy @ trio.places["a"].weight).sum().backward()
    assert_close(x.grad, copy.grad, "x")


def test_the_state_of_one_context_is_refused_in_another(trio: Both, leaf: Leaf) -> None:
    x = leaf()
    with gw.context():
        trio.a.keep(x)
    with gw.context() as context:
        loss = trio.a.recall(x).sum()
        with pytest.raises(gw.NotFound, match="a context that has ended"):
            context.backward(loss)
