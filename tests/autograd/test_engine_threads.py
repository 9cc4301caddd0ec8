"""What surrounds a backward holds on the threads of torch's engine, too.

The engine has a thread for each device. Without a device, backwards that are nested more than 60 deep run on
another thread, which shows the same.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.autograd.comparing import Both, assert_close

import gradwire as gw
from gradwire.runtime.scope import current_scope, entered

DEPTH = 70
"""More than the engine nests on one thread."""
Look = Callable[[], Any]
Compute = Callable[[torch.Tensor], torch.Tensor]


def nested(compute: Compute, x: torch.Tensor, depth: int = DEPTH) -> torch.Tensor:
    """Computes so that its backward is nested within others."""
    if depth == 0:
        return compute(x)
    result: torch.Tensor = Checkpointed.apply(x, compute, depth)  # type: ignore[no-untyped-call]
    return result


class Checkpointed(torch.autograd.Function):
    """As torch's own reentrant checkpoint: computes in backward, and runs a backward there.

    Before that it does not compute at all, since nobody looks at the result: so all calls are made on the
    thread that the deepest backward runs on.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, compute: Compute, depth: int) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.compute, ctx.depth = compute, depth
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradient: Any) -> Any:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            result = nested(ctx.compute, x, ctx.depth - 1)
        torch.autograd.backward(result, gradient[0])
        return x.grad, None, None


class Looking(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, look: Look) -> torch.Tensor:
        ctx.look = look
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradient: Any) -> Any:
        ctx.look()
        return gradient[0], None


def seen_on_another_thread(look: Look, start: Callable[[torch.Tensor], None] = torch.Tensor.backward) -> Any:
    """What is found in a backward by code that does not run on the thread that called it."""
    found: list[Any] = []
    here = threading.get_ident()

    def looks() -> None:
        assert threading.get_ident() != here
        found.append(look())

    x = torch.ones(2, requires_grad=True)
    start(nested(lambda x: Looking.apply(x, looks), x).sum())  # type: ignore[no-untyped-call]
    (one,) = found
    return one


def test_a_deadline_holds_there() -> None:
    assert seen_on_another_thread(gw.deadline) is None
    with gw.timeout(50):
        left = seen_on_another_thread(gw.deadline)
    assert left is not None
    assert 0 < left < 50
    assert seen_on_another_thread(gw.deadline) is None


def test_a_deadline_ends_a_backward_that_waits_there(trio: Both, leaf: Callable[..., torch.Tensor]) -> None:
    loss = nested(trio.a.slow, leaf()).sum()
    with gw.timeout(5), pytest.raises(gw.DeadlineExceeded):
        loss.backward()


@pytest.mark.parametrize("how", ["backward", "context"])
def test_calls_are_made_in_the_context_that_was_entered(
    how: str, trio: Both, leaf: Callable[..., torch.Tensor]
) -> None:
    """A checkpoint calls again in backward."""
    x, y = leaf(), leaf()
    with gw.context() as context:
        assert seen_on_another_thread(lambda: gw.current_context().id) == context.id
        loss = nested(trio.a.affine, x).sum()
        if how == "context":
            context.backward(loss)
            gradient = context.gradients()[x]
        else:
            loss.backward()
            assert x.grad is not None
            gradient = x.grad
        bias = trio.a.gradients()["bias"]
    expected = trio.places["a"].affine(y).sum()
    expected.backward()
    assert_close(gradient, y.grad, "x")
    assert_close(bias, trio.places["a"].bias.grad, "bias")


def test_what_is_entered_there_is_left_there() -> None:
    def look() -> list[float | None]:
        before = gw.deadline()
        with gw.timeout(1000):
            within = gw.deadline()
            with gw.timeout(5):
                nearer = gw.deadline()
        return [before, within, nearer, gw.deadline()]

    for limit in (None, 100.0):
        with gw.timeout(1e6 if limit is None else limit):
            before, within, nearer, after = seen_on_another_thread(look)
        assert before is not None
        assert after is not None
        assert after <= before
        assert within <= min(before, 1000)
        assert nearer <= 5


def test_tasks_of_one_thread_do_not_get_the_deadlines_of_one_another() -> None:
    async def bounded(entered: asyncio.Event, done: asyncio.Event) -> None:
        with gw.timeout(50):
            entered.set()
            await done.wait()
            assert gw.deadline() is not None

    async def both() -> tuple[Any, Any]:
        entered, done = asyncio.Event(), asyncio.Event()
        other = asyncio.create_task(bounded(entered, done))
        await entered.wait()
        found = gw.deadline(), seen_on_another_thread(gw.deadline)
        done.set()
        await other
        return found

    assert asyncio.run(both()) == (None, None)
    with gw.timeout(1000):  # around the loop: all its tasks have it
        here, there = asyncio.run(both())
        assert here is not None
        assert 50 < there <= here <= 1000


def test_a_thread_without_a_scope_of_its_own_gets_nobody_elses() -> None:
    found: list[Any] = []
    with gw.timeout(50):
        thread = threading.Thread(target=lambda: found.append(gw.deadline()))
        thread.start()
        thread.join(60)
    assert found == [None]


def test_nothing_stays_behind_in_torch() -> None:
    with entered(current_scope()):
        assert torch._C._is_key_in_tls("gradwire.scope")
    assert not torch._C._is_key_in_tls("gradwire.scope")
