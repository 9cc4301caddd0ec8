"""State that workers keep over many calls: exact in every mode, and its graph runs once in backward."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.autograd.comparing import Both, assert_close
from tests.autograd.places import NAMES, SHAPE
from tests.autograd.test_round_trips import BACKWARD, asked

import gradwire as gw
import gradwire_server as gws
from gradwire.autograd.kept_state import suspended
from gradwire.autograd.kept_state.gathering import Gathering
from gradwire.autograd.kept_state.remote_segments import RemoteGraphSegment
from gradwire.autograd.records import ReceivedTensors
from gradwire.runtime.scope import current_scope, entered

__all__ = ["asked"]

Call = Callable[..., Any]
Leaf = Callable[..., torch.Tensor]
BACKWARDS = ("plain", "context", "grad", "twice")
STEPS = 6
LET_GO_WITHIN = 10.0


def one_leaf_for_all(call: Call, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([call("a", "recur", x) for _ in range(STEPS)]).prod(0).sum()


def arguments_of_their_own(call: Call, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([call("a", "recur", x * k) for k in range(STEPS)]).prod(0).sum()


def arguments_without_grad(call: Call, x: torch.Tensor) -> torch.Tensor:
    return (torch.stack([call("a", "recur", x.detach() * k) for k in range(STEPS)]).prod(0) * x).sum()


def each_from_the_one_before(call: Call, x: torch.Tensor) -> torch.Tensor:
    outs = [x]
    for _ in range(STEPS):
        outs.append(call("a", "recur", torch.sin(outs[-1])))
    return torch.stack(outs).prod(0).sum()


def only_the_last_is_used(call: Call, x: torch.Tensor) -> torch.Tensor:
    for k in range(STEPS):
        out = call("a", "recur", x * k)
    return out.sum()


def every_other_is_used(call: Call, x: torch.Tensor) -> torch.Tensor:
    out, used = x, []
    for k in range(STEPS):
        out = call("a", "recur", torch.sin(out) if k % 3 else x)
        used.append(out if k % 2 else out.detach())
    return torch.stack(used).prod(0).sum()


def some_from_the_one_before(call: Call, x: torch.Tensor) -> torch.Tensor:
    outs = [x]
    for k in range(2 * STEPS):
        outs.append(call("a", "recur", outs[-1] if k % 3 == 0 else outs[k // 2]))
    return torch.stack(outs[1:]).prod(0).sum()


def the_state_itself_and_more(call: Call, x: torch.Tensor) -> torch.Tensor:
    total = x
    for k in range(STEPS):
        state, other = call("a", "recur_twice", torch.sin(total) if k % 2 else x)
        total = total + (other if k % 2 else state * other)
    return total.sum()


def cut_in_the_middle(call: Call, x: torch.Tensor) -> torch.Tensor:
    outs = [x]
    for k in range(STEPS):
        if k == STEPS // 2:
            call("a", "detach_kept")
        outs.append(call("a", "recur", outs[-1]))
    return torch.stack(outs).prod(0).sum()


def two_chains_that_meet(call: Call, x: torch.Tensor) -> torch.Tensor:
    one = two = x
    for _ in range(STEPS // 2):
        one, two = call("a", "recur", one, "one"), call("a", "recur", two, "two")
    both = call("a", "recall", call("a", "recall", x, "one"), "two")
    return (both * one * two).sum()


def two_layers_on_two_workers(call: Call, x: torch.Tensor) -> torch.Tensor:
    outs = [call("b", "recur", call("a", "recur", x * k)) for k in range(STEPS)]
    return torch.stack(outs).prod(0).sum()


def two_layers_in_a_loop(call: Call, x: torch.Tensor) -> torch.Tensor:
    outs = [x]
    for _ in range(STEPS):
        outs.append(call("b", "recur", call("a", "recur", outs[-1])))
    return torch.stack(outs).prod(0).sum()


def a_head_on_another_worker(call: Call, x: torch.Tensor) -> torch.Tensor:
    outs = [call("b", "affine", call("a", "recur", x * k)) for k in range(STEPS)]
    return torch.stack(outs).prod(0).sum()


def a_later_result_whose_gradient_comes_later(call: Call, x: torch.Tensor) -> torch.Tensor:
    """The arguments of an earlier call are ready for their gradient before that of a later one is there."""
    call("a", "recur", x)
    first = call("a", "recur_twice", torch.sin(x))[1]
    second = call("a", "recur", x.detach())
    third = call("a", "recur", x)
    return (first * call("b", "affine", second) * call("c", "affine", third)).sum()


def state_behind_a_worker(call: Call, x: torch.Tensor) -> torch.Tensor:
    return torch.stack([call("a", "recur_at", x * k, "b") for k in range(STEPS)]).prod(0).sum()


def state_behind_a_worker_in_a_loop(call: Call, x: torch.Tensor) -> torch.Tensor:
    outs = [x]
    for _ in range(STEPS):
        outs.append(call("a", "recur_at", outs[-1], "b"))
    return torch.stack(outs).prod(0).sum()


def state_on_both_in_a_loop(call: Call, x: torch.Tensor) -> torch.Tensor:
    outs = [x]
    for k in range(STEPS):
        outs.append(call("a", "recur_here_and_at", torch.sin(outs[-1]) if k % 3 else x, "b"))
    return torch.stack(outs).prod(0).sum()


def one_state_two_ways(call: Call, x: torch.Tensor) -> torch.Tensor:
    """Directly, and by way of another worker."""
    outs = [x]
    for k in range(STEPS):
        outs.append(call("b", "recur", outs[-1]) if k % 2 else call("a", "recur_at", outs[-1], "b"))
    return torch.stack(outs).prod(0).sum()


def a_worker_whose_state_is_its_own_caller_s(call: Call, x: torch.Tensor) -> torch.Tensor:
    outs = [x]
    for _ in range(STEPS):
        outs.append(call("a", "recur_at", outs[-1], "a"))
    return torch.stack(outs).prod(0).sum()


def hooks_that_are_not_linear(call: Call, x: torch.Tensor) -> torch.Tensor:
    """On all states but the first, whose result is not part of the group yet."""
    outs = [x, call("a", "recur", x)]
    for _ in range(STEPS):
        outs.append(call("a", "recur", outs[-1]) * 3)
        call("a", "hook_kept")
    return torch.stack(outs).prod(0).sum()


PROGRAMS = [
    function
    for function in list(globals().values())
    if callable(function) and getattr(function, "__annotations__", {}).get("call") == "Call"
]


@pytest.mark.parametrize("compute", PROGRAMS, ids=lambda function: function.__name__)
def test_gradients_are_those_of_one_process(
    compute: Callable[..., torch.Tensor], trio: Both, leaf: Leaf
) -> None:
    for backward in BACKWARDS:
        trio.reset()
        trio.check(compute, leaf(), backward=backward)


@pytest.mark.parametrize("compute", PROGRAMS, ids=lambda function: function.__name__)
def test_workers_that_hold_no_run_open_are_exact_too(
    compute: Callable[..., torch.Tensor],
    local_trio: tuple[Both, dict[str, gws.Worker]],
    leaf: Leaf,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked_to = []

    def refuse(root: torch.Tensor) -> bool:
        asked_to.append(root)
        return False

    monkeypatch.setattr(suspended, "_runs_on_one_thread", refuse)
    trio, _ = local_trio
    if compute is hooks_that_are_not_linear:
        pytest.skip("each gradient goes through the hook alone")
    trio.check(compute, leaf())
    if "loop" in compute.__name__:
        assert asked_to


def test_a_result_without_gradient_may_come_before_a_later_one_with(trio: Both, leaf: Leaf) -> None:
    """The backward that is suspended for both no longer waits for the later one, and goes on without it."""

    kept: list[torch.Tensor] = []  # results that nobody uses, but that are still there

    def compute(call: Call, x: torch.Tensor) -> torch.Tensor:
        outs = [call("a", "in_slots", x, "two", "zero", "zero")]
        outs.append(call("a", "in_slots", x, None, "zero", "two"))
        outs.append(call("a", "in_slots", outs[0], "one", "zero", "two"))
        outs.append(call("a", "in_slots", outs[1], None, "zero", "one"))
        outs.append(call("a", "in_slots", outs[2], "two", "one", "two"))
        kept.extend(outs)
        return outs[-1].sum()

    for backward in BACKWARDS:
        trio.reset()
        trio.check(compute, leaf(), backward=backward)


@pytest.mark.parametrize("backward", ["plain", "context", "grad"])
@pytest.mark.parametrize("step", range(STEPS))
def test_groups_that_meet_during_a_backward(step: int, backward: str, trio: Both, leaf: Leaf) -> None:
    """Code that runs in backward makes a call that reaches two states which had nothing in common. Gradients
    of both go on into the gatherings, and the suspended backwards, that they began with."""

    def compute(call: Call, x: torch.Tensor) -> torch.Tensor:
        chains: dict[str, list[torch.Tensor]] = {"one": [x * 2], "two": [x * 3]}
        for _, (key, outs) in itertools.product(range(STEPS), chains.items()):
            outs.append(call("a", "recur", torch.sin(outs[-1]), key))
        one, two = (outs[1:] for outs in chains.values())

        def join(_: torch.Tensor) -> None:
            with torch.enable_grad():
                joined = call("a", "recall_both", x, "one", "two")
            if call != trio.oracle_call:
                before = {_segment_of(outs[-1]).group for outs in (one, two)}
                met = {below.group for below in _segment_of(joined).builds_on}
                groups.append((len(before), before == met, _segment_of(joined).group in before))

        one[step].register_hook(join)  # type: ignore[no-untyped-call]
        return torch.stack([*one, *two]).prod(0).sum()

    groups: list[tuple[int, bool, bool]] = []
    trio.check(compute, leaf(), backward=backward)
    assert (2, True, True) in groups


def _segment_of(result: torch.Tensor) -> RemoteGraphSegment:
    segment = _received(result).segment
    assert segment is not None
    return segment


@pytest.mark.parametrize("route", ["aaa", "aab", "aba", "bab", "abb"])
def test_results_that_a_worker_has_of_itself_or_of_its_caller(route: str, trio: Both, leaf: Leaf) -> None:
    """What is behind a result that came back to the worker that had sent it is not forgotten."""

    def compute(call: Call, *leaves: torch.Tensor) -> torch.Tensor:
        here, there, last = route
        for x in leaves[:-1]:
            call(here, "keep_answer", x, there)
        result: torch.Tensor = call(last, "keep_answer", leaves[-1], there)
        return (result * call(there, "recur", leaves[-1])).sum()

    for backward in BACKWARDS:
        trio.reset()
        trio.check(compute, leaf(0), leaf(1), leaf(2), backward=backward)


def test_a_result_that_is_spent_is_an_argument_that_is_not_used(trio: Both, leaf: Leaf) -> None:
    """Its recv node runs again, without a gradient: the worker, which has let go of it, is not asked."""

    def compute(call: Call, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        call("a", "recur_beside", x, y)
        spent = call("a", "recur_beside", y, y)
        spent.sum().backward()
        result: torch.Tensor = call("a", "recur_beside", x, spent)
        return result.sum()

    trio.check(compute, leaf(0), leaf(1))


@pytest.mark.parametrize("calls", [1, 2, 3, 5])
def test_what_is_kept_over_many_steps(calls: int, trio: Both, leaf: Leaf) -> None:
    """The graphs behind arguments of earlier steps are freed: no later backward goes through them, although
    results of those steps are what the worker calls its state by."""
    x, copy = leaf(), leaf()
    for _ in range(4):
        for call, one in ((trio.call, x), (trio.oracle_call, copy)):
            total: Any = 0
            for k in range(calls):
                total = total + call("a", "times_cached", one * one * (k + 1)).sum()
            total.backward()
        assert_close(x.grad, copy.grad, "x")
        trio.check_parameters()


@pytest.mark.parametrize("calls", [0, 1, 2, 1200])
@pytest.mark.parametrize("lets_go", ["before", "in the same call"])
@pytest.mark.parametrize("are_held", [False, True])
def test_what_was_kept_beside_arguments_that_are_let_go(
    are_held: bool, lets_go: str, calls: int, trio: Both, leaf: Leaf
) -> None:
    """What is left was found together with them, or builds on what was: as few or as many calls later as may
    be. The graph behind them is freed, and no later backward goes through it."""

    def compute(call: Call, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        results = [call("a", "in_slots", x * x, "gone", "", "")]
        results.append(call("a", "in_slots", y, "0", "", "gone"))
        for k in range(calls):
            call("a", "in_slots", y, f"{k + 1}", f"{k}", f"{k}")
        sum(result.sum() for result in results).backward()
        if are_held:
            held.append(results)
        del results
        if lets_go == "before":
            call("a", "detach_kept", "gone")
        result: torch.Tensor = call("a", "in_slots", y, "gone", "", f"{calls}")
        return result.sum()

    held: list[list[torch.Tensor]] = []
    trio.check(compute, leaf(0), leaf(1))


def test_contexts_that_share_what_is_kept_are_exact(trio: Both, leaf: Leaf) -> None:
    """A call in another context reaches a part of what the calls of the first one kept."""

    def compute(call: Call, x: torch.Tensor, other: Any) -> list[torch.Tensor]:
        first = call("a", "in_slots", x, "one", "zero", "zero")
        with other:
            call("a", "in_slots", x, "zero", "zero", "zero")
        second = call("a", "in_slots", first, "two", "zero", "one")
        third = call("a", "in_slots", second, None, "zero", "two")
        with other:
            between = call("a", "in_slots", x, None, "zero", "two")
        fourth = call("a", "in_slots", third, None, "zero", "zero")
        fifth = call("a", "in_slots", third, None, "zero", "two")
        return [second, third, between, fourth, fifth]

    x, copy = leaf(), leaf()
    with gw.context() as inner, gw.context() as outer:
        found = compute(trio.call, x, entered(current_scope()._replace(context=inner.id)))
        expected = compute(trio.oracle_call, copy, nullcontext())
        for size in range(1, len(found) + 1):
            for chosen in itertools.combinations(range(len(found)), size):
                roots = [sum(one[index].sum() for index in chosen) for one in (found, expected)]
                (gradient,) = torch.autograd.grad(roots[0], [x], retain_graph=True)
                (right,) = torch.autograd.grad(roots[1], [copy], retain_graph=True)
                assert_close(gradient, right, f"x by {chosen}")
        assert outer.gradients() == {}


def test_differentiating_twice(trio: Both, leaf: Leaf) -> None:
    def penalty(call: Call, x: torch.Tensor) -> torch.Tensor:
        outs = [x]
        for _ in range(3):
            outs.append(call("a", "recur", outs[-1]))
        total = torch.stack(outs).prod(0).sum()
        (gradient,) = torch.autograd.grad(total, [x], create_graph=True)
        return gradient.pow(2).sum()

    trio.check(penalty, leaf())


def test_gradients_of_results_in_between(trio: Both, leaf: Leaf) -> None:
    """The engine captures those, and need not run their recv nodes."""

    def gradients(call: Call, x: torch.Tensor, wanted: list[int]) -> tuple[torch.Tensor, ...]:
        outs = [x]
        for _ in range(STEPS):
            outs.append(call("a", "recur", torch.sin(outs[-1])))
        return torch.autograd.grad(torch.stack(outs).prod(0).sum(), [outs[k] for k in wanted])

    for wanted in ([STEPS], [3], [0, 3], [2, 4, 5]):
        trio.reset()
        found, expected = (gradients(call, leaf(), wanted) for call in (trio.call, trio.oracle_call))
        for index, one, other in zip(wanted, found, expected, strict=True):
            assert_close(one, other, f"result {index} of {wanted}")


def test_results_that_are_read_in_any_order(trio: Both, leaf: Leaf) -> None:
    """What one builds on may not have been looked at when it is."""
    x, copy = leaf(), leaf()
    futures = []
    for k in range(STEPS):
        futures.append(trio.a.call_async("recur", x * (k + 1)))
        wait(futures)  # its response is there, but nobody has read it
    outs = [future.result() for future in (futures[3], futures[5], futures[0], futures[4])]
    del futures
    torch.stack(outs).prod(0).sum().backward()
    expected = [trio.oracle_call("a", "recur", copy * (k + 1)) for k in range(STEPS)]
    torch.stack([expected[k] for k in (3, 5, 0, 4)]).prod(0).sum().backward()
    assert_close(x.grad, copy.grad, "x")
    trio.check_parameters()


def test_results_that_are_read_in_inference_mode(trio: Both, leaf: Leaf) -> None:
    """Their calls were recorded, and later results lead to the arguments of those calls."""
    x, copy = leaf(), leaf()
    for _ in range(STEPS):
        future = trio.a.call_async("recur", x)
        with torch.inference_mode():
            future.result()
        trio.oracle_call("a", "recur", copy)
    trio.call("a", "recur", x).sum().backward()
    trio.oracle_call("a", "recur", copy).sum().backward()
    assert_close(x.grad, copy.grad, "x")
    trio.check_parameters()


@st.composite
def programs(draw: st.DrawFn) -> list[tuple[str, int, str, str, str]]:
    functions = [
        "recur",
        "recur",
        "recur",
        "recur_twice",
        "recur_at",
        "recur_here_and_at",
        "recall",
        "affine",
    ]
    return draw(
        st.lists(
            st.tuples(
                st.sampled_from(functions),
                st.integers(0, 20),
                st.sampled_from(NAMES[:2]),
                st.sampled_from(NAMES[:2]),
                st.sampled_from(["", "other"]),
            ),
            min_size=3,
            max_size=12,
        )
    )


@settings(
    max_examples=150,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    program=programs(),
    used=st.lists(st.integers(0, 5), min_size=1, max_size=5),
    backward=st.sampled_from(["plain", "plain", "context", "grad", "twice"]),
)
def test_random_recurrent_programs(
    program: list[tuple[str, int, str, str, str]], used: list[int], backward: str, trio: Both
) -> None:
    def compute(call: Call, x: torch.Tensor, constant: torch.Tensor) -> torch.Tensor:
        values = [x, constant]
        for function, operand, worker, other, key in program:
            argument = values[-1 - operand % len(values)]
            if function in ("recur_at", "recur_here_and_at"):
                values.append(call(worker, function, argument, other, key))
            elif function == "recur_twice":
                values.extend(call(worker, function, argument, key))
            elif function == "affine":
                values.append(call(worker, function, argument))
            else:
                values.append(call(worker, function, argument, key))
        chosen = [values[-1 - index % len(values)] for index in used]
        return torch.stack([torch.tanh(value) for value in chosen]).sum() + x.sum()

    trio.reset()
    generator = torch.Generator().manual_seed(len(program))
    x, constant = (torch.randn(SHAPE, generator=generator, dtype=torch.float64) for _ in range(2))
    trio.check(compute, x.requires_grad_(), constant, backward=backward)


# -- what it costs, counted


@pytest.mark.parametrize(
    "program",
    ["independent", "constant", "loop", "behind a worker", "loop behind a worker", "state on both"],
)
def test_a_step_runs_backward_once(program: str, trio: Both, leaf: Leaf) -> None:
    """The first result is told of before the worker can know that there will be others: it may go alone."""
    steps = 30
    for name in NAMES:
        trio.workers[name].counted()
    x = leaf()
    outs = [x]
    for _ in range(steps):
        argument = {"independent": x, "constant": x.detach(), "behind a worker": x}.get(program, outs[-1])
        if "behind" in program:
            outs.append(trio.a.recur_at(argument, "b"))
        elif program == "state on both":
            outs.append(trio.a.recur_here_and_at(argument, "b"))
        else:
            outs.append(trio.a.recur(argument))
    torch.stack(outs[1:]).sum().backward()
    counted = {name: trio.workers[name].counted() for name in NAMES}
    states = {"behind a worker": 1, "loop behind a worker": 1, "state on both": 2}.get(program, 1)
    assert steps - 1 <= sum(counted.values()) <= states * (steps + 1)


def test_independent_steps_are_one_request_in_backward(trio: Both, leaf: Leaf, asked: Counter[int]) -> None:
    x = leaf()
    outs = [trio.a.recur(x) for _ in range(20)]
    torch.stack(outs).sum().backward()
    assert asked[BACKWARD] <= 2


def test_results_that_meet_in_what_an_earlier_call_kept_are_one_request(
    trio: Both, leaf: Leaf, asked: Counter[int]
) -> None:
    x = leaf()
    another = trio.a.affine(x)  # so that the worker looks at what the next one leads to
    trio.a.recur(x)
    outs = [trio.a.recall(x) for _ in range(20)]
    torch.stack(outs).sum().backward()
    assert asked[BACKWARD] <= 2
    del another


def test_results_that_have_nothing_in_common_are_not_kept_track_of(trio: Both, leaf: Leaf) -> None:
    x = leaf()
    apart = [trio.a.affine(x) for _ in range(4)]
    assert [_received(one).segment for one in apart] == [None] * 4
    together = [trio.a.recur(x) for _ in range(4)]
    assert all(_received(one).segment for one in together[1:])


def _received(result: torch.Tensor) -> ReceivedTensors:
    received = result.grad_fn.received
    assert received is not None
    return received


def test_steps_in_a_loop_are_one_request_each(trio: Both, leaf: Leaf, asked: Counter[int]) -> None:
    outs = [leaf()]
    for _ in range(20):
        outs.append(trio.a.recur(outs[-1]))
    torch.stack(outs).sum().backward()
    assert asked[BACKWARD] <= 20


def test_workers_are_asked_at_the_same_time(local_trio: tuple[Both, dict[str, gws.Worker]]) -> None:
    """Two chains on two workers: neither waits for the other to be through."""
    trio, _ = local_trio
    meeting = threading.Barrier(2, timeout=30)
    x = torch.ones(SHAPE, dtype=torch.float64, requires_grad=True)
    one = two = x
    for _ in range(3):
        one, two = trio.a.recur(one), trio.b.recur(two)
    # In this process, so that the workers' graphs can be reached: both are in backward at the same time.
    for name in ("a", "b"):
        kept = kept_by(local_trio[1][name])
        kept.register_hook(lambda gradient: meeting.wait() * 0 + gradient)
    (one * two).sum().backward()
    assert not meeting.broken


def kept_by(worker: gws.Worker) -> torch.Tensor:
    place: Any = worker._registry.function("recur", "").value.__self__
    kept: torch.Tensor = place.kept[""]
    return kept


# -- failures


def loop(trio: Both, x: torch.Tensor, steps: int = 8) -> list[torch.Tensor]:
    outs = [x]
    for _ in range(steps):
        outs.append(trio.a.recur(outs[-1]))
    return outs


def check_nothing_is_held(workers: dict[str, gws.Worker]) -> None:
    give_up_at = time.monotonic() + LET_GO_WITHIN
    while any(worker._peer.engine.suspended for worker in workers.values()):
        assert time.monotonic() < give_up_at
        time.sleep(0.01)


def was_held(workers: dict[str, gws.Worker], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of the backwards that workers suspend, as they do so."""
    started: list[str] = []
    start = suspended.SuspendedBackward.start

    def remember(self: suspended.SuspendedBackward, id: Any, work: Callable[[], None]) -> None:
        started.append(str(id))
        start(self, id, work)

    monkeypatch.setattr(suspended.SuspendedBackward, "start", remember)
    return started


def check_exact_again(trio: Both) -> None:
    trio.reset()
    x = torch.ones(SHAPE, dtype=torch.float64, requires_grad=True)
    trio.check(each_from_the_one_before, x)


def test_a_request_that_comes_when_a_run_is_about_to_wait(
    local_trio: tuple[Both, dict[str, gws.Worker]], leaf: Leaf, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not answered before what it brings has run."""
    trio, _ = local_trio
    about_to_wait: list[threading.Event] = []
    start, take_request = suspended.SuspendedBackward.start, suspended.SuspendedBackward._take_request

    def start_and_let_it_wait(self: suspended.SuspendedBackward, id: Any, work: Callable[[], None]) -> None:
        about_to_wait.append(threading.Event())
        start(self, id, work)
        assert about_to_wait[-1].wait(LET_GO_WITHIN)

    def let_it_come_now(self: suspended.SuspendedBackward) -> None:
        if not about_to_wait[-1].is_set():
            assert self._requests.empty()
            about_to_wait[-1].set()
            give_up_at = time.monotonic() + LET_GO_WITHIN
            while self._requests.empty():
                assert time.monotonic() < give_up_at
                time.sleep(0.001)
        take_request(self)

    monkeypatch.setattr(suspended.SuspendedBackward, "start", start_and_let_it_wait)
    monkeypatch.setattr(suspended.SuspendedBackward, "_take_request", let_it_come_now)
    trio.check(each_from_the_one_before, leaf())
    assert about_to_wait


def test_an_error_of_the_caller_in_the_middle(
    local_trio: tuple[Both, dict[str, gws.Worker]], leaf: Leaf, monkeypatch: pytest.MonkeyPatch
) -> None:
    trio, workers = local_trio
    started = was_held(workers, monkeypatch)
    outs = loop(trio, leaf())

    def fail(gradient: torch.Tensor) -> None:
        assert any(worker._peer.engine.suspended for worker in workers.values())
        raise KeyError("in the middle")

    outs[4].register_hook(fail)
    with pytest.raises(KeyError, match="in the middle"):
        torch.stack(outs).sum().backward()
    assert started
    check_nothing_is_held(workers)
    del outs
    check_exact_again(trio)


def test_an_error_of_the_worker_in_the_middle(
    local_trio: tuple[Both, dict[str, gws.Worker]], leaf: Leaf, monkeypatch: pytest.MonkeyPatch
) -> None:
    trio, workers = local_trio
    started = was_held(workers, monkeypatch)
    outs = loop(trio, leaf(), 4)

    def fail(gradient: torch.Tensor) -> None:
        raise ValueError("in the middle")

    kept_by(workers["a"]).register_hook(fail)
    for _ in range(4):
        outs.append(trio.a.recur(outs[-1]))
    with pytest.raises(ValueError, match="in the middle"):
        torch.stack(outs).sum().backward()
    assert started
    check_nothing_is_held(workers)
    del outs
    check_exact_again(trio)


def test_time_that_runs_out_in_the_middle(
    local_trio: tuple[Both, dict[str, gws.Worker]], leaf: Leaf, monkeypatch: pytest.MonkeyPatch
) -> None:
    trio, workers = local_trio
    started = was_held(workers, monkeypatch)
    outs = loop(trio, leaf(), 4)
    outs.append(trio.a.recur(trio.a.slow(outs[-1])))
    for _ in range(4):
        outs.append(trio.a.recur(outs[-1]))
    with gw.timeout(1.0), pytest.raises(gw.DeadlineExceeded):
        torch.stack(outs).sum().backward()
    assert started
    check_nothing_is_held(workers)
    del outs
    check_exact_again(trio)


def test_a_client_that_leaves_in_the_middle(
    local_trio: tuple[Both, dict[str, gws.Worker]], leaf: Leaf, monkeypatch: pytest.MonkeyPatch
) -> None:
    trio, workers = local_trio
    started = was_held(workers, monkeypatch)
    outs = loop(trio, leaf())

    def leave(gradient: torch.Tensor) -> None:
        trio.a.close()

    outs[4].register_hook(leave)
    with pytest.raises(gw.GradwireError):
        torch.stack(outs).sum().backward()
    assert started
    check_nothing_is_held(workers)


def test_a_run_that_is_held_open_ends_with_its_backward_even_if_nobody_says_so(
    local_trio: tuple[Both, dict[str, gws.Worker]], leaf: Leaf, monkeypatch: pytest.MonkeyPatch
) -> None:
    trio, workers = local_trio
    started = was_held(workers, monkeypatch)
    monkeypatch.setattr(Gathering, "abandon", lambda self: None)
    outs = loop(trio, leaf())

    def fail(gradient: torch.Tensor) -> None:
        raise KeyError("in the middle")

    outs[4].register_hook(fail)
    with pytest.raises(KeyError):
        torch.stack(outs).sum().backward()
    assert started
    assert workers["a"]._peer.engine.suspended
    trio.a.affine(leaf())  # the worker hears of it with the next call
    check_nothing_is_held(workers)


def test_gradients_for_a_run_that_was_given_up_are_refused(
    local_trio: tuple[Both, dict[str, gws.Worker]], leaf: Leaf
) -> None:
    """Alone they would not be the whole gradient."""
    trio, workers = local_trio
    outs = loop(trio, leaf())

    def give_up(gradient: torch.Tensor) -> None:
        for held in list(workers["a"]._peer.engine.suspended.values()):
            held.give_up("the test wants it so")

    outs[4].register_hook(give_up)
    with pytest.raises(gw.GradwireError):
        torch.stack(outs).sum().backward()
    check_nothing_is_held(workers)


def test_two_passes_at_once(trio: Both, leaf: Leaf) -> None:
    x = leaf()
    outs = loop(trio, x)
    half = loop(trio, x, 3)
    losses = [torch.stack(outs).prod(0).sum(), torch.stack(half).prod(0).sum()]

    def backward(loss: torch.Tensor) -> None:
        for _ in range(4):
            loss.backward(retain_graph=True)

    with ThreadPoolExecutor(2) as pool:
        for future in [pool.submit(backward, loss) for loss in losses]:
            future.result(60)
    copy = leaf()
    expected = [copy]
    for _ in range(8):
        expected.append(trio.oracle_call("a", "recur", expected[-1]))
    again = [copy]
    for _ in range(3):
        again.append(trio.oracle_call("a", "recur", again[-1]))
    (4 * (torch.stack(expected).prod(0).sum() + torch.stack(again).prod(0).sum())).backward()
    assert_close(x.grad, copy.grad, "x")
    trio.check_parameters()


def test_a_chain_lets_go_of_everything(local_trio: tuple[Both, dict[str, gws.Worker]], leaf: Leaf) -> None:
    trio, workers = local_trio
    for _ in range(3):
        torch.stack(loop(trio, leaf())).sum().backward()
        trio.a.detach_kept()
    store, here = workers["a"]._peer.engine.container, gw.current_context()._peer.engine.container
    give_up_at = time.monotonic() + LET_GO_WITHIN
    while store._results or here._arguments or here._segments:
        assert time.monotonic() < give_up_at, (store._results, here._arguments, here._segments)
        time.sleep(0.01)
    check_nothing_is_held(workers)
