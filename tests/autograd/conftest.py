"""Three workers, each with a `Place`: as processes, and in this process where a test looks inside."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from tests.autograd.comparing import Both
from tests.autograd.places import NAMES, oracle, remote_place
from tests.integration.daemons import Daemon

import gradwire as gw
import gradwire_server as gws

ROOT = Path(__file__).parents[2]


@contextmanager
def served_places(*flags: str) -> Iterator[dict[str, str]]:
    """The addresses of three processes, by name of place."""
    processes = {
        name: Daemon(
            ["tests.autograd.serving", "--bind", "127.0.0.1:0", "--name", name, *flags],
            cwd=ROOT,
            env={"PLACE": name},
        )
        for name in NAMES
    }
    try:
        addresses = {name: process.wait_until_ready().address for name, process in processes.items()}
        for address in addresses.values():
            with gw.connect(address) as worker:
                worker.meet(addresses)
        yield addresses
    finally:
        for process in processes.values():
            process.stop()


@pytest.fixture(scope="session")
def daemons() -> Iterator[dict[str, str]]:
    with served_places() as addresses:
        yield addresses


@pytest.fixture
def trio(daemons: dict[str, str]) -> Iterator[Both]:
    """The three processes, with nothing kept and no gradients, beside the oracle."""
    with places(daemons) as both:
        yield both


@contextmanager
def places(daemons: dict[str, str]) -> Iterator[Both]:
    workers = {name: gw.connect(address) for name, address in daemons.items()}
    both = Both(workers, oracle())
    both.reset()
    yield both
    both.reset()
    for worker in workers.values():
        worker.close()


@pytest.fixture
def local_trio() -> Iterator[tuple[Both, dict[str, gws.Worker]]]:
    """The same with workers in this process, whose insides can be seen."""
    started = {name: gws.Worker(*remote_place(name).functions, name=name).start() for name in NAMES}
    try:
        addresses = {name: worker.address for name, worker in started.items()}
        workers = {name: gw.connect(address) for name, address in addresses.items()}
        for worker in workers.values():
            worker.meet(addresses)
        yield Both(workers, oracle()), started
        for worker in workers.values():
            worker.close()
    finally:
        for server in started.values():
            server.stop()


@pytest.fixture
def leaf() -> Callable[[int], torch.Tensor]:
    """Leaf tensors of the shape that all places take."""

    def make(seed: int = 0) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 + seed)
        return torch.randn(2, 3, generator=generator, dtype=torch.float64).requires_grad_()

    return make
