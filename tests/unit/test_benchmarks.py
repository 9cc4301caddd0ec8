"""The benchmark's own reckoning: what is compared with what, and that wrong results do not pass."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
from benchmarks.cases import CASES, Case, Method
from benchmarks.checking import check_alike
from benchmarks.comparing import Comparison, compare
from benchmarks.contenders import (
    CONTENDERS,
    GRADWIRE,
    GRADWIRE_GRPC,
    GRADWIRE_TCP,
    LOCAL,
    TENSORPIPE,
    TENSORPIPE_HUGEPAGES,
    TENSORPIPE_TCP,
    Carrier,
    Contender,
    Kind,
)
from benchmarks.operations import Operation
from benchmarks.peers.environments import CannotInstall, Peer, python_of
from benchmarks.peers.measuring import Found
from benchmarks.processes import cpu_seconds_of, descendants_of, threads_of
from benchmarks.results import Results
from benchmarks.runtimes.gradwire import CONNECT_OPTIONS
from benchmarks.runtimes.local import LocalRuntime
from benchmarks.targets import TARGETS, target_of

WORKERS = 3
HELD_IN_MEMORY = 16
"""In megabytes, the largest that is tried here."""


def results_of(*turns: tuple[str, Contender, list[float]]) -> Results:
    """Results with one sample per turn."""
    results = Results()
    for key, contender, samples in turns:
        for sample in samples:
            results.add(CASES[key], contender, [sample])
    return results


def only(comparisons: list[Comparison], ours: Contender, against: str) -> Comparison:
    [found] = [one for one in comparisons if one.ours is ours and one.against == against]
    return found


def test_all_rows_of_the_benchmark_are_there() -> None:
    assert {case.row for case in CASES.values()} == set(range(1, 18))


def test_every_target_is_that_of_a_row_that_is_measured_so() -> None:
    assert TARGETS.keys() <= CASES.keys()
    measured = {
        (key, who.carrier)
        for key, case in CASES.items()
        for who in case.contenders
        if who.kind is Kind.GRADWIRE
    }
    wanted = {(key, carrier) for key in TARGETS for carrier in Carrier if target_of(key, carrier) is not None}
    assert wanted <= measured


def test_gradwire_has_a_contender_and_a_way_to_connect_for_each_carrier() -> None:
    ours = [who.carrier for who in CONTENDERS.values() if who.kind is Kind.GRADWIRE]
    assert ours == list(Carrier) == list(CONNECT_OPTIONS)


def test_rows_over_tcp_are_measured_over_grpc_and_beside_tensorpipe_over_tcp_as_well() -> None:
    for case in CASES.values():
        over_tcp = {who.name for who in case.contenders if who.carrier is not Carrier.SAME_HOST}
        if over_tcp and case.method is not Method.IDLE:  # TensorPipe has no worker that waits for nobody
            assert over_tcp == {"gradwire-tcp", "gradwire-grpc", "tensorpipe-tcp"}, case.key


@pytest.mark.parametrize(
    "case",
    [case for case in CASES.values() if case.size <= HELD_IN_MEMORY and case.method is not Method.MEMORY],
    ids=lambda case: case.key,
)
def test_a_case_comes_to_the_same_each_time_it_is_made(case: Case) -> None:
    check_alike(
        case.make(LocalRuntime(WORKERS)), case.make(LocalRuntime(WORKERS)), times=1 if case.row == 10 else 2
    )


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: [torch.ones(3), torch.ones(3)],
        lambda: [torch.ones(3)],
        lambda: [torch.ones(3), torch.full((3,), 2.001)],
        lambda: [torch.ones(3), torch.full((4,), 2.0)],
    ],
    ids=["value", "missing", "slightly off", "shape"],
)
def test_a_contender_with_wrong_results_is_not_measured(wrong: Operation) -> None:
    with pytest.raises(AssertionError):
        check_alike(wrong, lambda: [torch.ones(3), torch.full((3,), 2.0)], times=1)


def test_turns_are_compared_one_by_one() -> None:
    slow_machine_in_the_last_turns = [1.0, 2.0, 4.0, 4.0]
    ours = [0.5 * seconds for seconds in slow_machine_in_the_last_turns]
    results = results_of(("1", GRADWIRE, ours), ("1", TENSORPIPE, slow_machine_in_the_last_turns))
    [found] = compare(results)
    assert (found.value.low, found.value.median, found.value.high) == (0.5, 0.5, 0.5)
    assert found.target == 0.3
    assert not found.is_met


def test_a_missed_target_is_said_to_be_missed() -> None:
    [found] = compare(results_of(("4", GRADWIRE, [0.5]), ("4", TENSORPIPE, [1.0])))
    assert (found.target, found.is_met) == (0.25, False)


def test_a_target_that_is_just_reached_is_met() -> None:
    [found] = compare(results_of(("4", GRADWIRE, [0.25]), ("4", TENSORPIPE, [1.0])))
    assert found.is_met


def test_large_tensors_are_compared_with_their_like() -> None:
    found = compare(
        results_of(
            ("6-64MB", GRADWIRE, [1.0]),
            ("6-64MB", GRADWIRE_TCP, [6.0]),
            ("6-64MB", GRADWIRE_GRPC, [4.5]),
            ("6-64MB", TENSORPIPE, [4.0]),
            ("6-64MB", TENSORPIPE_TCP, [5.0]),
            ("6-64MB", TENSORPIPE_HUGEPAGES, [2.0]),
        )
    )
    shown = [(one.ours, one.against, one.value.median, one.target, one.is_met) for one in found]
    assert shown == [
        (GRADWIRE, TENSORPIPE.label, 0.25, 0.4, True),
        (GRADWIRE, TENSORPIPE_HUGEPAGES.label, 0.5, 1.0, True),
        (GRADWIRE_TCP, TENSORPIPE_TCP.label, 1.2, 0.8, False),
        (GRADWIRE_GRPC, TENSORPIPE_TCP.label, 0.9, 1.0, True),
    ]


@pytest.mark.parametrize("key", ["14-call", "15-backward", "16-connect"])
def test_rows_for_information_have_no_target(key: str) -> None:
    [found] = compare(results_of((key, GRADWIRE, [1.0]), (key, TENSORPIPE, [1.0])))
    assert found.target is None
    assert found.is_met is None


def test_what_tensorpipe_has_no_like_of_is_not_compared() -> None:
    assert compare(results_of(("16-daemon", GRADWIRE, [3.0]), ("17-threads", GRADWIRE, [400.0]))) == []


def test_the_transformer_is_compared_with_computing_and_copying() -> None:
    found = compare(results_of(("10", GRADWIRE, [1.05]), ("10", LOCAL, [0.9]), ("10-memcpy", LOCAL, [0.1])))
    step = only(found, GRADWIRE, "one process + memcpy")
    assert step.value.median == pytest.approx(1.05)
    assert step.target == 1.05


def test_the_transformer_may_take_as_long_as_with_tensorpipe() -> None:
    found = compare(
        results_of(
            ("10", GRADWIRE, [1.2]),
            ("10", TENSORPIPE, [1.3]),
            ("10", LOCAL, [0.9]),
            ("10-memcpy", LOCAL, [0.1]),
        )
    )
    step = only(found, GRADWIRE, "one process + memcpy")
    assert step.target == pytest.approx(1.3)
    assert step.is_met
    assert only(found, TENSORPIPE, "one process + memcpy").target is None
    assert only(found, GRADWIRE, TENSORPIPE.label).target is None


@pytest.mark.parametrize(("ours", "target"), [(GRADWIRE, 2.0), (GRADWIRE_TCP, 5.0), (GRADWIRE_GRPC, 5.0)])
def test_a_busy_link_is_compared_with_the_same_when_idle(ours: Contender, target: float) -> None:
    found = compare(results_of(("11-busy", ours, [6.0]), ("11-idle", ours, [1.0])))
    assert [(one.value.median, one.target, one.is_met) for one in found] == [(6.0, target, False)]


def test_memory_is_not_a_ratio_of_times() -> None:
    [found] = compare(results_of(("12-echo", GRADWIRE, [0.0, 0.2, 0.1])))
    assert (found.value.median, found.target, found.is_met) == (0.1, 0.6, True)


def test_this_process_is_seen_from_outside_as_it_is() -> None:
    before = cpu_seconds_of(os.getpid())
    sum(range(100_000))
    assert before < cpu_seconds_of(os.getpid()) <= time.process_time()
    is_over = threading.Event()
    thread = threading.Thread(target=is_over.wait)
    threads = threads_of(os.getpid())
    thread.start()
    assert threads_of(os.getpid()) == threads + 1
    is_over.set()
    thread.join()
    with subprocess.Popen(["sleep", "60"]) as child:
        assert child.pid in descendants_of(os.getpid())
        child.kill()


def test_a_peer_that_cannot_be_installed_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_ARGS", "--no-index --find-links nowhere")
    monkeypatch.setenv("TORCH_INDEX_URL", "")
    peer = Peer("none", "no peer", "no_module", ("no-such-peer==1",))
    with pytest.raises(CannotInstall, match="ERROR: Could not find a version"):
        python_of(peer, tmp_path)
    assert not (tmp_path / "none" / ".installed").exists()  # what is there of it does not pass for it


def test_peers_are_compared_turn_by_turn() -> None:
    found = Found(Peer("other", "another", "no_module", ()), "small call", [2.0, 4.0, 8.0], [1.0, 1.0, 4.0])
    assert (found.ratio.low, found.ratio.median, found.ratio.high) == (0.375, 0.5, 0.5)
