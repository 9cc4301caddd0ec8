"""More clients than a worker has room for: all finish, nobody sees an error, nobody is starved."""

from __future__ import annotations

import threading
import time

import pytest
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
