"""The executor whose threads keep no process alive."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Callable

import pytest

from gradwire.system.threads import DaemonThreads, computing, end_computing

DEADLINE = 20.0


def eventually(condition: Callable[[], bool]) -> None:
    give_up_at = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.001)


def threads_of(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(name)]


def test_each_task_has_a_thread_and_threads_are_reused() -> None:
    pool = DaemonThreads("gradwire-unit")
    together = threading.Barrier(20)
    for _ in range(3):
        tasks = [pool.submit(together.wait, DEADLINE) for _ in range(20)]
        assert sorted(task.result(DEADLINE) for task in tasks) == list(range(20))
        eventually(lambda: len(pool._crew._idle) == 20)
    assert len(threads_of("gradwire-unit")) == 20
    assert all(thread.daemon for thread in threads_of("gradwire-unit"))
    pool.shutdown()
    assert threads_of("gradwire-unit") == []
    with pytest.raises(RuntimeError, match="after shutdown"):
        pool.submit(print)


def test_an_error_is_the_outcome_of_its_task_alone() -> None:
    pool = DaemonThreads("gradwire-unit")
    with pytest.raises(SystemExit):
        pool.submit(exit).result(DEADLINE)
    assert pool.submit(int, "3").result(DEADLINE) == 3
    pool.shutdown()


def test_the_threads_of_an_executor_that_is_dropped_end() -> None:
    pool = DaemonThreads("gradwire-unit")
    pool.submit(int).result(DEADLINE)
    del pool
    gc.collect()
    eventually(lambda: threads_of("gradwire-unit") == [])


def test_shutting_down_from_one_of_its_own_threads() -> None:
    pool = DaemonThreads("gradwire-unit")
    pool.submit(pool.shutdown).result(DEADLINE)
    eventually(lambda: threads_of("gradwire-unit") == [])


def test_only_computing_threads_are_ended() -> None:
    pool = DaemonThreads("gradwire-unit")
    begun, stop = threading.Barrier(3), threading.Event()

    def stubborn() -> None:
        caught = 0
        with computing():
            begun.wait(DEADLINE)
            while True:
                try:
                    time.sleep(0.001)
                except SystemExit:
                    caught += 1
                    if caught == 3:
                        raise

    def other() -> bool:
        with computing(), computing():
            pass
        begun.wait(DEADLINE)
        return stop.wait(DEADLINE)

    computes, waits = pool.submit(stubborn), pool.submit(other)
    begun.wait(DEADLINE)
    end_computing(DEADLINE)
    assert isinstance(computes.exception(DEADLINE), SystemExit)
    stop.set()
    assert waits.result(DEADLINE)
    pool.shutdown()
