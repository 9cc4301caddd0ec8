"""gradwire, as its guide says to use it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch import Tensor, nn

import gradwire as gw
from benchmarks.contenders import Carrier
from benchmarks.runtimes.base import Module, Runtime, TrainingPass
from benchmarks.runtimes.plain import plain_pass

CARRIER_VARIABLE = "GRADWIRE_BENCHMARK_CARRIER"
"""Tells a worker of the benchmark what may carry its calls to the next worker."""

CONNECT_OPTIONS: dict[Carrier, dict[str, Any]] = {
    Carrier.SAME_HOST: {},
    Carrier.TCP: {"same_host": False},
    # What a link with TLS uses.
    Carrier.GRPC: {"same_host": False, "direct": False},
}


def connect(address: str, carrier: Carrier) -> gw.RemoteWorker:
    """A handle to a worker whose calls nothing better than `carrier` carries."""
    return gw.connect(address, **CONNECT_OPTIONS[carrier])


class GradwireRuntime(Runtime):
    """Calls to `gradwire-server` daemons."""

    def __init__(self, addresses: Sequence[str], carrier: Carrier) -> None:
        gw.tune_malloc()  # as workers do by themselves
        self._addresses = list(addresses)
        self._workers = [connect(address, carrier) for address in addresses]

    def call(self, worker: int, function: str, *args: Any) -> Any:
        return self._workers[worker].call(function, *args)

    def start(self, worker: int, function: str, *args: Any) -> Callable[[], Any]:
        return self._workers[worker].call_async(function, *args).result

    def chain(self, x: Tensor) -> Tensor:
        return cast(Tensor, self._workers[0].call("chain", x, self._addresses[1:]))

    def create(self, worker: int, module: str, *args: Any) -> Module:
        return cast(Module, self._workers[worker].create(module, *args))

    def optimizer(self, remote: Sequence[Module], local: Sequence[nn.Module], rate: float) -> Any:
        modules = [*cast("Sequence[nn.Module]", remote), *local]
        return gw.optim.DistributedOptimizer(torch.optim.SGD, modules, lr=rate)

    def training_pass(self, optimizer: Any = None) -> AbstractContextManager[TrainingPass]:
        return plain_pass(optimizer)

    def close(self) -> None:
        for worker in self._workers:
            worker.close()
