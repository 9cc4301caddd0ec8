"""Both ends of a link agree on its plans, which take a bounded amount of memory."""

from __future__ import annotations

import gc
import tracemalloc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from tests.unit.wire.support import taken_apart

from gradwire.errors import MalformedMessage
from gradwire.proto.v1 import autograd_pb2
from gradwire.wire import Plans, is_short
from gradwire.wire import plans as plans_module
from gradwire.wire.layouts import Flat, Layout

Received = tuple[autograd_pb2.ForwardWithAutogradRequest, Sequence[str], Flat]
"""What a plan is kept of: a request, the names of its keyword arguments, and all of its arguments."""


@contextmanager
def traced() -> Iterator[Callable[[], int]]:
    """Gives a function that says how much memory of Python's is in use."""
    tracemalloc.start()
    try:
        yield lambda: tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def call(number: int, function: str = "f") -> autograd_pb2.ForwardWithAutogradRequest:
    request = autograd_pb2.ForwardWithAutogradRequest(function=function, plan=number)
    request.args.add()
    return request


def test_a_plan_is_made_at_the_second_call_and_used_when_it_is_kept() -> None:
    here, there = Plans(), Plans()
    flat = taken_apart([1])
    assert here.plan_for(("f",), 1, flat) is None
    plan = here.plan_for(("f",), 1, flat)
    assert plan is not None
    assert not plan.is_kept
    received = there.keep(call(plan.number), [], flat)
    assert received is there.received(plan.number)
    found = received.result(there, taken_apart([2.5]))
    assert found is not None
    response = autograd_pb2.ForwardWithAutogradResponse(plan_is_kept=True, result_number=found[0])
    plan.learn(here, response, 2.5)
    assert here.plan_for(("f",), 1, flat) is plan
    assert plan.is_kept
    assert here.are_understood
    assert plan.known_results == 1
    body, attachments = found[1].write(taken_apart([3.5]))
    assert plan.result(1).read(body, 0, attachments).values() == [3.5]


def test_a_number_keeps_its_meaning() -> None:
    plans = Plans()
    first = plans.keep(call(1), [], taken_apart([1]))
    assert plans.keep(call(1, "g"), [], taken_apart([torch.ones(3)])) is first
    assert first is not None
    assert first.request.function == "f"


def test_numbers_that_nobody_gave_are_refused() -> None:
    with pytest.raises(MalformedMessage, match="no plan 7"):
        Plans().received(7)
    plans = Plans()
    plans.plan_for(("f",), 1, taken_apart([1]))
    plan = plans.plan_for(("f",), 1, taken_apart([1]))
    assert plan is not None
    with pytest.raises(MalformedMessage, match="no result 1"):
        plan.result(1)
    for number, result in ((17, 1), (2**32 - 1, 1), (1, b"bytes")):
        with pytest.raises(MalformedMessage, match="cannot be number"):
            plan.learn(plans, autograd_pb2.ForwardWithAutogradResponse(result_number=number), result)


def test_the_plans_of_a_link_that_is_gone_are_gone_at_once() -> None:
    plans = Plans()
    received = plans.keep(call(1), [], taken_apart([1]))
    assert received is not None
    assert received.result(plans, taken_apart([2.5])) is not None
    for _ in range(2):
        plans.plan_for(("f",), 1, taken_apart([1]))
    gone = weakref.ref(plans)
    gc.disable()
    try:
        del plans, received
        assert gone() is None
    finally:
        gc.enable()


def test_a_plan_numbers_so_many_structures_of_results() -> None:
    plans = Plans()
    received = plans.keep(call(1), [], taken_apart([1]))
    assert received is not None
    found = [received.result(plans, taken_apart([torch.ones(size)])) for size in range(1, 30)]
    assert [one[0] for one in found if one is not None] == list(range(1, 17))


def scalars_by_name(number: int) -> Received:
    names = [f"{number}-{index}-{'x' * 2000}" for index in range(100)]
    return call(number), names, taken_apart([1] * 101)


def nothing(number: int) -> Received:
    return autograd_pb2.ForwardWithAutogradRequest(plan=number), [], taken_apart([])


def long_name(number: int) -> Received:
    function = "\N{GRINNING FACE}" * 10_000
    return autograd_pb2.ForwardWithAutogradRequest(function=function, plan=number), [], taken_apart([])


def lists(number: int) -> Received:
    return call(number), [], taken_apart([[] for _ in range(2000)])


def strings(number: int) -> Received:
    texts = [f"{number} {index} " + "\N{GRINNING FACE}" * 240 for index in range(1000)]
    return call(number), [], taken_apart(texts)


@pytest.mark.parametrize("make", [scalars_by_name, nothing, long_name, lists, strings])
def test_the_plans_of_a_link_take_so_much_memory(make: Callable[[int], Received]) -> None:
    plans = Plans()
    with traced() as size:
        before = size()
        for number in range(1, 20_000):
            if plans.keep(*make(number)) is None:
                break
        else:
            pytest.fail("there is no limit")
        assert size() - before < 16 * 1024 * 1024


def test_calls_go_in_full_when_there_is_no_room_for_their_plan() -> None:
    plans = Plans()
    flat = taken_apart([["x" * 250] * 1000])
    for number in range(100):
        plans.plan_for((number, *flat.key), 1, flat)
    found = [plans.plan_for((number, *flat.key), 1, flat) for number in range(100)]
    assert found[0] is not None
    assert found[-10:] == [None] * 10


def test_a_link_has_room_for_some_thousand_plans() -> None:
    plans = Plans()
    tensors = [torch.ones(3, 4), torch.ones(7, requires_grad=True)]
    for number in range(1, 1500):
        plan = plans.keep(call(number), [], taken_apart([*tensors, number, str(number)]))
        assert plan is not None
        assert plan.result(plans, taken_apart([tensors[1]])) is not None


def test_results_that_another_peer_numbers_take_so_much_memory() -> None:
    plans = Plans()
    names = ["x" * 250] * 1000
    for key in range(10):
        for _ in range(2):
            plan = plans.plan_for((key,), 1, taken_apart([1]))
        if plan is None:
            break
        for number in range(1, 17):
            plan.learn(plans, autograd_pb2.ForwardWithAutogradResponse(result_number=number), names)
    assert sum(len(plan._results) for plan in plans._sent.values()) < 40


def test_what_was_seen_once_keeps_nothing_alive() -> None:
    plans = Plans()
    with traced() as size:
        before = size()
        for number in range(900):
            assert plans.plan_for((f"{number} {'x' * 10_000}",), 1, taken_apart([1])) is None
        assert size() - before < 1024 * 1024


def test_calls_that_are_all_different_are_not_all_remembered() -> None:
    plans = Plans()
    with traced() as size:
        before = size()
        for number in range(50_000):
            assert plans.plan_for((number,), 1, taken_apart([number])) is None
        assert size() - before < 1024 * 1024


def test_as_many_structures_in_turn_as_have_room_get_plans() -> None:
    plans, flat = Plans(), taken_apart([])
    for _ in range(2):
        found = [plans.plan_for((number,), 0, flat) for number in range(6000)]
    assert None not in found


def test_no_message_of_the_contract_looks_short() -> None:
    for message in (call(1), autograd_pb2.ForwardWithAutogradRequest(), call(0, "")):
        assert not is_short(message.SerializeToString())


def test_a_destructor_that_calls_while_a_plan_is_made_gets_a_plan_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans, flat = Plans(), taken_apart([1])
    nested = []

    class Interrupted(Layout):
        def __init__(self, values: int, flat: Flat) -> None:
            super().__init__(values, flat)
            monkeypatch.setattr(plans_module, "Layout", Layout)
            nested.append(plans.plan_for(("nested",), 1, flat))

    for key in ("outer", "nested"):
        assert plans.plan_for((key,), 1, flat) is None
    monkeypatch.setattr(plans_module, "Layout", Interrupted)
    outer = plans.plan_for(("outer",), 1, flat)
    assert outer is not None
    assert nested[0] is not None
    assert outer.number != nested[0].number
