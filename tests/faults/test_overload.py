"""More clients than a worker has room for: all finish, nobody sees an error, nobody is starved."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import grpc
import pytest
import torch
from tests.faults.test_deaths import wait_for
from tests.integration.conftest import Launch
from tests.integration.daemons import DEADLINE, Daemon

import gradwire as gw
import gradwire.transport.session
import gradwire_server as gws
from gradwire.api.workers import RemoteWorker
from gradwire.peers.local import LocalPeer
from gradwire.proto.v1 import autograd_pb2
from gradwire.transport import LinkSettings

SERVED = """
import time
import gradwire_server as gws

@gws.expose
def work(seconds: float) -> float:
    time.sleep(seconds)
    return seconds
"""


# Forking a process that has loaded torch, but has not used gRPC yet, makes hundreds of real clients possible.
CROWD = """
import os, sys
import torch
import gradwire as gw
import gradwire._public  # all of it, before there are many

torch.set_num_threads(1)
address, clients = sys.argv[1], int(sys.argv[2])

def client(index):
    # No limits of time: two hundred processes on a busy machine may take any time to connect.
    worker = gw.connect(address, connect_timeout=1e6, lost_after=1e6)
    worker.ping()
    os.write(ready, b".")
    os.read(starting, 1)
    while os.getppid() == parent and not os.path.exists(sys.argv[3]):
        assert worker.work(0.02) == 0.02
        os.write(finished, index.to_bytes(2, "little"))

parent = os.getpid()
is_ready, ready = os.pipe()
starting, start = os.pipe()
has_finished, finished = os.pipe()
children = []
for index in range(clients):
    child = os.fork()
    if child == 0:
        os.close(start)
        try:
            client(index)
        except BaseException as error:
            print(f"client {index}: {error!r}", flush=True)
            os._exit(1)
        os._exit(0)
    children.append(child)
for _ in children:
    os.read(is_ready, 1)
print("ready", flush=True)
sys.stdin.readline()
os.close(start)
def next_finished():
    return int.from_bytes(os.read(has_finished, 2), "little")
# Not before all are at it: on a busy machine it takes a while until the last one is.
begun = set()
while len(begun) < clients:
    begun.add(next_finished())
# Until each has had several calls, or some have had so many that the others must be starving. Not for a given
# time: a process that the machine does not let run for some seconds cannot call meanwhile.
counts = [0] * clients
while min(counts) < 5 and max(counts) < 100:
    counts[next_finished()] += 1
print(*counts, flush=True)
open(sys.argv[3], "w").close()
os.set_blocking(has_finished, False)  # nobody reads what is still written: it fits into the pipe
print(*[os.waitpid(child, 0)[1] for child in children], flush=True)
"""


@pytest.mark.timeout(240)
def test_200_clients_on_a_worker_with_room_for_20_all_finish_and_none_starves(
    launch: Launch, tmp_path: Path
) -> None:
    """Each client is a process of its own with a link of its own, and calls as fast as the machine lets it.

    tests/unit/server/serving/test_scheduler.py has clients that are all equally fast, who are served alike.
    """
    clients = 200
    daemon = launch(SERVED, "--threads", "4", "--max-queued-calls", "16")
    script = tmp_path / "crowd.py"
    script.write_text(CROWD)
    with subprocess.Popen(
        [sys.executable, str(script), daemon.address, str(clients), str(tmp_path / "stop")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as crowd:
        assert crowd.stdin is not None
        assert crowd.stdout is not None
        assert crowd.stdout.readline() == "ready\n"
        before = most_memory(daemon)
        crowd.stdin.write("start\n")
        crowd.stdin.flush()
        counts = [int(count) for count in crowd.stdout.readline().split()]
        exits = crowd.stdout.readline().split()
        assert crowd.wait(DEADLINE) == 0
    # At one moment, while all are at it.
    assert len(counts) == clients
    assert min(counts) >= 5, str(sorted(counts))
    # Nobody saw an error, and everybody finished.
    assert exits == ["0"] * clients
    assert most_memory(daemon) - before < 50_000_000


def most_memory(daemon: Daemon) -> int:
    """The most bytes that it ever had in memory."""
    status = Path(f"/proc/{daemon.process.pid}/status").read_text()
    return next(int(line.split()[1]) * 1024 for line in status.splitlines() if line.startswith("VmHWM"))


def test_a_greedy_client_does_not_starve_a_modest_one(launch: Launch) -> None:
    daemon = launch(SERVED, "--threads", "1")
    greedy, modest = LocalPeer("greedy"), LocalPeer("modest")
    try:
        hungry = RemoteWorker(greedy.shared_link_to(daemon.address, LinkSettings()), "greedy")
        patient = RemoteWorker(modest.shared_link_to(daemon.address, LinkSettings()), "modest")
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


@pytest.mark.parametrize("elements", [25_000, 500_000], ids=["within the message", "beside it"])
def test_large_calls_are_kept_back_while_too_many_bytes_are_in_flight(launch: Launch, elements: int) -> None:
    daemon = launch(HOLDING, "--max-bytes-in-flight", str(elements * 8))
    with gw.connect(daemon.address) as worker:
        x = torch.ones(elements)
        futures, kept_back = [], []
        for _ in range(30):
            futures.append(worker.call_async("total", x))
            statistics = worker._link._native.statistics()
            kept_back.append(statistics["kept_back"])
            assert 0 <= statistics["bytes_in_window"] <= elements * 8
        assert max(kept_back) > 0
        cancelled = futures.pop()
        assert cancelled.cancel()
        # Small ones pass by.
        assert worker.total(torch.ones(3)) == 3
        assert [future.result(60) for future in futures] == [elements] * 29
        # One that is larger than the whole window goes alone.
        assert worker.total(torch.ones(4 * elements)) == 4 * elements
        # One that is kept back has its deadline all the same.
        others = [worker.call_async("total", x) for _ in range(30)]
        with pytest.raises(gw.DeadlineExceeded):
            worker.call("total", x, timeout=0.001)
        assert [future.result(60) for future in others] == [elements] * 30


class Busy:
    """A worker whose only thread is taken, and whose queue is full."""

    def __init__(self) -> None:
        self._runs, self._may_end = threading.Event(), threading.Event()

    def occupy(self) -> None:
        self._runs.set()
        assert self._may_end.wait(DEADLINE)

    @contextmanager
    def running(self) -> Iterator[str]:
        with (
            gws.Worker(self.occupy, name="busy", threads=1, max_queued_calls=1) as worker,
            gw.connect(worker.address) as handle,
        ):
            calls = [handle.call_async("occupy")]
            assert self._runs.wait(DEADLINE)
            calls.append(handle.call_async("occupy"))
            wait_for(lambda: handle.inspect().calls == 2, "both calls came")
            try:
                yield worker.address
            finally:
                self._may_end.set()
                for call in calls:
                    call.result(DEADLINE)


def call_once(address: str, function: str) -> None:
    """Calls a function that has no time limit, but is not tried again when it is refused."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gradwire.transport.session, "_PATIENCE_SECONDS", 0.0)
        # A handle with settings of its own has a link of its own.
        with gw.connect(address, lost_after=9.0) as worker:
            worker.call(function)


def test_a_call_that_finds_no_room_in_its_time_says_so() -> None:
    with Busy().running() as address, gw.connect(address) as worker:
        with pytest.raises((gw.ResourceExhausted, gw.DeadlineExceeded)):
            worker.call("occupy", timeout=0.3)


def test_a_refusal_says_that_nothing_ran_and_may_be_tried_again() -> None:
    with Busy().running() as address, pytest.raises(gw.ResourceExhausted) as caught:
        call_once(address, "occupy")
    assert caught.value.not_started
    assert caught.value.retryable


def test_a_refusal_further_on_does_not_make_a_function_run_twice() -> None:
    runs = []

    def relay(address: str) -> None:
        runs.append(address)
        if len(runs) == 1:
            call_once(address, "occupy")

    with (
        Busy().running() as address,
        gws.Worker(relay, name="relay") as worker,
        gw.connect(worker.address) as handle,
        pytest.raises(gw.ResourceExhausted) as caught,
    ):
        handle.call("relay", address)
    assert len(runs) == 1
    assert not caught.value.not_started, "relay has run"
    assert caught.value.retryable
    assert caught.value.worker == "busy"


RETRIES = {
    "methodConfig": [
        {
            "name": [{}],
            "retryPolicy": {
                "maxAttempts": 5,
                "initialBackoff": "0.01s",
                "maxBackoff": "0.1s",
                "backoffMultiplier": 2,
                "retryableStatusCodes": ["RESOURCE_EXHAUSTED", "UNAVAILABLE"],
            },
        }
    ]
}


def test_retries_of_grpc_do_not_make_a_function_run_twice() -> None:
    runs = []

    def relay(address: str) -> None:
        runs.append(address)
        call_once(address, "occupy")

    with Busy().running() as address, gws.Worker(relay, name="relay") as worker:
        request = autograd_pb2.ForwardWithAutogradRequest(function="relay")
        request.args.add(text=address)
        options = [("grpc.enable_retries", 1), ("grpc.service_config", json.dumps(RETRIES))]
        with grpc.insecure_channel(worker.address, options=options) as channel:
            forward = channel.unary_unary("/gradwire.v1.Worker/ForwardWithAutograd")
            with pytest.raises(grpc.RpcError) as caught:
                forward(request.SerializeToString())
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert len(runs) == 1
