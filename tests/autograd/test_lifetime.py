"""Nothing is kept longer than it is needed, on clients and on workers."""

from __future__ import annotations

import concurrent.futures
import gc
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from tests.autograd.comparing import Both
from tests.autograd.places import held_here

import gradwire as gw
import gradwire_server as gws
from gradwire.api.calls import CallFuture
from gradwire.transport.base import ResponseFuture

Leaf = Callable[..., torch.Tensor]
Step = Callable[[Both, torch.Tensor], None]

RELEASED_WITHIN = 10.0
"""Seconds. Releases ride on other messages, or leave on their own within one."""
THREAD_NOISE = 32
"""A worker has as many threads as it ever had requests at once: some more if the machine is busy."""
RESIDENT_NOISE = 6_000
RESIDENT_NOISE_OF_A_THREAD = 2_000
"""Kilobytes that a process may grow by without there being a leak: allocators do not give everything back."""


def plain(trio: Both, x: torch.Tensor) -> None:
    trio.a.affine(torch.sin(x)).sum().backward()


def explicit_context(trio: Both, x: torch.Tensor) -> None:
    with gw.context() as context:
        context.backward(trio.a.affine(torch.sin(x)).sum())


def dropped_without_backward(trio: Both, x: torch.Tensor) -> None:
    trio.a.affine(torch.sin(x))


def dropped_without_being_read(trio: Both, x: torch.Tensor) -> None:
    concurrent.futures.wait([trio.a.call_async("affine", torch.sin(x))], timeout=30)


def autograd_grad(trio: Both, x: torch.Tensor) -> None:
    torch.autograd.grad(trio.a.affine(torch.sin(x)).sum(), [x])


def retained(trio: Both, x: torch.Tensor) -> None:
    loss = trio.a.affine(torch.sin(x)).sum()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)


def raising_in_forward(trio: Both, x: torch.Tensor) -> None:
    with pytest.raises(ValueError, match="no use"):
        trio.a.raising(torch.sin(x))


def unknown_function(trio: Both, x: torch.Tensor) -> None:
    with pytest.raises(gw.UnknownFunction):
        trio.a.no_such_function(torch.sin(x))


def raising_in_backward(trio: Both, x: torch.Tensor) -> None:
    loss = (trio.a.raising_in_backward(torch.sin(x)) * trio.b.affine(x)).sum()
    with pytest.raises(ValueError, match="always fails"):
        loss.backward()


def raising_locally(trio: Both, x: torch.Tensor) -> None:
    y = trio.a.affine(torch.sin(x))
    z = y * 1

    def fail(gradient: torch.Tensor) -> None:
        raise KeyError("local")

    z.register_hook(fail)
    with pytest.raises(KeyError):
        (trio.b.affine(x) * z).sum().backward()


def chain(trio: Both, x: torch.Tensor) -> None:
    trio.a.hop(x, ["b", "c"]).sum().backward()


def chain_in_a_context(trio: Both, x: torch.Tensor) -> None:
    with gw.context() as context:
        context.backward(trio.a.hop(x, ["b", "c"]).sum())


def second_order(trio: Both, x: torch.Tensor) -> None:
    (gradient,) = torch.autograd.grad(trio.a.affine(torch.sin(x)).sum(), [x], create_graph=True)
    gradient.pow(2).sum().backward()


def second_order_dropped(trio: Both, x: torch.Tensor) -> None:
    torch.autograd.grad(trio.a.hop(torch.sin(x), ["b"]).sum(), [x], create_graph=True)


def state_replaced(trio: Both, x: torch.Tensor) -> None:
    trio.a.keep_and_return(torch.sin(x))


def cut_by_a_timeout(trio: Both, x: torch.Tensor) -> None:
    loss = trio.a.slow(torch.sin(x)).sum()
    # The worker looks at the deadline, too, and its answer may be the first to be here.
    with gw.timeout(0.01), suppress(gw.DeadlineExceeded):
        loss.backward()


STEPS = [
    plain,
    explicit_context,
    dropped_without_backward,
    dropped_without_being_read,
    autograd_grad,
    retained,
    raising_in_forward,
    unknown_function,
    raising_in_backward,
    raising_locally,
    chain,
    chain_in_a_context,
    second_order,
    second_order_dropped,
    state_replaced,
    cut_by_a_timeout,
]


def held(trio: Both) -> dict[str, dict[str, int]]:
    """What this process and each worker hold."""
    counting = {name: worker.call_async("held") for name, worker in trio.workers.items()}
    return {"here": held_here(), **{name: future.result(30) for name, future in counting.items()}}


def growth(before: dict[str, dict[str, int]], after: dict[str, dict[str, int]]) -> dict[str, int]:
    grown: dict[str, int] = {}
    for process, counts in before.items():
        more = {what: after[process][what] - count for what, count in counts.items()}
        resident = RESIDENT_NOISE + RESIDENT_NOISE_OF_A_THREAD * max(more["threads"], 0)
        noise = {"kilobytes": resident, "threads": THREAD_NOISE}
        grown.update({f"{process}: {what}": by for what, by in more.items() if by > noise.get(what, 0)})
    return grown


@pytest.fixture(autouse=True)
def quick_counting() -> Iterator[None]:
    """What was there before the test need not be looked at each time."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def check_flat(trio: Both, step: Step, x: torch.Tensor, warm_up: int, count: int) -> None:
    def many(times: int) -> None:
        for _ in range(times):
            x.grad = None
            step(trio, x)

    many(warm_up)
    before = _settled(trio, lambda now: not any(now[process]["results"] for process in trio.workers))
    many(count)
    after = _settled(trio, lambda now: not growth(before, now))
    assert growth(before, after) == {}


def _settled(
    trio: Both, is_settled: Callable[[dict[str, dict[str, int]]], bool]
) -> dict[str, dict[str, int]]:
    give_up_at = time.monotonic() + RELEASED_WITHIN
    while not is_settled(now := held(trio)) and time.monotonic() < give_up_at:
        time.sleep(0.05)
    return now


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_a_loop_of_steps_keeps_nothing(trio: Both, leaf: Leaf, step: Step) -> None:
    check_flat(trio, step, leaf(), warm_up=10, count=10 if step is cut_by_a_timeout else 60)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.__name__)
def test_two_thousand_steps_keep_nothing(trio: Both, leaf: Leaf, step: Step) -> None:
    check_flat(trio, step, leaf(), warm_up=200, count=100 if step is cut_by_a_timeout else 2_000)


@pytest.mark.parametrize(
    "step", [plain, raising_in_forward, raising_in_backward, chain], ids=lambda step: step.__name__
)
def test_activations_go_without_the_help_of_the_collector(trio: Both, leaf: Leaf, step: Step) -> None:
    """A reference cycle would keep them until it comes."""
    gc.collect()
    gc.disable()
    try:
        step(trio, leaf())  # whatever is made once
        activations: list[weakref.ref[torch.Tensor]] = []

        def watched() -> None:
            x = leaf()
            y = x * 2
            activations.append(weakref.ref(y))
            step(trio, y)

        watched()
        # After an error, it is the worker that has to say that it needs the arguments no more.
        give_up_at = time.monotonic() + RELEASED_WITHIN
        while activations[0]() is not None and time.monotonic() < give_up_at:
            time.sleep(0.01)
        assert activations[0]() is None
    finally:
        gc.enable()


def test_an_error_that_is_kept_keeps_only_what_its_traceback_shows(trio: Both, leaf: Leaf) -> None:
    def failing() -> BaseException:
        try:
            trio.a.raising(torch.sin(leaf()))
        except ValueError as error:
            return error.with_traceback(None)
        raise AssertionError

    error = failing()
    gc.collect()
    assert gw.current_context()._peer.engine.container._arguments == {}
    assert "no use" in str(error)


def check_let_go(worker: gws.Worker) -> None:
    """Of results on the worker, and of arguments here: each end says so to the other in its own time."""
    store, own = worker._peer.engine.container, gw.current_context()._peer.engine.container
    give_up_at = time.monotonic() + RELEASED_WITHIN
    while (store._results or own._arguments) and time.monotonic() < give_up_at:
        time.sleep(0.01)
    assert store._results == {}
    assert own._arguments == {}


def test_results_of_a_call_that_was_given_up_are_let_go(
    local_trio: tuple[Both, dict[str, gws.Worker]], leaf: Leaf
) -> None:
    trio, workers = local_trio
    for _ in range(20):
        future = trio.a.call_async("affine", leaf())
        future.cancel()
    trio.a.ping()
    check_let_go(workers["a"])


def test_results_of_a_call_that_is_given_up_just_when_they_come_are_let_go(
    local_trio: tuple[Both, dict[str, gws.Worker]], leaf: Leaf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Too late for the worker to hear of it."""

    def give_up_and_settle(self: CallFuture, outcome: Any) -> bool:
        self.cancel()
        return ResponseFuture.settle(self, outcome)

    trio, workers = local_trio
    with monkeypatch.context() as patch:
        patch.setattr(CallFuture, "settle", give_up_and_settle)
        with pytest.raises(gw.Cancelled):
            trio.a.call_async("affine", leaf()).result()
    check_let_go(workers["a"])


def test_a_client_that_leaves_takes_everything_along(
    local_trio: tuple[Both, dict[str, gws.Worker]], leaf: Leaf
) -> None:
    """On workers that it never spoke to, too."""
    trio, workers = local_trio
    kept = trio.a.hop(leaf(), ["b"])
    kept.sum().backward(retain_graph=True)
    client = gw.current_context().id
    stores = {name: worker._peer.engine.container for name, worker in workers.items()}
    trio.b.close()  # what b holds came by way of a
    assert stores["a"].find(client) is not None
    assert stores["b"].find(client) is not None
    trio.a.close()
    give_up_at = time.monotonic() + RELEASED_WITHIN
    while any(store.find(client) or store._results for store in stores.values()):
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def test_closing_one_of_two_ways_to_a_worker_keeps_what_came_by_the_other(
    local_trio: tuple[Both, dict[str, gws.Worker]], leaf: Leaf
) -> None:
    trio, workers = local_trio
    x = leaf()
    out = trio.a.hop(x, ["b"])
    trio.b.affine(x).sum().backward()
    trio.b.close()
    out.sum().backward()
    store = workers["b"]._peer.engine.container
    context = store.find(gw.current_context().id)
    assert context is not None
    assert len(context.gradients()) == 2


def test_a_leaf_that_a_function_made_for_one_call_takes_its_gradient_along(
    local_trio: tuple[Both, dict[str, gws.Worker]],
) -> None:
    trio, workers = local_trio
    for _ in range(5):
        trio.a.fresh_leaf().sum().backward()
    context = workers["a"]._peer.engine.container.find(gw.current_context().id)
    assert context is not None
    # The worker's thread may not have returned yet from the call that it has answered.
    give_up_at = time.monotonic() + RELEASED_WITHIN
    while context.gradients() and time.monotonic() < give_up_at:
        gc.collect()
        time.sleep(0.01)
    assert context.gradients() == {}
