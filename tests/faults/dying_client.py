"""A client that is killed or stopped in the middle of something: ``main`` runs in a process of its own.

Its arguments are what to be in the middle of, two workers that serve `test_deaths.SERVED`, and a file that
appears on the way.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import gradwire as gw

__all__ = ["PHASES", "main"]

LOST_AFTER = 1.0


def forward(first: gw.RemoteWorker, second: gw.RemoteWorker, marker: str) -> None:
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    first.block(second.scale(x), marker)


def backward(first: gw.RemoteWorker, second: gw.RemoteWorker, marker: str) -> None:
    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    # The pass goes on to the second when the first is done: for nobody, by then.
    first.block_in_backward(second.scale(x), marker).sum().backward()


def step(first: gw.RemoteWorker, second: gw.RemoteWorker, marker: str) -> None:
    class BlockingSGD(torch.optim.SGD):
        """Whose like on the workers blocks."""

    model = torch.nn.Sequential(first.get("shared"), second.get("shared"))
    optimizer = gw.optim.DistributedOptimizer(BlockingSGD, [model], lr=0.1)
    model(torch.ones(3).double()).sum().backward()
    first.block_in_step(marker)
    optimizer.step()


def transfer(first: gw.RemoteWorker, second: gw.RemoteWorker, marker: str) -> None:
    large = torch.zeros(40_000_000)
    Path(marker).touch()
    for _ in range(1000):  # so that one is under way when the signal comes
        first.call("echo", large)


PHASES = {phase.__name__: phase for phase in (forward, backward, step, transfer)}


def main() -> None:
    torch.set_num_threads(1)
    phase, first, second, marker = sys.argv[1:]
    workers = (gw.connect(address, lost_after=LOST_AFTER) for address in (first, second))
    try:
        PHASES[phase](*workers, marker)
    except gw.GradwireError as error:
        print(type(error).__name__, error, flush=True)
    else:
        print("done", flush=True)
