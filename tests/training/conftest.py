"""Workers for the tests of training: in this process, so that what they hold can be looked at."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from tests.integration.daemons import Daemon
from tests.training import models

import gradwire as gw
import gradwire_server as gws

HERE = Path(__file__).parent
DEADLINE = 20.0


@dataclass
class Served:
    """A worker and a handle to it."""

    worker: gws.Worker
    handle: gw.RemoteWorker

    @property
    def objects(self) -> int:
        """How many objects it holds, besides those that it exposes itself."""
        return sum(not stored.permanent for stored in self.worker._objects._by_handle.values())

    @property
    def messages(self) -> int:
        return sum(
            len(context.results) + len(context.arguments)
            for context in self.worker._peer.engine.container.contexts()
        )

    @property
    def contexts(self) -> int:
        return len(self.worker._peer.engine.container.contexts())


def _serve(name: str, **settings: float) -> Iterator[Served]:
    # Refs to the objects of one lead to the other.
    follow = ["127.0.0.1:*"]
    with (
        gws.Worker(models, name=name, follow=follow, **settings) as worker,
        gw.connect(worker.address) as handle,
    ):
        yield Served(worker, handle)


@pytest.fixture
def a() -> Iterator[Served]:
    yield from _serve("a")


@pytest.fixture
def b() -> Iterator[Served]:
    yield from _serve("b")


Launch = Callable[..., Daemon]


@pytest.fixture
def daemon() -> Iterator[Launch]:
    """``daemon(*options)`` starts a worker as a process; all of them end with the test."""
    started: list[Daemon] = []

    def launch(*options: str, name: str = "d") -> Daemon:
        arguments = ["models", "--bind", "127.0.0.1:0", "--name", name, "--torch-threads", "1", *options]
        started.append(Daemon(arguments, cwd=HERE))
        return started[-1].wait_until_ready()

    yield launch
    for one in started:
        one.stop()


def wait_until(condition: Callable[[], bool], seconds: float = DEADLINE) -> bool:
    """Whether it came true in time. What it waits for is told by nobody, so it looks."""
    give_up_at = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > give_up_at:
            return False
        gc.collect()
        time.sleep(0.01)
    return True


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Whether two states are the same, bit for bit."""
    return list(one) == list(other) and all(torch.equal(one[key], other[key]) for key in one)
