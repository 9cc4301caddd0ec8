"""Monarch: an actor in a process of this host. Autograd does not reach through its calls."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from monarch.actor import Actor, endpoint, this_host
from torch import Tensor

from benchmarks.functions import FUNCTIONS
from benchmarks.peers.member import Call, run


class Worker(Actor):
    """Runs what it is asked to."""

    def __init__(self) -> None:
        torch.set_num_threads(1)

    @endpoint
    def call(self, function: str, x: Tensor) -> object:
        return FUNCTIONS[function](x)


@contextmanager
def connected() -> Iterator[Call]:
    processes = this_host().spawn_procs({"procs": 1})
    try:
        worker = processes.spawn("worker", Worker)
        yield lambda function, x: worker.call.call_one(function, x).get()
    finally:
        processes.stop().get()


if __name__ == "__main__":
    run(connected)
