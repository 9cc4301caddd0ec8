"""The curves as small charts side by side, both axes logarithmic."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

__all__ = ["draw"]

_COLUMNS = 4


def draw(results: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Writes a PNG."""
    rows = math.ceil(len(results) / _COLUMNS)
    figure, axes = pyplot.subplots(
        rows, _COLUMNS, figsize=(3.4 * _COLUMNS, 3.0 * rows), squeeze=False, layout="constrained"
    )
    for place, result in zip(axes.flat, results, strict=False):
        sizes = [int(size) for size in result["seconds"]]
        fastest = [1e3 * min(taken) for taken in result["seconds"].values()]
        median = [1e3 * statistics.median(taken) for taken in result["seconds"].values()]
        place.fill_between(sizes, fastest, median, alpha=0.25, label="up to the median")
        label = f"fastest, exponent {result['exponent']:.2f}"
        place.plot(sizes, fastest, marker="o", markersize=3, label=label)
        # Through the last point, so that what lies below it on the left grows more slowly.
        guide = [fastest[-1] * size / sizes[-1] for size in sizes]
        place.plot(sizes, guide, linestyle="--", color="grey", linewidth=1, label="linear")
        place.set(xscale="log", yscale="log", title=result["name"], ylabel="ms per step")
        place.set_ylim(bottom=min(fastest) / 3)
        place.title.set_size(9)
        place.legend(fontsize=7, loc="upper left")
    for place in axes.flat[len(results) :]:
        place.axis("off")
    figure.savefig(path, dpi=130)
