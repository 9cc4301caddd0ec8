"""A remote step costs two requests: one forward, one backward. Counted at the link."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from tests.autograd.comparing import Both

import gradwire as gw
from gradwire.proto.v1 import link_pb2
from gradwire.transport import Session, native
from gradwire.transport import session as session_module

Leaf = Callable[..., torch.Tensor]

FORWARD = link_pb2.METHOD_FORWARD_WITH_AUTOGRAD
BACKWARD = link_pb2.METHOD_PROPAGATE_GRADIENTS
CLEANUP = link_pb2.METHOD_CLEANUP_CONTEXT


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """The questions that this process asked and was asked, by method."""
    counted: Counter[int] = Counter()
    send_request = Session.send_request
    on_request = session_module._HANDLERS[native.REQUEST]

    def counting_ask(self: Session, method: int, *args: object, **kwargs: object) -> object:
        counted[method] += 1
        return send_request(self, method, *args, **kwargs)  # type: ignore[arg-type]

    def counting_on_request(self: Session, event: native.Event) -> None:
        counted[event.method] += 1
        on_request(self, event)

    monkeypatch.setattr(Session, "send_request", counting_ask)
    monkeypatch.setitem(session_module._HANDLERS, native.REQUEST, counting_on_request)
    return counted


def test_a_step_is_two_requests(trio: Both, leaf: Leaf, asked: Counter[int]) -> None:
    x = leaf()
    loss = trio.a.affine(torch.sin(x)).sum()
    assert asked == {FORWARD: 1}
    loss.backward()
    assert asked == {FORWARD: 1, BACKWARD: 1}


def test_a_step_through_a_chain_of_workers_is_two_requests_here(
    trio: Both, leaf: Leaf, asked: Counter[int]
) -> None:
    x = leaf()
    trio.a.hop(x, ["b", "c", "a"]).sum().backward()
    assert asked == {FORWARD: 1, BACKWARD: 1}


def test_a_step_that_reaches_back_through_state_is_still_two_requests_a_call(
    trio: Both, leaf: Leaf, asked: Counter[int]
) -> None:
    x = leaf()
    trio.a.keep(x)
    trio.a.recall(x).sum().backward()
    assert asked == {FORWARD: 2, BACKWARD: 1}


def test_a_loop_of_steps_costs_two_requests_each_and_a_flush_a_second(
    trio: Both, leaf: Leaf, asked: Counter[int]
) -> None:
    x = leaf()
    started = time.monotonic()
    for _ in range(50):
        x.grad = None
        trio.a.affine(x).sum().backward()
    took = time.monotonic() - started
    assert asked[FORWARD] == 50
    assert asked[BACKWARD] == 50
    assert asked[CLEANUP] <= math.ceil(took) + 1
    assert set(asked) <= {FORWARD, BACKWARD, CLEANUP}


def test_an_explicit_context_adds_its_end(trio: Both, leaf: Leaf, asked: Counter[int]) -> None:
    x = leaf()
    with gw.context() as context:
        context.backward(trio.a.affine(x).sum())
    assert asked == {FORWARD: 1, BACKWARD: 1, CLEANUP: 1}


def test_a_result_that_is_not_used_costs_nothing_in_backward(
    trio: Both, leaf: Leaf, asked: Counter[int]
) -> None:
    x = leaf()
    unused = trio.a.affine(x)
    (x * 2).sum().backward()
    assert asked == {FORWARD: 1}
    del unused


def test_one_request_propagates_to_all_results_of_a_call(trio: Both, leaf: Leaf, asked: Counter[int]) -> None:
    first, second, *_, last = trio.a.several(leaf(0), leaf(1))
    (first * second * last).sum().backward()
    assert asked == {FORWARD: 1, BACKWARD: 1}
