"""Who no longer waits, and whose time ran out, is heard at the other end and further on."""

from __future__ import annotations

import asyncio
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from typing import Any

import pytest
from tests.conftest import Workers
from tests.faults.test_deaths import wait_for
from tests.integration.daemons import DEADLINE

import gradwire as gw
import gradwire_server as gws
from gradwire.peers.current import default_peer
from gradwire.peers.local import LocalPeer
from gradwire.proto.v1 import link_pb2
from gradwire.transport import ServerCall


@pytest.fixture
def worker(workers: Workers) -> Iterator[gw.RemoteWorker]:
    with gw.connect(workers.a) as worker:
        yield worker


@pytest.fixture
def name() -> str:
    return uuid.uuid4().hex


def test_cancelling_a_future_reaches_the_function(worker: gw.RemoteWorker, name: str) -> None:
    future = worker.call_async("wait_for_cancel", name)
    assert worker.happened(f"{name} runs")
    assert future.cancel()
    assert future.cancelled()
    assert worker.happened(f"{name} was cancelled")
    with pytest.raises(CancelledError):
        future.result()


@pytest.mark.parametrize("carrier", [{}, {"same_host": False}, {"same_host": False, "direct": False}])
def test_a_cancellation_that_comes_with_its_call_reaches_the_function(carrier: dict[str, Any]) -> None:
    """Many come in one read with their calls, which the thread that has read them may serve itself."""
    left: list[bool] = []

    def wait_for_cancel() -> None:
        give_up_at = time.monotonic() + DEADLINE / 2
        while not gw.cancelled() and time.monotonic() < give_up_at:
            time.sleep(0.005)
        left.append(gw.cancelled())

    with gws.Worker(wait_for_cancel, bind="127.0.0.1:0") as server:
        with gw.connect(server.address, **carrier) as handle:
            for _ in range(100):
                assert handle.call_async("wait_for_cancel").cancel()
            handle.ping()  # all of them have come
            wait_for(lambda: server._scheduler.unfinished == 0, "the end of the calls")
    assert all(left)


def test_cancelling_reaches_what_the_function_called(workers: Workers, name: str) -> None:
    with gw.connect(workers.a) as a, gw.connect(workers.b) as b:
        future = a.call_async("wait_for_cancel_further_on", workers.b, name)
        assert b.happened(f"{name} runs")
        future.cancel()
        assert b.happened(f"{name} was cancelled")
        assert a.happened(f"{name} was left")


def test_cancelling_an_await_reaches_the_function(worker: gw.RemoteWorker, name: str) -> None:
    async def main() -> None:
        task = asyncio.create_task(wait_for_it())
        assert await worker.call_async("happened", f"{name} runs")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def wait_for_it() -> None:
        await worker.call_async("wait_for_cancel", name)

    asyncio.run(main())
    assert worker.happened(f"{name} was cancelled")


def test_a_timeout_of_asyncio_reaches_the_function(worker: gw.RemoteWorker, name: str) -> None:
    async def main() -> None:
        async with asyncio.timeout(0.1):
            await worker.call_async("wait_for_cancel", name)

    with pytest.raises(TimeoutError):
        asyncio.run(main())
    assert worker.happened(f"{name} was cancelled")


def test_a_timeout_ends_the_call_here_and_there(worker: gw.RemoteWorker, name: str) -> None:
    start = time.monotonic()
    with pytest.raises(gw.DeadlineExceeded, match="did not respond within") as caught:
        worker.call("wait_for_cancel", name, timeout=0.3)
    assert 0.25 < time.monotonic() - start < 10
    assert isinstance(caught.value, TimeoutError)
    assert worker.happened(f"{name} was cancelled")


def test_a_timeout_bounds_what_the_function_calls(workers: Workers, name: str) -> None:
    with gw.connect(workers.a) as a, gw.connect(workers.b) as b:
        with pytest.raises(gw.DeadlineExceeded):
            a.call("wait_for_cancel_further_on", workers.b, name, timeout=0.5)
        assert b.happened(f"{name} was cancelled")


def test_a_function_knows_the_time_left(worker: gw.RemoteWorker) -> None:
    assert worker.deadline() is None
    assert 0 < worker.call("deadline", timeout=20) <= 20
    with gw.timeout(10):
        assert 0 < worker.deadline() <= 10
        with gw.timeout(60):
            assert 0 < worker.call("deadline", timeout=30) <= 10


def test_no_time_left_means_no_call(worker: gw.RemoteWorker) -> None:
    with gw.timeout(0), pytest.raises(gw.DeadlineExceeded):
        worker.double(1)


def test_waiting_for_a_future_with_a_timeout_does_not_end_the_call(
    worker: gw.RemoteWorker, name: str
) -> None:
    future = worker.call_async("happened", name)
    with pytest.raises(TimeoutError):
        future.result(timeout=0.05)
    worker.signal(name)
    assert future.result(30) is True


def test_a_call_cancelled_while_it_waits_for_a_slot_never_runs(worker: gw.RemoteWorker, name: str) -> None:
    first = worker.call_async("wait_for_cancel", f"{name} 1")
    assert worker.happened(f"{name} 1 runs")
    second = worker.call_async("wait_for_cancel", f"{name} 2")  # both threads of the worker are taken
    waiting = worker.call_async("count", name)
    waiting.cancel()
    worker.ping()  # takes no thread, and comes after the cancellation
    first.cancel()
    second.cancel()
    assert worker.count(name) == 1


def test_closing_the_handle_cancels_what_runs(workers: Workers, name: str) -> None:
    with gw.connect(workers.b) as watcher_of_b:
        # Another target string makes a link of its own.
        other = gw.connect(workers.b.replace("127.0.0.1", "localhost"))
        future = other.call_async("wait_for_cancel", name)
        assert watcher_of_b.happened(f"{name} runs")
        other.close()
        with pytest.raises(gw.LinkClosed):
            future.result(10)
        assert watcher_of_b.happened(f"{name} was cancelled")


REQUESTS: dict[str, tuple[int, Callable[[gw.RemoteWorker], Any]]] = {
    "ping": (link_pb2.METHOD_PING, lambda handle: handle.ping()),
    "describe": (link_pb2.METHOD_DESCRIBE, lambda handle: handle.describe(timeout=None)),
    "inspect": (link_pb2.METHOD_INSPECT, lambda handle: handle.inspect(timeout=None)),
    "cleanup": (link_pb2.METHOD_CLEANUP_CONTEXT, lambda handle: handle.cleanup("1:1", timeout=None)),
}


def hold_back(peer: LocalPeer, method: int, monkeypatch: pytest.MonkeyPatch) -> list[ServerCall]:
    """Has a peer leave requests without a response; they come into the list."""
    held: list[ServerCall] = []
    monkeypatch.setitem(peer.methods, method, held.append)
    return held


@pytest.mark.parametrize("name", REQUESTS)
def test_cancelling_reaches_a_request_that_the_function_sent_to_its_caller(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    method, send = REQUESTS[name]
    raised: list[BaseException] = []

    def send_back() -> None:
        try:
            send(gw.caller())
        except BaseException as error:
            raised.append(error)
            raise

    with gws.Worker(send_back) as served, gw.connect(served.address) as worker:
        held = hold_back(default_peer(), method, monkeypatch)
        future = worker.call_async("send_back")
        wait_for(lambda: bool(held), "the request of the function")
        assert future.cancel()
        wait_for(lambda: bool(raised), "the end of the function")
        assert isinstance(raised[0], gw.Cancelled)
        wait_for(lambda: held[0].cancelled, "the cancellation of its request")


def test_other_calls_run_while_a_function_waits_for_a_response_to_its_ping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def ping_back() -> None:
        gw.caller().ping()

    def other() -> int:
        return 7

    with gws.Worker(ping_back, other, threads=1) as served, gw.connect(served.address) as worker:
        held = hold_back(default_peer(), link_pb2.METHOD_PING, monkeypatch)
        future = worker.call_async("ping_back")
        wait_for(lambda: bool(held), "the ping of the function")
        assert worker.call_async("other").result(DEADLINE) == 7
        held[0].respond(b"")
        assert future.result(DEADLINE) is None


@pytest.mark.parametrize("name", REQUESTS)
def test_ctrl_c_cancels_a_request(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    method, send = REQUESTS[name]
    main = threading.get_ident()

    def waits() -> bool:
        names = {frame.name for frame in traceback.extract_stack(sys._current_frames()[main])}
        return not names.isdisjoint({"read_for", "result"})

    with gws.Worker(nothing) as served, gw.connect(served.address) as worker:
        worker.ping()
        held = hold_back(served._peer, method, monkeypatch)

        def interrupt() -> None:
            wait_for(lambda: bool(held) and waits(), "the request being waited for")
            signal.pthread_kill(main, signal.SIGINT)

        interrupting = threading.Thread(target=interrupt)
        interrupting.start()
        with pytest.raises(KeyboardInterrupt):
            send(worker)
        interrupting.join()
        wait_for(lambda: held[0].cancelled, "the cancellation of the request")


def nothing() -> None:
    """Something to serve."""
