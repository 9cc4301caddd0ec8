"""A worker or a trainer of one version of gradwire, for `benchmarks.against`. Uses public names alone, so
that any version can run it: ``against_member.py serve`` or ``against_member.py train ADDRESS CARRIER``."""

from __future__ import annotations

import gc
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import gradwire as gw
import gradwire_server as gws

STEPS = 20
CARRIERS: dict[str, dict[str, Any]] = {
    "same-host": {},
    "tcp": {"same_host": False},
    "grpc": {"same_host": False, "direct": False},
}


class Cell(torch.nn.Module):
    """Keeps its state from call to call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(16, dtype=torch.float64) / 2)
        self.state: torch.Tensor | None = None

    def reset(self) -> None:
        self.state = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x if self.state is None else x + self.state
        self.state = torch.tanh(state @ self.weight)
        return self.state


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def echo(x: torch.Tensor) -> torch.Tensor:
    return x


def cases(worker: gw.RemoteWorker) -> dict[str, Callable[[], None]]:
    small = torch.ones(16)
    layer = worker.create("Linear", 16, 16)
    optimizer = gw.optim.DistributedOptimizer(torch.optim.SGD, [layer], lr=1e-3)
    cell = worker.create("Cell")
    large = torch.ones(1 << 18)
    sizes = {"64 KB": 1 << 14, "256 KB": 1 << 16, "1 MB": 1 << 18, "16 MB": 1 << 22, "64 MB": 1 << 24}
    tensors = {name: torch.ones(size) for name, size in sizes.items()}

    def backward(x: torch.Tensor) -> None:
        worker.double(x.clone().requires_grad_()).sum().backward()

    def step() -> None:
        optimizer.zero_grad()
        layer(small).sum().backward()
        optimizer.step()

    def many_calls() -> None:
        x = small.clone().requires_grad_()
        torch.stack([worker.double(x) for _ in range(STEPS)]).sum().backward()  # type: ignore[no-untyped-call]

    def in_flight() -> None:
        for future in [worker.call_async("double", small) for _ in range(200)]:
            future.result()

    def recurrent(feedback: bool) -> None:
        cell.reset()
        x = torch.ones(1, 16, dtype=torch.float64, requires_grad=True)
        total, out = 0.0, x
        for _ in range(STEPS):
            out = cell(out if feedback else x)
            total = total + out.sum()
        total.backward()  # type: ignore[attr-defined]

    return {
        "small call": lambda: worker.double(small),
        "forward + backward": lambda: backward(small),
        "with a step": step,
        "200 calls in flight": in_flight,
        **{f"echo of {name}": partial(worker.call, "echo", x) for name, x in tensors.items()},
        "1 MB forward + backward": lambda: backward(large),
        f"{STEPS} calls, one backward": many_calls,
        f"kept state, {STEPS} steps": lambda: recurrent(False),
        f"kept state, each from the one before, {STEPS} steps": lambda: recurrent(True),
    }


def train(address: str, carrier: str) -> None:
    gw.tune_malloc()
    with gw.connect(address, **CARRIERS[carrier]) as worker:
        made = cases(worker)
        print("|".join(made), flush=True)
        for line in sys.stdin:
            name, count = line.rstrip("\n").rsplit(" ", 1)
            gc.collect()
            gc.disable()
            start = time.perf_counter()
            for _ in range(int(count)):
                made[name]()
            print((time.perf_counter() - start) / int(count), flush=True)
            gc.enable()


def serve() -> None:
    with gws.Worker(double, echo, Cell, torch.nn.Linear) as worker:
        print(worker.address, flush=True)
        sys.stdin.read()  # until the coordinator closes it


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "serve":
        serve()
    else:
        train(sys.argv[2], sys.argv[3])
