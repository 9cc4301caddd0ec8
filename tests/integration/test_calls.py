"""Calling functions of workers that are processes of their own."""

from __future__ import annotations

import asyncio
import inspect
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed, wait
from pathlib import Path

import grpc
import pytest
import torch
from tests.conftest import Workers

import gradwire as gw
import gradwire_server as gws


@pytest.fixture
def worker(workers: Workers) -> Iterator[gw.RemoteWorker]:
    with gw.connect(workers.a) as worker:
        yield worker


# -- connecting


def test_connecting_to_nothing_fails_in_time_and_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
    start = time.monotonic()
    with pytest.raises(gw.ConnectFailed, match=f"no gradwire worker responded at {address} within 0.5 s"):
        gw.connect(address, connect_timeout=0.5)
    assert time.monotonic() - start < 5


def test_connecting_to_a_name_that_does_not_exist_fails_in_time() -> None:
    with pytest.raises(gw.ConnectFailed, match=r"no gradwire worker responded at no-such-host\.invalid:1"):
        gw.connect("no-such-host.invalid:1", connect_timeout=0.5)


def test_connecting_to_what_accepts_and_stays_silent_fails_in_time() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        start = time.monotonic()
        with pytest.raises(gw.ConnectFailed, match="no gradwire worker responded"):
            gw.connect(f"127.0.0.1:{silent.getsockname()[1]}", connect_timeout=0.5)
        assert time.monotonic() - start < 5


def test_connecting_to_another_grpc_server_fails_at_once_and_says_so() -> None:
    pool = ThreadPoolExecutor(2)
    server = grpc.server(pool)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        start = time.monotonic()
        with pytest.raises(gw.ConnectFailed, match="is no gradwire worker"):
            gw.connect(f"127.0.0.1:{port}", connect_timeout=30)
        assert time.monotonic() - start < 10
    finally:
        server.stop(None).wait()
        pool.shutdown()


def test_a_connect_error_is_a_connection_error() -> None:
    assert issubclass(gw.ConnectFailed, ConnectionError)


def test_a_worker_that_starts_late_is_waited_for(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/socket"
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(gw.connect, address, connect_timeout=20)
        with gws.Worker(abs, bind=address):
            assert connecting.result().call("abs", -3) == 3


def test_handles_to_one_target_share_a_link(workers: Workers) -> None:
    first, second = gw.connect(workers.a), gw.connect(workers.a)
    assert first._link is second._link
    first.close()
    assert second.double(2) == 4
    with pytest.raises(gw.LinkClosed, match=r"this handle to .* was closed"):
        first.double(2)
    link = second._link
    second.close()
    assert link.ended is not None
    with gw.connect(workers.a) as third:
        assert third.double(2) == 4


def test_connecting_to_several_gives_a_handle_for_each(workers: Workers) -> None:
    a, b = gw.connect([workers.a, workers.b])
    assert (a.name, b.name) == ("a", "b")
    with pytest.raises(gw.ConnectFailed):
        gw.connect([workers.a, "127.0.0.1:1"], connect_timeout=0.3)


def test_workers_listen_on_unix_sockets(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/socket"
    with gws.Worker(double, bind=(address, "127.0.0.1:0")) as worker:
        assert worker.addresses[0] == address
        for target in worker.addresses:
            with gw.connect(target) as handle:
                assert torch.equal(handle.double(torch.ones(100_000)), torch.full((100_000,), 2.0))


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


# -- calling


def test_a_function_is_called_by_name(worker: gw.RemoteWorker) -> None:
    assert worker.call("double", 21) == 42
    assert worker.double(21) == 42
    assert worker.add(1, y=2, scale=10) == 30


def test_tensors_go_there_and_back(worker: gw.RemoteWorker) -> None:
    x = torch.randn(3, 4)
    assert torch.equal(worker.double(x), 2 * x)
    x = torch.randn(300, 1000)
    assert torch.equal(worker.double(x), 2 * x)


def test_values_of_all_kinds_go_there_and_back(worker: gw.RemoteWorker) -> None:
    args = (None, True, 1 << 100, 1.5, 2j, "text", b"bytes", [1, (2, {3})], {"k": [slice(1, None)]}, ...)
    assert worker.echo(*args, key=torch.float16) == (args, {"key": torch.float16})


def test_keyword_arguments_come_in_the_order_in_which_they_were_given(worker: gw.RemoteWorker) -> None:
    for order in ("zab", "bza", "abz", "bazcqp", "a"):
        for number in range(4):  # in full, then by a plan
            sent = {name: torch.tensor(number + index) for index, name in enumerate(order)}
            _, arrived = worker.echo(**sent)
            assert "".join(arrived) == order
            assert list(arrived.values()) == list(sent.values())


def test_an_async_function_is_awaited(worker: gw.RemoteWorker) -> None:
    assert worker.add_async(1, 2) == 3


def test_what_cannot_travel_is_refused_before_anything_is_sent(worker: gw.RemoteWorker) -> None:
    with pytest.raises(TypeError, match=r"args\[1\]\[.mask.\]") as caught:
        worker.echo(1, {"mask": object()})
    assert isinstance(caught.value, gw.Unencodable)


def test_a_future_is_one_of_concurrent_futures(worker: gw.RemoteWorker) -> None:
    futures = [worker.call_async("double", number) for number in range(20)]
    assert all(isinstance(future, Future) for future in futures)
    assert {future.result() for future in as_completed(futures, timeout=30)} == set(range(0, 40, 2))
    done, not_done = wait(futures, timeout=30)
    assert (len(done), len(not_done)) == (20, 0)


def test_a_future_is_awaitable(worker: gw.RemoteWorker) -> None:
    async def main() -> list[int]:
        futures = [worker.call_async("double", number) for number in range(10)]
        return [await future for future in futures]

    assert asyncio.run(main()) == list(range(0, 20, 2))


def test_several_futures_are_gathered(worker: gw.RemoteWorker) -> None:
    async def one(number: int) -> int:
        return await worker.call_async("double", number)

    async def main() -> list[int]:
        return await asyncio.gather(*(one(number) for number in range(10)))

    assert asyncio.run(main()) == list(range(0, 20, 2))


def test_an_error_comes_out_of_await(worker: gw.RemoteWorker) -> None:
    async def main() -> None:
        await worker.call_async("fail")

    with pytest.raises(ValueError, match="it failed"):
        asyncio.run(main())


def test_a_done_callback_is_called(worker: gw.RemoteWorker) -> None:
    results: Future[int] = Future()
    worker.call_async("double", 4).add_done_callback(lambda future: results.set_result(future.result()))
    assert results.result(30) == 8


def test_a_done_callback_may_call_again(worker: gw.RemoteWorker) -> None:
    results: Future[int] = Future()

    def call_again(future: Future[int]) -> None:
        # On the thread that reads the link this would wait forever for what only that thread can read.
        results.set_result(worker.double(future.result()))

    worker.call_async("double", 4).add_done_callback(call_again)
    assert results.result(30) == 16


def test_functions_are_described(worker: gw.RemoteWorker) -> None:
    described = {function.name: function for function in worker.functions()}
    assert described["double"].doc == "Twice as much."
    assert str(described["add"]) == "add(x: int, y: int = 1, *, scale: int = 1) -> int"
    assert list(described) == sorted(described)
    assert not any(name.startswith("_") for name in described)


def test_a_remote_function_looks_like_a_function(worker: gw.RemoteWorker) -> None:
    assert worker.add.__doc__ == "Adds, then scales."
    assert worker.add.__name__ == "add"
    assert list(inspect.signature(worker.add).parameters) == ["x", "y", "scale"]
    assert {"add", "double", "call"} <= set(dir(worker))


def test_a_ping_takes_time(worker: gw.RemoteWorker) -> None:
    assert 0 < worker.ping() < 30


# -- calling back, and between processes


def test_a_process_that_serves_can_be_called_back(workers: Workers) -> None:
    def half(x: float) -> float:
        return x / 2

    def through(target: str, x: float) -> float:
        return float(gw.connect(target).call("call_back", "half", x))

    with gws.Worker(half, through, name="local") as local, gw.connect(local.address) as handle:
        # What is served here calls the daemon as "local", which serves: so the daemon can call it back.
        assert handle.through(workers.a, 5.0) == 2.5


def test_a_process_that_serves_nothing_cannot_be_called_back(worker: gw.RemoteWorker) -> None:
    with pytest.raises(gw.UnknownFunction, match="serves no functions"):
        worker.call_back("half", 1.0)


def test_nobody_called_a_plain_program() -> None:
    with pytest.raises(LookupError, match="not called by another process"):
        gw.caller()


# -- processes


def run(script: str, *args: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *args],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    # gRPC remarks on every fork by itself.
    assert [line for line in done.stderr.splitlines() if "fork_posix.cc" not in line] == []
    return done.stdout


def test_a_program_ends_quietly_without_closing_anything(workers: Workers) -> None:
    script = """
        import sys, gradwire as gw
        worker = gw.connect(sys.argv[1])
        print(worker.double(21))
        worker.call_async("double", 1)
    """
    assert run(script, workers.a) == "42\n"


def test_a_forked_process_is_told_that_it_cannot_use_gradwire(workers: Workers) -> None:
    script = """
        import os, sys, warnings, gradwire as gw
        import gradwire_server as gws
        warnings.simplefilter("ignore")
        worker = gw.connect(sys.argv[1])
        assert worker.double(1) == 2
        child = os.fork()
        if child == 0:
            attempts = [
                lambda: worker.double(1),
                lambda: gw.connect(sys.argv[1]),
                lambda: gws.Worker(abs).start(),
            ]
            for attempt in attempts:
                try:
                    attempt()
                except gw.ForkedProcess as error:
                    print(error)
            sys.stdout.flush()
            os._exit(0)
        os.waitpid(child, 0)
        assert worker.double(1) == 2
    """
    lines = run(script, workers.a).splitlines()
    assert len(lines) == 3
    assert all('"spawn"' in line for line in lines)


def test_a_program_may_fork_before_it_uses_gradwire(workers: Workers) -> None:
    script = """
        import os, sys, warnings, gradwire as gw
        warnings.simplefilter("ignore")
        child = os.fork()
        os.write(1, f"{gw.connect(sys.argv[1]).double(child > 0)}\\n".encode())  # not torn by the other's
        if child:
            os.waitpid(child, 0)
    """
    assert sorted(run(script, workers.a).split()) == ["0", "2"]
