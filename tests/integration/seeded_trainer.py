"""Trainers that seed every generator of their process, as training scripts do, and do what they are told.

Each is a process of its own. `Trainer` tells it what to do next, so that a test decides on the order.
"""

from __future__ import annotations

import multiprocessing
import random
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy
import torch
from tests.integration.daemons import DEADLINE

import gradwire as gw

__all__ = ["Trainer"]

_processes = multiprocessing.get_context("forkserver")


class Trainer:
    """The handle to a trainer; each of its methods returns when the trainer has done it."""

    def __init__(self, factor: float) -> None:
        """`factor`: what the loss of this trainer multiplies the shared parameter with, so its gradient."""
        self._connection, there = _processes.Pipe()
        self._process = _processes.Process(target=_train, args=(there, factor), daemon=True)
        self._process.start()
        there.close()

    @classmethod
    @contextmanager
    def pair(cls, *factors: float) -> Iterator[list[Trainer]]:
        trainers = [cls(factor) for factor in factors]
        try:
            yield trainers
        finally:
            for trainer in trainers:
                trainer._end()

    def do(self, what: str, *args: object) -> Any:
        self._connection.send((what, args))
        assert self._connection.poll(DEADLINE), f"a trainer did not {what} in time"
        failure, result = self._connection.recv()
        assert not failure, f"{what}: {failure}"
        return result

    def _end(self) -> None:
        self._connection.close()
        self._process.join(DEADLINE)
        self._process.kill()
        self._process.join(DEADLINE)


class _Told:
    """What a trainer can be told to do."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def visit(self, address: str) -> None:
        """Connects to somebody else first: then the same numbers are drawn for other things."""
        gw.connect(address).ping()

    def connect(self, address: str) -> int:
        self._module = gw.connect(address).get("shared")
        self._optimizer = gw.optim.DistributedOptimizer(torch.optim.SGD, [self._module], lr=1.0)
        return gw.current_context().id.peer

    def backward(self) -> None:
        (self._module(torch.ones(())) * self._factor).backward()

    def step(self) -> float:
        """The shared parameter after the step."""
        self._optimizer.step()
        return float(self._module.state_dict()["weight"])


def _train(connection: Connection, factor: float) -> None:
    torch.set_num_threads(1)
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    told = _Told(factor)
    while True:
        try:
            what, args = connection.recv()
        except EOFError:
            return
        try:
            connection.send(("", getattr(told, what)(*args)))
        except Exception as error:
            connection.send((repr(error), None))
