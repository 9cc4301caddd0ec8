"""Many at once: calls, threads, clients, and calls within calls."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch
from tests.conftest import Workers

import gradwire as gw
import gradwire_server as gws


def test_two_hundred_calls_from_fifty_threads(workers: Workers) -> None:
    def four_calls(number: int) -> list[torch.Tensor]:
        with gw.connect(workers.a) as worker:
            return [worker.double(torch.full((1000 * step,), float(number))) for step in range(1, 5)]

    with gw.connect(workers.a), ThreadPoolExecutor(50) as pool:
        for number, results in enumerate(pool.map(four_calls, range(50))):
            for step, result in enumerate(results, 1):
                assert torch.equal(result, torch.full((1000 * step,), 2.0 * number))


def test_thousands_of_calls_in_flight(workers: Workers) -> None:
    with gw.connect(workers.a) as worker:
        futures = [worker.call_async("double", number) for number in range(3000)]
        assert [future.result(60) for future in futures] == list(range(0, 6000, 2))


def test_threads_that_connect_at_the_same_time_share_a_link(workers: Workers) -> None:
    start = threading.Barrier(20)

    def connect(_: int) -> gw.RemoteWorker:
        start.wait()
        return gw.connect(workers.a)

    with ThreadPoolExecutor(20) as pool:
        handles = list(pool.map(connect, range(20)))
    assert len({id(handle._link) for handle in handles}) == 1


def test_two_client_processes_at_once(workers: Workers) -> None:
    script = textwrap.dedent(
        """
        import sys, torch, gradwire as gw
        torch.set_num_threads(1)
        target, number = sys.argv[1], float(sys.argv[2])
        with gw.connect(target) as worker:
            tensors = [torch.full((size,), number) for size in range(0, 100_000, 999)]
            futures = [worker.call_async("double", tensor) for tensor in tensors]
            assert all((future.result() == 2 * number).all() for future in futures)
            print("ok")
        """
    )
    clients = [
        subprocess.Popen([sys.executable, "-c", script, workers.a, str(number)], stdout=subprocess.PIPE)
        for number in (1, 2)
    ]
    assert [client.communicate(timeout=60)[0] for client in clients] == [b"ok\n", b"ok\n"]


def test_64_nested_hops_between_two_workers_with_two_threads_each(workers: Workers) -> None:
    with gw.connect(workers.a) as worker:
        assert worker.call("hop", 64, workers.b, workers.a, timeout=60) == 64


def test_several_deep_nests_at_once(workers: Workers) -> None:
    with gw.connect([workers.a, workers.b][0]) as worker:
        futures = [worker.call_async("hop", 24, workers.b, workers.a, timeout=60) for _ in range(4)]
        assert [future.result() for future in futures] == [24] * 4


def test_no_more_functions_run_at_once_than_there_are_threads() -> None:
    lock, running = threading.Lock(), Counter[str]()

    def work() -> int:
        with lock:
            running["now"] += 1
            running["most"] = max(running["most"], running["now"])
        threading.Event().wait(0.01)
        with lock:
            running["now"] -= 1
        return 1

    with gws.Worker(work, threads=3) as worker, gw.connect(worker.address) as handle:
        assert sum(f.result() for f in [handle.call_async("work") for _ in range(30)]) == 30
    assert running["most"] == 3


def test_a_function_keeps_only_the_calls_that_are_in_flight() -> None:
    seen: list[int] = []

    def busy(target: str) -> None:
        from gradwire.runtime.scope import current_scope

        server_call = current_scope().server_call
        other = gw.connect(target)
        for _ in range(50):
            other.call("leaf")
        seen.append(len(server_call._when_cancelled))  # type: ignore[union-attr]

    def leaf() -> int:
        return 1

    with gws.Worker(busy, leaf) as worker, gw.connect(worker.address) as handle:
        handle.busy(worker.address)
    assert seen == [0]


@pytest.mark.parametrize("threads", [1, 4])
def test_stopping_lets_calls_in_flight_finish_and_delivers_their_results(threads: int) -> None:
    runs, go_on = threading.Event(), threading.Event()

    def large() -> torch.Tensor:
        runs.set()
        go_on.wait(20)
        return torch.ones(8 << 20)

    worker = gws.Worker(large, threads=threads).start()
    handle = gw.connect(worker.address, connect_timeout=0.3)
    future = handle.call_async("large")
    assert runs.wait(20)
    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(worker.stop, 20)
        while not worker._servicer.draining:
            threading.Event().wait(0.001)
        with pytest.raises((gw.Unavailable, gw.LinkError)):
            handle.large()
        go_on.set()
        assert future.result(20).sum() == 8 << 20
        assert stopping.result(20) is True
    with pytest.raises(gw.LinkError):
        handle.large()


class Ledger:
    """An object of the user's with a method that optimizers have, too."""

    def commit(self, ticket: int) -> int:
        return ticket


def test_stopping_lets_a_prepared_step_be_committed_and_nothing_else_that_is_called_commit() -> None:
    worker = gws.Worker(Ledger, torch.nn.Linear).start()
    handle = gw.connect(worker.address)
    ledger = handle.remote("Ledger")
    layer = handle.create("Linear", 3, 1)
    optimizer = gw.optim.DistributedOptimizer(torch.optim.SGD, [layer], lr=0.1)
    layer(torch.ones(2, 3)).sum().backward()
    before = layer.state_dict()["bias"].clone()
    (part,) = optimizer._remote
    request = {**optimizer._step_settings(None), "patience": 1.0, "keep_place": False}
    (stored,) = [
        stored.value for stored in worker._objects._all() if isinstance(stored.value, torch.nn.Linear)
    ]
    part.start("prepare", 1, request)()
    assert ledger.call("commit", 1) == 1
    with ThreadPoolExecutor(1) as pool:
        stopping = pool.submit(worker.stop, 20)
        while not worker._servicer.draining:
            threading.Event().wait(0.001)
        with pytest.raises(gw.Unavailable, match="is shutting down"):
            ledger.call("commit", 1)
        part.start("commit", 1)()
        assert torch.equal(stored.bias.detach(), before - 0.1 * 2)
        assert stopping.result(20) is True


def test_stopping_does_not_wait_forever_and_cancels_what_runs() -> None:
    runs, was_cancelled = threading.Event(), threading.Event()

    def stubborn() -> None:
        runs.set()
        while not gw.cancelled():
            threading.Event().wait(0.001)
        was_cancelled.set()

    worker = gws.Worker(stubborn).start()
    handle = gw.connect(worker.address)
    future = handle.call_async("stubborn")
    assert runs.wait(20)
    assert worker.stop(grace=0.05) is False
    assert was_cancelled.is_set()
    with pytest.raises(gw.LinkClosed, match="ended the link"):
        future.result(20)


def test_a_worker_is_started_once() -> None:
    worker = gws.Worker(abs)
    with worker, pytest.raises(RuntimeError, match="started once"):
        worker.start()
    with pytest.raises(RuntimeError, match="started once"):
        worker.start()
    assert worker.stop() is True


def test_what_waiting_for_many_calls_costs_grows_with_their_number(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No call is looked at again and again while others are answered."""
    looks = Counter[str]()
    done = gw.CallFuture.done

    def counted(future: gw.CallFuture) -> bool:
        looks["done"] += 1
        return done(future)

    monkeypatch.setattr(gw.CallFuture, "done", counted)
    count = 1000
    with gw.connect(workers.a) as worker:

        async def gather() -> list[int]:
            return list(await asyncio.gather(*(worker.call_async("double", n) for n in range(count))))

        assert asyncio.run(gather()) == list(range(0, 2 * count, 2))
        calls = [worker.call_async("double", number) for number in range(count)]
        assert len(wait(calls, 60).done) == count
    assert count <= looks["done"] < 30 * count


def test_done_callbacks_share_their_threads(workers: Workers) -> None:
    count = 500
    told = threading.Semaphore(0)
    threads: set[threading.Thread] = set()

    def tell(_: object) -> None:
        threads.add(threading.current_thread())
        told.release()

    with gw.connect(workers.a) as worker:
        for _ in range(count):
            worker.call_async("double", 1).add_done_callback(tell)
        for _ in range(count):
            assert told.acquire(timeout=60)
    assert len(threads) < count / 4


def test_done_callbacks_may_wait_for_one_another(workers: Workers) -> None:
    """And for other calls, so that each of them holds a thread."""
    count = 10
    all_are_here = threading.Barrier(count)
    done: list[int] = []

    with gw.connect(workers.a) as worker:

        def meet(_: object) -> None:
            all_are_here.wait(60)
            done.append(worker.double(1))

        for _ in range(count):
            worker.call_async("double", 1).add_done_callback(meet)
        end = time.monotonic() + 60
        while len(done) < count:
            assert time.monotonic() < end
            time.sleep(0.01)
    assert done == [2] * count
