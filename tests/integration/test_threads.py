"""Threads come and go with what needs them."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.conftest import Workers

import gradwire as gw
import gradwire_server as gws


def gradwire_threads() -> set[str]:
    return {
        f"{thread.name} {thread.ident}"
        for thread in threading.enumerate()
        # Those two serve the whole process, and end by themselves.
        if thread.name.startswith("gradwire") and thread.name not in ("gradwire-timers", "gradwire-watchdog")
    }


def of_event_loop(threads: set[str]) -> set[str]:
    """Those that read the sockets that no caller reads."""
    return {thread for thread in threads if thread.startswith("gradwire-event-loop ")}


def assert_only_before(before: set[str]) -> None:
    """That all threads that came later have ended. The event loop's are given time: they end when the last
    socket has gone, and nobody waits for them."""
    now = gradwire_threads()
    assert now - of_event_loop(now) == before - of_event_loop(before)
    eventually(lambda: gradwire_threads() == before)


def eventually(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.005)


@pytest.mark.parametrize("same_host", [True, False], ids=["same host", "network"])
def test_every_thread_keeps_to_the_number_that_torch_was_told(same_host: bool) -> None:
    """Else a matrix product would use more cores on some, and add in another order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        torch.manual_seed(0)
        inputs, weights = torch.randn(64, 128), torch.randn(10, 128, requires_grad=True)
        (inputs @ weights.t()).cos().sum().backward()
        threads: set[int] = set()

        def product(inputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            threads.add(threading.get_ident())
            time.sleep(0.01)  # so that several are needed
            return inputs @ weights.t()

        with gws.Worker(product) as worker:
            handle = gw.connect(worker.address, same_host=same_host)
            for _ in range(3):
                arguments = [weights.detach().clone().requires_grad_() for _ in range(8)]
                futures = [handle.call_async("product", inputs, argument) for argument in arguments]
                torch.stack([future.result() for future in futures]).cos().sum().backward()
                for argument in arguments:
                    assert torch.equal(argument.grad, weights.grad)
            handle.close()
        assert len(threads) > 1
    finally:
        torch.set_num_threads(before)


def test_a_worker_that_has_stopped_leaves_no_thread() -> None:
    before = gradwire_threads()
    worker = gws.Worker(abs).start()
    handle = gw.connect(worker.address)
    assert [future.result() for future in [handle.call_async("abs", -1) for _ in range(20)]] == [1] * 20
    handle.close()
    worker.stop()
    assert_only_before(before)


def test_a_worker_that_stops_first_leaves_no_thread_at_its_clients() -> None:
    before = gradwire_threads()
    worker = gws.Worker(abs).start()
    handle = gw.connect(worker.address)
    assert handle.abs(-1) == 1
    worker.stop()
    eventually(lambda: gradwire_threads() == before)


def test_a_worker_that_cannot_have_all_its_addresses_keeps_none(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, socket.create_server(("127.0.0.1", 0)) as free:
        busy, port = taken.getsockname()[1], free.getsockname()[1]
        free.close()
        with pytest.raises(gws.BindFailed, match=f"cannot listen on 127.0.0.1:{busy}"):
            gws.Worker(abs, bind=(f"127.0.0.1:{port}", f"127.0.0.1:{busy}")).start()
        with gws.Worker(abs, bind=f"127.0.0.1:{port}") as worker:
            assert worker.address == f"127.0.0.1:{port}"


def test_a_unix_socket_is_removed_when_the_worker_stops(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with gws.Worker(abs, bind=f"unix:{path}"):
        assert path.exists()
    assert not path.exists()


def test_a_link_that_is_closed_leaves_no_thread(workers: Workers) -> None:
    before = gradwire_threads()
    for _ in range(3):
        with gw.connect(workers.a) as worker:
            worker.double(1)
        assert_only_before(before)


def test_clients_that_go_leave_no_thread_at_the_worker(workers: Workers) -> None:
    with gw.connect(workers.a) as watcher:

        def of_streams() -> int:
            return sum(name.startswith("gradwire-stream") for name in watcher.threads())

        def connect_three() -> None:
            # Handles with settings of their own have links of their own.
            others = [gw.connect(workers.a, lost_after=seconds) for seconds in (20, 21, 22)]
            assert [other.double(1) for other in others] == [2] * 3
            for other in others:
                other.close()

        connect_three()
        before = of_streams()
        for _ in range(3):
            time.sleep(0.1)  # a thread is used again once it is free
            connect_three()
        assert of_streams() <= before + 3


def test_links_that_go_leave_no_thread_of_the_event_loop() -> None:
    carriers = {"same host": {}, "TCP": {"same_host": False}, "gRPC": {"same_host": False, "direct": False}}
    with gws.Worker(abs) as worker:
        assert of_event_loop(gradwire_threads()) == set()
        others = [
            gw.connect(worker.address, lost_after=seconds, **carrier)  # type: ignore[arg-type]
            for carrier in carriers.values()
            for seconds in (20, 21, 22)
        ]
        assert [other.abs(-1) for other in others] == [1] * 9
        assert of_event_loop(gradwire_threads()) != set()
        for other in others[:-1]:
            other.close()
        assert others[-1].abs(-1) == 1
        others[-1].close()
        eventually(lambda: of_event_loop(gradwire_threads()) == set())


def test_the_timers_thread_ends_when_there_is_nothing_to_wait_for() -> None:
    from gradwire.system.timers import _Clock

    clock = _Clock()
    clock.IDLE_SECONDS = 0.01  # type: ignore[misc]
    fired = threading.Event()
    clock.call_later(0.0, fired.set)
    assert fired.wait(20)
    eventually(lambda: clock._thread is None)
    again = threading.Event()
    clock.call_later(0.0, again.set)
    assert again.wait(20)
