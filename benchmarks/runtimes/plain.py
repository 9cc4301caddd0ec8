"""Passes in plain PyTorch: gradients are in `.grad`, as always."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from benchmarks.runtimes.base import TrainingPass


class PlainPass(TrainingPass):
    """`loss.backward()` and `optimizer.step()`."""

    def __init__(self, optimizer: torch.optim.Optimizer | None) -> None:
        self._optimizer = optimizer

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def gradients(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        found = []
        for leaf in leaves:
            assert leaf.grad is not None
            found.append(leaf.grad)
            leaf.grad = None
        return found

    def step(self) -> None:
        assert self._optimizer is not None
        self._optimizer.step()


@contextmanager
def plain_pass(optimizer: torch.optim.Optimizer | None) -> Iterator[TrainingPass]:
    """A pass whose gradients begin at nothing."""
    if optimizer is not None:
        optimizer.zero_grad()
    yield PlainPass(optimizer)
