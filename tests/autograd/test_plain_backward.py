"""Plain `backward()` through remote calls behaves as it does without them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.autograd.comparing import Both, assert_close
from torch.utils.checkpoint import checkpoint

import gradwire as gw

Call = Callable[..., Any]
Leaf = Callable[..., torch.Tensor]


def test_autograd_grad_leaves_everything_else_alone(trio: Both, leaf: Leaf) -> None:
    x, y = leaf(0), leaf(1)
    loss = (trio.a.affine(x) * trio.b.affine(y)).sum()
    (gradient,) = torch.autograd.grad(loss, [y])
    copy = y.detach().clone().requires_grad_()
    places = trio.places
    (places["a"].affine(x.detach()) * places["b"].affine(copy)).sum().backward()
    assert_close(gradient, copy.grad, "y")
    assert x.grad is None
    assert y.grad is None
    assert all(found is None for found in trio.remote_gradients().values())


@pytest.mark.parametrize("rows", [2, 500], ids=["within the message", "beside it"])
def test_what_came_may_be_written_to(rows: int, trio: Both) -> None:
    """Results here, and arguments there."""

    def compute(call: Call, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = call("a", "bump", x * 1)
        result.mul_(x)
        return result.sum()

    trio.check(compute, torch.randn(rows, 64, 3, dtype=torch.float64).requires_grad_())


def test_several_roots_with_gradients_of_their_own(trio: Both, leaf: Leaf) -> None:
    x, seed = leaf(0), leaf(1).detach()
    roots = [trio.a.affine(x), trio.b.dot(x), x * 2]
    torch.autograd.backward(roots, [seed, None, seed])
    copy = x.detach().clone().requires_grad_()
    places = trio.places
    torch.autograd.backward([places["a"].affine(copy), places["b"].dot(copy), copy * 2], [seed, None, seed])
    assert_close(x.grad, copy.grad, "x")
    trio.check_parameters()


def test_a_second_backward_needs_retain_graph(trio: Both, leaf: Leaf) -> None:
    loss = trio.a.affine(leaf()).sum()
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_a_retained_graph_can_be_used_again_and_again(trio: Both, leaf: Leaf) -> None:
    x = leaf()
    loss = trio.a.hop(x, ["b"]).sum()
    for _ in range(3):
        loss.backward(retain_graph=True)
    loss.backward()
    with pytest.raises(RuntimeError, match="a second time"):
        loss.backward()
    copy = x.detach().clone().requires_grad_()
    (4 * trio.places["a"].hop(copy, ["b"]).sum()).backward()
    assert_close(x.grad, copy.grad, "x")
    trio.check_parameters()


def test_gradients_accumulate_over_backwards(trio: Both, leaf: Leaf) -> None:
    x, copy = leaf(), leaf()
    for scale in (1, 2, 3):
        trio.a.affine(x * scale).sum().backward()
        trio.places["a"].affine(copy * scale).sum().backward()
    assert_close(x.grad, copy.grad, "x")
    trio.check_parameters()


def test_two_losses_over_one_remote_result(trio: Both, leaf: Leaf) -> None:
    x, copy = leaf(), leaf()
    h, expected = trio.a.affine(x), trio.places["a"].affine(copy)
    h.sum().backward(retain_graph=True)
    (h * h).sum().backward()
    expected.sum().backward(retain_graph=True)
    (expected * expected).sum().backward()
    assert_close(x.grad, copy.grad, "x")
    trio.check_parameters()


def test_inputs_leave_the_parameters_of_workers_alone(trio: Both, leaf: Leaf) -> None:
    x, y = leaf(0), leaf(1)
    trio.a.affine(x * y).sum().backward(inputs=[x])
    copy = x.detach().clone().requires_grad_()
    trio.places["a"].affine(copy * y.detach()).sum().backward()
    assert_close(x.grad, copy.grad, "x")
    assert y.grad is None
    assert all(found is None for found in trio.remote_gradients().values())


def test_inputs_that_are_not_reached_through_a_worker_ask_no_worker(trio: Both, leaf: Leaf) -> None:
    x, y = leaf(0), leaf(1)
    loss = trio.a.raising_in_backward(x).sum() + (y * 2).sum()
    loss.backward(inputs=[y])
    assert_close(y.grad, torch.full((2, 3), 2.0, dtype=torch.float64), "y")


def test_hooks_on_what_is_sent_and_received_see_and_change_gradients(trio: Both, leaf: Leaf) -> None:
    def compute(call: Call, x: torch.Tensor) -> torch.Tensor:
        h = torch.sin(x)
        h.register_hook(lambda gradient: gradient * 2)
        out = call("a", "affine", h)
        out.register_hook(lambda gradient: gradient + 1)
        return (out * out).sum()

    trio.check(compute, leaf())


def test_retain_grad_on_what_is_sent_and_received(trio: Both, leaf: Leaf) -> None:
    x = leaf()
    h = torch.sin(x)
    out = trio.a.affine(h)
    h.retain_grad()
    out.retain_grad()
    (out * out).sum().backward()
    copy = torch.sin(x.detach()).requires_grad_()
    expected = trio.places["a"].affine(copy)
    expected.retain_grad()
    (expected * expected).sum().backward()
    assert_close(h.grad, copy.grad, "sent")
    assert_close(out.grad, expected.grad, "received")


def test_hooks_after_accumulation_run_once_with_the_whole_gradient(trio: Both, leaf: Leaf) -> None:
    x = leaf()
    seen: list[torch.Tensor] = []
    x.register_post_accumulate_grad_hook(lambda tensor: seen.append(tensor.grad.clone()))  # type: ignore[union-attr]
    (trio.a.affine(x) * trio.b.affine(x) + x).sum().backward()
    assert len(seen) == 1
    assert_close(seen[0], x.grad, "x")


def test_no_grad_records_nothing(trio: Both, leaf: Leaf) -> None:
    with torch.no_grad():
        out = trio.a.affine(leaf())
    assert not out.requires_grad
    assert out.grad_fn is None


@pytest.mark.parametrize("size", [3, 40_000])
def test_inference_mode_travels(trio: Both, size: int) -> None:
    x = torch.ones(size, 3, dtype=torch.float64, requires_grad=True)
    with torch.inference_mode():
        out = trio.a.affine(x)
        assert out.is_inference()
    assert not out.requires_grad
    assert_close(out.clone(), trio.places["a"].affine(x).detach(), "result")


def test_inference_mode_travels_where_gradients_are_enabled_in_it(trio: Both, leaf: Leaf) -> None:
    """torch then reports both: gradients on, and inference mode on."""
    x = leaf()
    with torch.inference_mode(), torch.enable_grad():
        expected = trio.places["a"].affine(x)
        out = trio.a.affine(x)
    assert (out.is_inference(), out.requires_grad) == (expected.is_inference(), expected.requires_grad)


def test_detach_cuts_the_graph(trio: Both, leaf: Leaf) -> None:
    x = leaf()
    out = trio.a.affine(x).detach()
    assert not out.requires_grad
    (out * x).sum().backward()
    assert_close(x.grad, out, "x")
    assert all(found is None for found in trio.remote_gradients().values())


def test_autocast_travels(trio: Both) -> None:
    x = torch.ones(2, 3, dtype=torch.float32, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert trio.a.autocast_state() == (True, torch.bfloat16)
        out = trio.a.matmul(x)
    assert out.dtype == torch.bfloat16
    assert trio.a.autocast_state()[0] is False
    out.float().sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == torch.float32


def test_anomaly_mode_names_worker_function_and_line(trio: Both) -> None:
    x = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    with torch.autograd.set_detect_anomaly(True):
        loss = trio.a.root_of_minus_one_times(x).sum()
        with (
            # torch's own, about the line of the call here; the error has the line there.
            pytest.warns(UserWarning, match="Error detected in"),
            pytest.raises(RuntimeError, match="returned nan values") as caught,
        ):
            loss.backward()
    told = "\n".join([str(caught.value), *caught.value.__notes__])
    assert "root_of_minus_one_times on a" in told
    assert "torch.sqrt(-1 - x)" in told
    assert isinstance(caught.value, gw.RemoteError)
    # It has been turned off again there: the same without it is fine.
    trio.a.root_of_minus_one_times(x).sum().backward()


def test_anomaly_mode_in_backward_alone_is_noticed_on_the_worker(trio: Both) -> None:
    x = torch.zeros(2, 3, dtype=torch.float64, requires_grad=True)
    loss = trio.a.root_of_minus_one_times(x).sum()
    with (
        torch.autograd.set_detect_anomaly(True),
        pytest.warns(UserWarning, match="Error detected in"),
        pytest.raises(RuntimeError, match="returned nan values"),
    ):
        loss.backward()


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpoint_around_a_remote_call(trio: Both, leaf: Leaf, use_reentrant: bool) -> None:
    def compute(call: Call, x: torch.Tensor) -> torch.Tensor:
        def segment(y: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = torch.sin(call("a", "affine", torch.sin(y))) * call("b", "affine", y)
            return out

        out: torch.Tensor = checkpoint(segment, x * 2, use_reentrant=use_reentrant)
        return (out * x).sum()

    trio.check(compute, leaf())


def test_saved_tensor_hooks(trio: Both, leaf: Leaf) -> None:
    def compute(call: Call, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu():
            out: torch.Tensor = call("a", "affine", torch.sin(x)) * x
        return out.sum()

    trio.check(compute, leaf())


def test_backward_within_a_hook_of_another_backward(trio: Both, leaf: Leaf) -> None:
    """Graph tasks nest."""
    x, y, copy = leaf(0), leaf(1), leaf(1)
    out = trio.a.affine(x)

    def nested(gradient: torch.Tensor) -> None:
        with torch.enable_grad():
            trio.b.affine(y).sum().backward()

    out.register_hook(nested)
    out.sum().backward()
    trio.places["b"].affine(copy).sum().backward()
    assert_close(y.grad, copy.grad, "y")
    copy_x = leaf(0)
    trio.places["a"].affine(copy_x).sum().backward()
    assert_close(x.grad, copy_x.grad, "x")
    trio.check_parameters()


def test_backward_from_several_threads_through_one_result(trio: Both, leaf: Leaf) -> None:
    x, copy = leaf(), leaf()
    out = trio.a.hop(x, ["b", "a"])
    failures: list[BaseException] = []

    def run(scale: int) -> None:
        try:
            (out * scale).sum().backward(retain_graph=True)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(scale,)) for scale in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    (trio.places["a"].hop(copy, ["b", "a"]) * sum(range(1, 9))).sum().backward()
    assert_close(x.grad, copy.grad, "x")
    trio.check_parameters()


def test_a_served_function_that_runs_backward_itself(trio: Both, leaf: Leaf) -> None:
    """Gradients for its arguments reach the caller's leaves, as if it ran there."""
    x, copy = leaf(), leaf()
    assert trio.a.step_alone(torch.sin(x)) is True
    trio.places["a"].affine(torch.sin(copy)).sum().backward()
    assert_close(x.grad, copy.grad, "x")


def test_an_error_in_backward_arrives_with_type_message_and_place(trio: Both, leaf: Leaf) -> None:
    x = leaf()
    loss = trio.a.raising_in_backward(x).sum()
    with pytest.raises(ValueError, match="always fails") as caught:
        loss.backward()
    assert isinstance(caught.value, gw.RemoteError)
    assert caught.value.worker == "a"
    assert "raise ValueError" in caught.value.remote_traceback
    assert any("raising_in_backward on a" in note for note in caught.value.__notes__)
    assert x.grad is None


def test_an_error_further_on_arrives_through_the_worker_in_between(trio: Both, leaf: Leaf) -> None:
    loss = trio.a.relay("b", "raising_in_backward", leaf()).sum()
    with pytest.raises(ValueError, match="always fails") as caught:
        loss.backward()
    assert isinstance(caught.value, gw.RemoteError)
    assert caught.value.worker == "b"


def test_after_an_error_in_backward_all_goes_on(trio: Both, leaf: Leaf) -> None:
    x, copy = leaf(), leaf()
    for _ in range(3):
        loss = (trio.a.raising_in_backward(x) * trio.b.affine(x)).sum()
        with pytest.raises(ValueError, match="always fails"):
            loss.backward()
    x.grad = None
    for worker in trio.workers.values():
        worker.reset()
    trio.a.affine(x).sum().backward()
    trio.places["a"].affine(copy).sum().backward()
    assert_close(x.grad, copy.grad, "x")
    trio.check_parameters()


def test_a_local_error_in_backward_gives_up_what_is_under_way(trio: Both, leaf: Leaf) -> None:
    x = leaf()
    out = trio.a.slow(x)

    def fail(gradient: torch.Tensor) -> None:
        raise KeyError("local")

    y = x * 1
    y.register_hook(fail)
    started = time.monotonic()
    with pytest.raises(KeyError, match="local"):
        # The failing hook runs while the worker is at it, and then nobody waits for the worker.
        (out.sum() + y.sum()).backward()
    assert time.monotonic() - started < 20


def test_a_timeout_bounds_backward(trio: Both, leaf: Leaf) -> None:
    loss = trio.a.relay("b", "slow", leaf()).sum()
    started = time.monotonic()
    with gw.timeout(0.3), pytest.raises(gw.DeadlineExceeded):
        loss.backward()
    assert time.monotonic() - started < 10


def test_a_gradient_that_cannot_travel_is_an_error_and_not_a_hang(trio: Both, leaf: Leaf) -> None:
    x = leaf()
    batch = torch.ones(2, 2, 3, dtype=torch.float64)
    with pytest.raises((gw.Unencodable, NotImplementedError)):
        torch.autograd.grad(trio.a.affine(x), [x], [batch], is_grads_batched=True)


DDP = """
import sys, torch, torch.distributed as dist
import gradwire as gw
torch.set_num_threads(1)
rank, store, address = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
torch.manual_seed(0)
layer = torch.nn.Linear(3, 3, dtype=torch.float64)
worker = gw.connect(address)
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = layer
    def forward(self, x):
        return worker.affine(self.layer(x))
model = torch.nn.parallel.DistributedDataParallel(Model())
x = torch.full((2, 3), rank + 1.0, dtype=torch.float64)
model(x).sum().backward()
print([round(value, 12) for value in layer.weight.grad.flatten().tolist()])
worker.close()
dist.destroy_process_group()
"""


def test_distributed_data_parallel_on_the_trainers(trio: Both, tmp_path: Path) -> None:
    script, store = tmp_path / "trainer.py", tmp_path / "store"
    script.write_text(DDP)
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(store), trio.a.target],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        )
        for rank in range(2)
    ]
    outputs = []
    try:
        for process in processes:
            out, errors = process.communicate(timeout=90)
            assert process.returncode == 0, errors
            outputs.append(eval(out))
    finally:
        for process in processes:
            process.kill()
            process.wait(10)
    assert outputs[0] == outputs[1]
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 3, dtype=torch.float64)
    place = trio.places["a"]
    for rank in range(2):
        x = torch.full((2, 3), rank + 1.0, dtype=torch.float64)
        (place.affine(layer(x)).sum() / 2).backward()
    assert layer.weight.grad is not None
    assert outputs[0] == pytest.approx(layer.weight.grad.flatten().tolist(), abs=1e-11)
