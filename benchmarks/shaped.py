"""Measures training steps over a slow line, with each codec and without, in turns.

Two kinds of step. "split": activations go to a worker and come back, so do their gradients, which makes four
transfers of the same size without compression. "tasks": token ids go, features come back, and each of several
losses has a backward of its own through them (as for gradient surgery): nearly all that crosses is gradients.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import gradwire as gw
from benchmarks.daemons import Daemon
from benchmarks.shaped_served import TOKENS, WIDTH
from benchmarks.slow_line import Line, slow_line

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "results" / "shaped.json"

ROWS = 16384
"""Of the activations: 8 MiB each."""
FEATURES = 4096
"""Tokens of the other step: 2 MiB of features."""
TASKS = 32

SETTINGS: dict[str, gw.Compression] = {
    "none": gw.Compression(),
    "backward int8": gw.Compression(backward="int8"),
    "forward bf16, backward int8": gw.Compression("bf16", "int8"),
    "both int8": gw.Compression("int8", "int8"),
    "both bf16": gw.Compression("bf16", "bf16"),
    "both fp16": gw.Compression("fp16", "fp16"),
    "both zstd": gw.Compression("zstd", "zstd"),
}
MEASURED = [*(("split", name) for name in SETTINGS), ("tasks", "none"), ("tasks", "backward int8")]


def steps(worker: gw.RemoteWorker) -> dict[str, Callable[[], None]]:
    """The two kinds of step."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, WIDTH, generator=generator)
    local = (torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5).requires_grad_()
    ids = torch.randint(TOKENS, (FEATURES,), generator=generator)
    heads = torch.randn(TASKS, WIDTH, generator=generator).requires_grad_()

    def split() -> None:
        worker.layer(torch.relu(x @ local)).square().mean().backward()
        local.grad = None

    def tasks() -> None:
        features = worker.embed(ids)
        for task in range(TASKS):
            loss = (features @ heads[task]).square().mean()
            loss.backward(retain_graph=task + 1 < TASKS)
        heads.grad = None

    return {"split": split, "tasks": tasks}


def measure(address: str, rounds: int) -> dict[str, Any]:
    """Seconds and bytes of each step, in turns. Runs at the client's end of the line."""
    torch.set_num_threads(1)
    seconds: dict[str, list[float]] = {}
    sizes: dict[str, int] = {}
    with gw.connect(address) as worker:
        todo = steps(worker)
        for turn in range(rounds + 1):
            for kind, setting in MEASURED:
                key = f"{kind}: {setting}"
                chosen = SETTINGS[setting]
                before = worker.traffic().total
                begun = time.perf_counter()
                with gw.compression(chosen.forward, chosen.backward):
                    todo[kind]()
                taken = time.perf_counter() - begun
                if turn:  # the first one warms up
                    seconds.setdefault(key, []).append(taken)
                    sizes[key] = worker.traffic().total - before
    return {"seconds": seconds, "bytes": sizes}


def worker_process(line: Line) -> Daemon:
    """A daemon at the worker's end of the line."""
    return Daemon("benchmarks.shaped_served", bind=f"{line.worker_host}:0", prefix=line.worker_prefix)


def run(megabits: float, rounds: int) -> dict[str, Any]:
    """Measures in a process of its own, at the client's end of the line."""
    with (
        slow_line(megabits) as line,
        worker_process(line) as worker,
        line.address(worker.wait_until_ready()) as address,
    ):
        command = [*line.client_prefix, sys.executable, "-m", "benchmarks.shaped", "--measure", address]
        done = subprocess.run(
            [*command, "--rounds", str(rounds)],
            cwd=HERE.parent,
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=120 * (rounds + 1),
        )
    return {
        "line": line.how,
        "machine": platform.platform(),
        "torch": torch.__version__,
        "rounds": rounds,
        **json.loads(done.stdout),
    }


def show(found: dict[str, Any]) -> None:
    console = Console()
    console.print(f"line: {found['line']}")
    table = Table("step", "codec", "median s", "quartiles", "MB", "times as fast")
    medians = {key: statistics.median(times) for key, times in found["seconds"].items()}
    for key, times in found["seconds"].items():
        kind, _, setting = key.partition(": ")
        low, _, high = statistics.quantiles(times, n=4)
        faster = medians[f"{kind}: none"] / medians[key]
        size = f"{found['bytes'][key] / 1e6:.2f}"
        table.add_row(kind, setting, f"{medians[key]:.2f}", f"{low:.2f} – {high:.2f}", size, f"{faster:.2f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.shaped", description=__doc__)
    parser.add_argument("--megabits", type=float, default=100, help="the speed of the line, each way")
    parser.add_argument("--rounds", type=int, default=5, help="how often each step is measured")
    parser.add_argument("--measure", metavar="ADDRESS", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("quartiles need 2 rounds")
    if options.measure:
        json.dump(measure(options.measure, options.rounds), sys.stdout)
        return
    found = run(options.megabits, options.rounds)
    show(found)
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
