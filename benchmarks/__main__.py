"""Measures calls between two real processes on this machine, and prints medians and quartiles.

Absolute times say little on a busy machine: compare rows of one run, which are measured in turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import gradwire as gw

HERE = Path(__file__).resolve().parent


@contextmanager
def worker_process() -> Iterator[str]:
    """A daemon that serves `served.py`; its address."""
    command = [sys.executable, "-m", "gradwire_server.cli", "serve", "served"]
    options = ["--bind", "127.0.0.1:0", "--torch-threads", "1", "--log-format", "json"]
    process = subprocess.Popen([*command, *options], cwd=HERE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            event = json.loads(line)
            if event.get("event") == "ready":
                yield event["addresses"][0]
                break
        else:
            raise RuntimeError("the worker did not start")
    finally:
        process.terminate()
        process.communicate(timeout=30)


def rows(worker: gw.RemoteWorker) -> dict[str, tuple[Callable[[], object], int]]:
    """What is measured: a name, what to do once, and how many times in one turn."""
    small = torch.ones(16)
    leaf = torch.ones(16, requires_grad=True)
    weight = torch.ones(16, requires_grad=True)
    large = torch.ones(4 << 20)

    def forward_and_backward() -> None:
        worker.scale(leaf).sum().backward()

    def locally() -> None:
        torch.tanh(leaf * weight).sum().backward()

    def many_in_flight() -> None:
        for future in [worker.call_async("echo", small) for _ in range(100)]:
            future.result()

    return {
        "ping": (worker.ping, 50),
        "call, 16 floats there and back": (lambda: worker.echo(small), 50),
        "100 such calls in flight": (many_in_flight, 2),
        "forward + backward, 16 floats": (forward_and_backward, 25),
        "the same without a network": (locally, 25),
        "echo of 16 MiB": (lambda: worker.echo(large), 1),
    }


def measure(turns: int) -> dict[str, list[float]]:
    """Seconds for one of each, in turns."""
    times: dict[str, list[float]] = {}
    with worker_process() as address, gw.connect(address) as worker:
        todo = rows(worker)
        for turn in range(turns + 1):
            for name, (once, repeat) in todo.items():
                begun = time.perf_counter()
                for _ in range(repeat):
                    once()
                if turn:  # the first one warms up
                    times.setdefault(name, []).append((time.perf_counter() - begun) / repeat)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--turns", type=int, default=30, help="how often each row is measured")
    turns = parser.parse_args().turns
    torch.set_num_threads(1)
    table = Table("what", "median", "quartiles", title="times of one, in µs")
    for name, seconds in measure(turns).items():
        low, middle, high = (1e6 * quartile for quartile in statistics.quantiles(seconds, n=4))
        table.add_row(name, f"{middle:,.0f}", f"{low:,.0f} – {high:,.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
