"""More clients than a worker has room for: all finish, nobody sees an error, nobody is starved."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest
import torch
from tests.faults.test_deaths import wait_for
from tests.integration.conftest import Launch

import gradwire as gw
from gradwire._node import Node
from gradwire._workers import RemoteWorker
from gradwire.transport import LinkSettings

SERVED = """
import time
import gradwire_server as gws

@gws.expose
def work(seconds: float) -> float:
    time.sleep(seconds)
    return seconds
"""


@pytest.mark.timeout(240)
def test_many_clients_on_a_worker_with_little_room_all_finish_and_are_served_alike(launch: Launch) -> None:
    clients, calls = 60, 8
    daemon = launch(
        SERVED, "--threads", "4", "--max-queued-calls", "20", "--max-queued-calls-per-client", "4"
    )
    nodes = [Node(f"client-{index}") for index in range(clients)]
    finished: list[float] = []
    failed: list[BaseException] = []
    start = threading.Barrier(clients)

    def client(node: Node) -> None:
        try:
            worker = RemoteWorker(node.place_for(daemon.address, LinkSettings(connect_timeout=60)), "worker")
            worker.ping()
            start.wait(60)
            begun = time.monotonic()
            futures = [worker.call_async("work", 0.01) for _ in range(calls)]
            assert [future.result() for future in futures] == [0.01] * calls
            finished.append(time.monotonic() - begun)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=client, args=(node,)) for node in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(200)
    for node in nodes:
        node.close()
    assert not failed, failed[:3]
    assert len(finished) == clients
    assert max(finished) < 3 * (sum(finished) / clients)


def test_a_call_that_finds_no_room_in_its_time_says_so(launch: Launch) -> None:
    daemon = launch(SERVED, "--threads", "1", "--max-queued-calls", "1")
    with gw.connect(daemon.address) as worker:
        busy = [worker.call_async("work", 3.0) for _ in range(2)]
        # Both slots are taken once the worker counts two calls.
        while worker.inspect().calls < 2:
            pass
        with pytest.raises((gw.ResourceExhausted, gw.DeadlineExceeded)):
            worker.call("work", 0.0, timeout=0.3)
        for future in busy:
            assert future.result() == 3.0


def test_a_greedy_client_does_not_starve_a_modest_one(launch: Launch) -> None:
    daemon = launch(SERVED, "--threads", "1")
    greedy, modest = Node("greedy"), Node("modest")
    try:
        hungry = RemoteWorker(greedy.place_for(daemon.address, LinkSettings()), "greedy")
        patient = RemoteWorker(modest.place_for(daemon.address, LinkSettings()), "modest")
        patient.ping()
        feast = [hungry.call_async("work", 0.02) for _ in range(200)]
        feast[0].result()
        patient.call("work", 0.0)
        # It took its turn after few of the other's, though hundreds were waiting.
        assert sum(future.done() for future in feast) < 100
        for future in feast:
            future.cancel()
    finally:
        greedy.close()
        modest.close()


HOLDING = """
import torch
import gradwire_server as gws

weight = torch.ones((), requires_grad=True)

@gws.expose
def scale(x):
    return x * weight

@gws.expose
def total(x):
    return float(x.sum())

@gws.expose
class Thing:
    pass
"""


def test_a_client_that_makes_a_worker_hold_too_much_is_told(launch: Launch) -> None:
    daemon = launch(
        HOLDING,
        *("--max-held-bytes-per-client", "1MB", "--max-contexts-per-client", "5"),
        *("--max-objects-per-client", "5"),
    )
    with gw.connect(daemon.address) as worker:
        x = torch.ones(50_000)

        def hold_results() -> None:
            kept = []
            for _ in range(20):
                kept.append(worker.scale(x))

        def hold_objects() -> None:
            kept = []
            for _ in range(20):
                kept.append(worker.create("Thing"))

        def hold_contexts() -> None:
            with ExitStack() as stack:
                for _ in range(20):
                    stack.enter_context(gw.context())
                    worker.scale(x)

        with pytest.raises(gw.ResourceExhausted, match="bytes of results"):
            hold_results()
        # Letting go makes room again.
        wait_for(lambda: not any(c.results for c in worker.inspect().contexts), "the results going")
        worker.scale(x).sum().backward()
        with pytest.raises(gw.ResourceExhausted, match="objects"):
            hold_objects()
        wait_for(lambda: _can(lambda: worker.scale(x).sum().backward()), "the objects going")
        with pytest.raises(gw.ResourceExhausted, match="contexts"):
            hold_contexts()
        worker.scale(x).sum().backward()


def _can(action: Callable[[], object]) -> bool:
    try:
        action()
    except gw.ResourceExhausted:
        return False
    return True


def test_large_calls_are_kept_back_while_too_many_bytes_are_in_flight(launch: Launch) -> None:
    daemon = launch(HOLDING, "--max-bytes-in-flight", "4MB")
    with gw.connect(daemon.address) as worker:
        x = torch.ones(500_000)
        futures = [worker.call_async("total", x) for _ in range(30)]
        cancelled = futures.pop()
        assert cancelled.cancel()
        # Small ones pass by.
        assert worker.total(torch.ones(3)) == 3
        assert [future.result(60) for future in futures] == [500_000.0] * 29
        # One that is larger than the whole window goes alone.
        assert worker.total(torch.ones(2_000_000)) == 2_000_000
        # One that is kept back has its deadline all the same.
        others = [worker.call_async("total", x) for _ in range(30)]
        with pytest.raises(gw.DeadlineExceeded):
            worker.call("total", x, timeout=0.001)
        assert [future.result(60) for future in others] == [500_000.0] * 30
