"""Measures how the time of a step grows with what is in it, against real worker processes.

Prints a table with the exponent of each curve: the slope of a straight line through the upper half of its
points, both axes logarithmic. 1 is linear. A point is the fastest of its steps: what else the machine does
only ever adds. Writes results/growth.json, with all steps, and results/growth.png; where it measured a part,
results/partial.growth.json and .png.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import signal
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import gradwire as gw
from benchmarks.daemons import Daemon
from benchmarks.growth.base import Curve, Place
from benchmarks.growth.chart import draw
from benchmarks.growth.curves import curves
from benchmarks.processes import held_bytes, threads_of

RESULTS = Path(__file__).resolve().parents[1] / "results"

LINEAR = 1.15
"""Exponents up to this count as linear: some noise is in each."""

Times = dict[int, list[float]]
Weights = dict[int, dict[str, int]]
"""By size, the threads and the bytes of a worker."""


def worker_process() -> Daemon:
    """A daemon that serves `served.py`."""
    return Daemon("benchmarks.growth.served", "--max-contexts-per-client", "20000")


def measure(curve: Curve, place: Place) -> tuple[Times, Weights]:
    """The seconds of steps, and what the worker needs, for each size.

    Sizes take turns, save where one has to be prepared for long.
    """
    times: Times = {size: [] for size in curve.sizes}
    weights: Weights = {}
    for size in curve.sizes:
        prepared = curve.prepared(place, size)
        if prepared is None:
            curve.step(place, size)  # to warm up
            continue
        with prepared:
            curve.step(place, size)
            times[size] = [curve.step(place, size) for _ in range(curve.rounds)]
            if curve.weighs_worker:
                weights[size] = {"threads": threads_of(place.pid), "bytes": held_bytes([place.pid])}
    for _ in range(curve.rounds):
        for size, taken in times.items():
            if len(taken) < curve.rounds:
                taken.append(curve.step(place, size))
    return times, weights


def exponent(points: Sequence[tuple[int, float]]) -> float:
    """How the times of the larger half of the sizes grow: with this power of the size."""
    upper = points[len(points) // 2 :]
    line = statistics.linear_regression(
        [math.log(size) for size, _ in upper], [math.log(seconds) for _, seconds in upper]
    )
    return line.slope


def marginal_cost(weights: Weights) -> str:
    """What one more costs, from the smallest size to the largest."""
    smallest, largest = min(weights), max(weights)
    threads, held = (
        (weights[largest][what] - weights[smallest][what]) / (largest - smallest)
        for what in ("threads", "bytes")
    )
    return f"{threads:.1f} threads and {held / 1024:.0f} KB"


def allow_many_files() -> None:
    """As many as this process may have, and the ones that it starts: each client of a worker takes a few."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller sizes and fewer steps")
    parser.add_argument("--only", default="", help="only curves whose name contains this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [curve for curve in curves(quick=options.quick) if options.only in curve.name]
    table = Table("curve", "sizes", "first", "last", "exponent", "", title="time of a step, in ms")
    results = []
    weighings = []
    allow_many_files()
    # As Ctrl-C does: all processes are ended on the way out.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with (
        worker_process() as here,
        worker_process() as there,
        gw.connect(here.wait_until_ready()) as worker,
    ):
        place = Place(worker, (here.wait_until_ready(), there.wait_until_ready()), here.pid)
        for curve in chosen:
            times, weights = measure(curve, place)
            points = [(size, min(taken)) for size, taken in times.items()]
            power = exponent(points)
            (first, first_time), (last, last_time) = points[0], points[-1]
            table.add_row(
                curve.name,
                f"{first:,} – {last:,}",
                f"{1e3 * first_time:,.2f}",
                f"{1e3 * last_time:,.2f}",
                f"{power:.2f}",
                "linear or better" if power <= LINEAR else "MORE THAN LINEAR",
            )
            results.append({"name": curve.name, "exponent": power, "seconds": times, "worker": weights})
            if len(weights) > 1:
                weighings.append(f"{curve.name}: each further one costs the worker {marginal_cost(weights)}")
    console = Console()
    console.print(table, *weighings, sep="\n")
    RESULTS.mkdir(exist_ok=True)
    name = "partial.growth" if options.quick or options.only else "growth"
    (RESULTS / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(results, RESULTS / f"{name}.png")


if __name__ == "__main__":
    main()
