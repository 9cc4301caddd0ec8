"""The threads that gradwire computes on: what they need to do so, and how a process ends in spite of them."""

from __future__ import annotations

import ctypes
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from queue import SimpleQueue
from typing import Any, ParamSpec, TypeVar

import torch

__all__ = ["DaemonThreads", "computing", "end_computing"]

P = ParamSpec("P")
T = TypeVar("T")
Task = Callable[[], None]


_computing: set[int] = set()
"""The identifiers of the threads that are within `computing`."""


class computing:
    """Around served functions and backwards for others, on whatever thread they run. Cheap, so for each anew.

    Makes `torch.set_num_threads` hold: torch passes the number on to OpenMP and MKL when a thread first asks
    for it. On a thread that has not, a matrix product uses all cores, and its sums come out in another order
    than everywhere else. And `end_computing` finds the thread.
    """

    __slots__ = ("_thread",)

    def __enter__(self) -> None:
        torch.get_num_threads()
        thread = threading.get_ident()
        # A thread that waits for an answer may serve another request meanwhile.
        self._thread = None if thread in _computing else thread
        _computing.add(thread)

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            _computing.discard(self._thread)


def end_computing(timeout: float) -> None:
    """Raises SystemExit in all that computes, when the process is about to end; waits for it to take effect.

    A daemon thread that asks for the interpreter's lock while the interpreter ends is ended by Python, within
    whatever C++ code asks for it: within torch's, that aborts the process. A thread that is blocked, and does
    not come back, does no harm.
    """
    give_up_at = time.monotonic() + timeout
    while (threads := tuple(_computing)) and time.monotonic() < give_up_at:
        for thread in threads:
            # Again and again: the code may catch it.
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(SystemExit))
        time.sleep(0.01)


class DaemonThreads(Executor):
    """An executor with a thread for each task that runs, without a ceiling. Threads are used again.

    Unlike those of a `ThreadPoolExecutor`, its threads are daemons, and the interpreter does not wait for
    them: a process ends when its program has, not when others have no more requests for it. The handlers of
    `atexit`, which run afterwards, can still use it.
    """

    def __init__(self, name: str) -> None:
        self._crew = _Crew(name)
        # The threads refer to the crew alone, so that they end when an executor is dropped unused.
        weakref.finalize(self, self._crew.dismiss).atexit = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        self._crew.run(partial(_fulfil, future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Takes no more tasks. Those that were taken run already, so none is left to be cancelled."""
        self._crew.dismiss()
        if wait:
            for thread in self._crew.threads():
                if thread is not threading.current_thread():
                    thread.join()


class _Crew:
    """The threads of one executor."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._lock = threading.Lock()
        self._threads: set[threading.Thread] = set()
        self._idle: dict[threading.Thread, SimpleQueue[Task | None]] = {}
        """Threads that wait, and where each takes its next task from; None ends it."""
        self._started = 0
        self._dismissed = False

    def run(self, task: Task) -> None:
        with self._lock:
            if self._dismissed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            if self._idle:
                # The one that became idle last: its memory is warmest.
                _, tasks = self._idle.popitem()
                tasks.put(task)
                return
            self._started += 1
            name = f"{self._name}_{self._started - 1}"
            thread = threading.Thread(target=self._work, args=(task,), name=name, daemon=True)
            self._threads.add(thread)
        try:
            thread.start()
        except BaseException:  # the system has no more threads, or the interpreter ends
            with self._lock:
                self._threads.discard(thread)
            raise

    def _work(self, task: Task | None) -> None:
        me, tasks = threading.current_thread(), SimpleQueue[Task | None]()
        while task is not None:
            task()
            del task  # it has the arguments, and the next one may be long in coming
            with self._lock:
                if self._dismissed:
                    break
                self._idle[me] = tasks
            task = tasks.get()
        with self._lock:
            self._threads.discard(me)

    def dismiss(self) -> None:
        with self._lock:
            self._dismissed = True
            idle, self._idle = self._idle, {}
        for tasks in idle.values():
            tasks.put(None)

    def threads(self) -> list[threading.Thread]:
        with self._lock:
            return list(self._threads)


def _fulfil(future: Future[Any], work: Callable[[], Any]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
        # Else the error's traceback, which has this frame, would lead back to the error.
        del future, work
    else:
        future.set_result(result)
