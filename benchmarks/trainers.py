"""What runs inside a contender's processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from benchmarks.cases import CASES
from benchmarks.checking import check_alike
from benchmarks.contenders import Carrier, Contender, Kind
from benchmarks.operations import Operation
from benchmarks.runtimes import tensorpipe
from benchmarks.runtimes.base import Runtime
from benchmarks.runtimes.gradwire import GradwireRuntime
from benchmarks.runtimes.local import LocalRuntime
from benchmarks.runtimes.tensorpipe import TensorPipeRuntime

BLOCK_SECONDS = 3.0
"""After which a turn ends with fewer operations: one that waits behind a large transfer takes long."""
SETTLING_SECONDS = 60.0
"""How long the first transfer in the background may take."""


class Trainer:
    """Does the operations of cases and times them."""

    def __init__(self, runtime: Runtime, workers: int) -> None:
        self._runtime = runtime
        self._workers = workers
        self._operations: dict[str, Operation] = {}
        self._backgrounds: dict[str, Operation] = {}
        self._befores: dict[str, Operation] = {}

    def prepare(self, key: str) -> None:
        """Makes what the case needs."""
        case = CASES[key]
        self._operations[key] = case.make(self._runtime)
        if case.background is not None:
            self._backgrounds[key] = case.background(self._runtime)
        if case.before is not None:
            self._befores[key] = case.before(self._runtime)

    def forget(self, key: str) -> None:
        """Lets go of it."""
        self._operations.pop(key)
        self._backgrounds.pop(key, None)
        self._befores.pop(key, None)

    def check(self, key: str) -> None:
        """Compares results and gradients of what was prepared with those of the same in one process."""
        case = CASES[key]
        if isinstance(self._runtime, LocalRuntime):
            return  # it is the reference
        check_alike(self._operations[key], case.make(LocalRuntime(self._workers)), case.checks)

    def do(self, key: str) -> None:
        """Does the operation once, untimed."""
        self._operations[key]()

    def measure(self, key: str, count: int) -> list[float]:
        """Seconds per call of so many operations in a row, or as many as there is time for."""
        case, operation, before = CASES[key], self._operations[key], self._befores.get(key)
        seconds: list[float] = []
        with _over_and_over(self._backgrounds.get(key)):
            if case.has_lead_in:
                operation()
            while len(seconds) < count and sum(seconds) < BLOCK_SECONDS:
                if before is not None:
                    before()
                seconds.append(_seconds(operation))
        return [each / case.operations for each in seconds]

    def race(self, key: str, count: int, begin_at: float) -> tuple[float, float]:
        """When so many operations in a row, begun with other clients, were begun and ended."""
        operation = self._operations[key]
        operation()
        time.sleep(max(0.0, begin_at - time.monotonic()))
        begun = time.monotonic()
        for _ in range(count):
            operation()
        return begun, time.monotonic()

    def settle(self) -> None:
        """Waits until the process may be stopped."""
        self._runtime.settle()

    def close(self) -> None:
        self._operations.clear()
        self._backgrounds.clear()
        self._befores.clear()
        self._runtime.close()


class Waiting:
    """A worker of an RPC world: its threads serve by themselves."""

    def settle(self) -> None:
        tensorpipe.settle()

    def close(self) -> None:
        tensorpipe.leave()


def make_trainer(contender: Contender, workers: Sequence[str]) -> Trainer:
    """A trainer that needs nothing but the addresses of its workers."""
    torch.set_num_threads(1)
    runtime: Runtime
    if contender.kind is Kind.GRADWIRE:
        runtime = GradwireRuntime(workers, contender.carrier)
    else:
        runtime = LocalRuntime(len(workers))
    return Trainer(runtime, len(workers))


def make_rank(
    contender: Contender, rendezvous: str, names: Sequence[str], rank: int, workers: Sequence[str]
) -> Trainer | Waiting:
    """A member of an RPC world: a worker, or a trainer."""
    torch.set_num_threads(1)
    tensorpipe.join(
        rendezvous, names[rank], rank, len(names), tcp_only=contender.carrier is not Carrier.SAME_HOST
    )
    return Waiting() if names[rank] in workers else Trainer(TensorPipeRuntime(workers), len(workers))


def _seconds(operation: Operation) -> float:
    begun = time.perf_counter()
    operation()  # what it returns is dropped here: freeing it is part of what it costs
    return time.perf_counter() - begun


@contextmanager
def _over_and_over(operation: Operation | None) -> Iterator[None]:
    """Does it again and again in another thread, from before the block begins until it has ended."""
    if operation is None:
        yield
        return
    is_over, has_settled = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def work() -> None:
        try:
            while not is_over.is_set():
                operation()
                has_settled.set()
        except BaseException as error:
            failures.append(error)
            has_settled.set()

    thread = threading.Thread(target=work, name="background", daemon=True)
    thread.start()
    try:
        if not has_settled.wait(SETTLING_SECONDS):
            raise TimeoutError("the transfer in the background did not end")
        yield
    finally:
        is_over.set()
        thread.join(SETTLING_SECONDS)
    if failures:
        raise failures[0]
