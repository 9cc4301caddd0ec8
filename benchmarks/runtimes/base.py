"""What a row of the benchmark may ask of a contender."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn

Module = Callable[[Tensor], Tensor]
"""A module that may live elsewhere."""


class TrainingPass(ABC):
    """One forward and backward, and what comes of it."""

    @abstractmethod
    def backward(self, loss: Tensor) -> None:
        """Propagates from a scalar; returns when every worker is done."""

    @abstractmethod
    def gradients(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """The gradients of tensors of this process."""

    @abstractmethod
    def step(self) -> None:
        """Steps the optimizer that the pass was begun with."""


class Runtime(ABC):
    """A trainer's view of its workers, which are numbered from 0."""

    @abstractmethod
    def call(self, worker: int, function: str, *args: Any) -> Any:
        """Calls a function of `functions.py` and waits for the result."""

    @abstractmethod
    def start(self, worker: int, function: str, *args: Any) -> Callable[[], Any]:
        """Starts a call; what it returns waits for the result."""

    @abstractmethod
    def chain(self, x: Tensor) -> Tensor:
        """`scale` on every worker, each calling the next one itself."""

    @abstractmethod
    def create(self, worker: int, module: str, *args: Any) -> Module:
        """Makes a module of `functions.py` there."""

    @abstractmethod
    def optimizer(self, remote: Sequence[Module], local: Sequence[nn.Module], rate: float) -> Any:
        """Stochastic gradient descent over all parameters, each stepped where it lives."""

    @abstractmethod
    def training_pass(self, optimizer: Any = None) -> AbstractContextManager[TrainingPass]:
        """Begins a pass; gradients of earlier ones do not count in it."""

    def settle(self) -> None:  # noqa: B027 - not everybody has to
        """Waits until nothing of what was done is left to do, so that the process may be stopped."""

    @abstractmethod
    def close(self) -> None:
        """Lets go of the workers."""
