"""Measures how the time of a step grows with what is in it, against real worker processes.

Prints a table with the exponent of each curve: the slope of a straight line through the upper half of its
points, both axes logarithmic. 1 is linear. A point is the fastest of its steps: what else the machine does
only ever adds. Writes results/growth.json, with all steps, and results/growth.png.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import gradwire as gw
from benchmarks.daemons import Daemon
from benchmarks.growth.chart import draw
from benchmarks.growth.curves import Curve, Place, curves

RESULTS = Path(__file__).resolve().parents[1] / "results"

LINEAR = 1.15
"""Exponents up to this count as linear: some noise is in each."""

Times = dict[int, list[float]]


def worker_process() -> Daemon:
    """A daemon that serves `served.py`."""
    return Daemon("benchmarks.growth.served", "--max-contexts-per-client", "20000")


def measure(curve: Curve, place: Place) -> Times:
    """The seconds of steps, for each size. Sizes take turns, save where one has to be prepared for long."""
    times: Times = {size: [] for size in curve.sizes}
    for size in curve.sizes:
        prepared = curve.prepared(place, size)
        if prepared is None:
            curve.step(place, size)  # to warm up
            continue
        with prepared:
            curve.step(place, size)
            times[size] = [curve.step(place, size) for _ in range(curve.rounds)]
    for _ in range(curve.rounds):
        for size, taken in times.items():
            if len(taken) < curve.rounds:
                taken.append(curve.step(place, size))
    return times


def exponent(points: Sequence[tuple[int, float]]) -> float:
    """How the times of the larger half of the sizes grow: with this power of the size."""
    upper = points[len(points) // 2 :]
    line = statistics.linear_regression(
        [math.log(size) for size, _ in upper], [math.log(seconds) for _, seconds in upper]
    )
    return line.slope


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.growth", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="smaller sizes and fewer steps")
    parser.add_argument("--only", default="", help="only curves whose name contains this")
    options = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [curve for curve in curves(quick=options.quick) if options.only in curve.name]
    table = Table("curve", "sizes", "first", "last", "exponent", "", title="time of a step, in ms")
    results = []
    with worker_process() as first_worker, worker_process() as second_worker:
        addresses = (first_worker.wait_until_ready(), second_worker.wait_until_ready())
        worker = gw.connect(addresses[0])
        for curve in chosen:
            times = measure(curve, Place(worker, addresses))
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
            results.append({"name": curve.name, "exponent": power, "seconds": times})
    Console().print(table)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "growth.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(results, RESULTS / "growth.png")


if __name__ == "__main__":
    main()
