"""No far side: everything in this process. The yardstick, and the reference that results are checked with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from benchmarks import functions
from benchmarks.runtimes.base import Module, Runtime, TrainingPass
from benchmarks.runtimes.plain import plain_pass


class LocalRuntime(Runtime):
    """Calls are calls."""

    def __init__(self, workers: int) -> None:
        self._workers = workers

    def call(self, worker: int, function: str, *args: Any) -> Any:
        return functions.FUNCTIONS[function](*args)

    def start(self, worker: int, function: str, *args: Any) -> Callable[[], Any]:
        return partial(self.call, worker, function, *args)

    def chain(self, x: Tensor) -> Tensor:
        for _ in range(self._workers):
            x = functions.scale(x)
        return x

    def create(self, worker: int, module: str, *args: Any) -> Module:
        return functions.MODULES[module](*args)

    def optimizer(self, remote: Sequence[Module], local: Sequence[nn.Module], rate: float) -> Any:
        modules = [*cast("Sequence[nn.Module]", remote), *local]
        return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=rate)

    def training_pass(self, optimizer: Any = None) -> AbstractContextManager[TrainingPass]:
        return plain_pass(optimizer)

    def close(self) -> None:
        pass
