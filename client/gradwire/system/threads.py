"""Threads that run users' functions: how torch is set up on them, and how a
process ends while they still run."""

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
"""The identifiers of the threads that are within a `computing` block."""


class computing:
    """A block that runs a served function, or backward for another peer, on any thread. It
    is cheap enough for each call.

    It makes `torch.set_num_threads` hold: torch passes the number on to OpenMP and MKL only when a thread
    first reads it. On a thread that has not read it, a matrix product uses all cores, and adds up in another
    order than on all other threads. It also registers the thread for `end_computing`.
    """

    __slots__ = ("_thread",)

    def __enter__(self) -> None:
        torch.get_num_threads()
        thread = threading.get_ident()
        # A thread that waits for a response may serve another request meanwhile.
        self._thread = None if thread in _computing else thread
        _computing.add(thread)

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            _computing.discard(self._thread)


def end_computing(timeout: float) -> None:
    """Raises SystemExit on all computing threads before the process ends, and waits until they have stopped.

    A daemon thread that requests the interpreter's lock during interpreter shutdown is ended by Python,
    inside the C++ code that requested the lock; inside torch's code, that aborts the process. A thread that
    is blocked and never returns does no harm.
    """
    give_up_at = time.monotonic() + timeout
    while (threads := tuple(_computing)) and time.monotonic() < give_up_at:
        for thread in threads:
            # Repeated, since the code may catch the exception.
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(SystemExit))
        time.sleep(0.01)


class DaemonThreads(Executor):
    """An executor with a thread for each running task, without an upper limit. Idle threads are reused.

    Unlike those of a `ThreadPoolExecutor`, its threads are daemons, and the interpreter does not wait for
    them: a process ends when its program has ended, not when other peers send no more requests. `atexit`
    handlers, which run afterwards, can still use the executor.
    """

    def __init__(self, name: str) -> None:
        self._crew = _Crew(name)
        # The threads refer to the crew only, so that they end when the executor itself is garbage.
        weakref.finalize(self, self._crew.dismiss).atexit = False

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()
        self._crew.run(partial(_fulfil, future, partial(fn, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Accepts no more tasks. All accepted tasks already run, so there is none to cancel."""
        self._crew.dismiss()
        if wait:
            for thread in self._crew.threads():
                if thread is not threading.current_thread():
                    thread.join()


class _Crew:
    """The threads of one executor."""

    def __init__(self, name: str) -> None:
        self._name = name
        # Reentrant: the garbage collector may drop the executor, and dismiss its crew, within these methods.
        self._lock = threading.RLock()
        self._threads: set[threading.Thread] = set()
        self._idle: dict[threading.Thread, SimpleQueue[Task | None]] = {}
        """Idle threads, each with the queue of its next task; None in the queue ends the thread."""
        self._started = 0
        self._dismissed = False

    def run(self, task: Task) -> None:
        with self._lock:
            if self._dismissed:
                raise RuntimeError("cannot schedule new futures after shutdown")
            if self._idle:
                # The thread that became idle last, since its caches are warmest.
                _, tasks = self._idle.popitem()
                tasks.put(task)
                return
            self._started += 1
            name = f"{self._name}_{self._started - 1}"
            thread = threading.Thread(target=self._work, args=(task,), name=name, daemon=True)
            self._threads.add(thread)
        try:
            thread.start()
        except BaseException:  # the system has no more threads, or the interpreter shuts down
            with self._lock:
                self._threads.discard(thread)
            raise

    def _work(self, task: Task | None) -> None:
        me, tasks = threading.current_thread(), SimpleQueue[Task | None]()
        while task is not None:
            task()
            del task  # it refers to the arguments, and the next task may take long to come
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
        # Otherwise the traceback of the error, which refers to this frame, would refer back to the error.
        del future, work
    else:
        future.set_result(result)
