"""The chart: every ratio on one logarithmic axis, with its target."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from benchmarks.comparing import Comparison

COLORS = {True: "#3a9d6a", False: "#d0563f", None: "#a9b0b8"}
"""By whether the target is met."""
FLOOR = 0.02
"""Where the bars begin: a logarithmic axis has no 0."""
CEILING = 20.0
"""Where bars are cut off that would make all others look alike."""
TICKS = (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20)


def draw(path: Path, machine: dict[str, object], comparisons: Sequence[Comparison]) -> None:
    """One bar per comparison."""
    figure = Figure(figsize=(11, 1.8 + 0.26 * len(comparisons)), layout="constrained")
    axes = figure.subplots()
    for position, one in enumerate(comparisons):
        _draw_bar(axes, position, one)
    labels = [f"{one.case.title}: {one.ours.label} / {one.against}" for one in comparisons]
    axes.set_yticks(range(len(comparisons)), labels, fontsize=8)
    for position, one in enumerate(comparisons):
        if position and comparisons[position - 1].case.row != one.case.row:
            axes.axhline(position - 0.5, color="#e3e6e8", linewidth=0.8, zorder=0)
    axes.set_ylim(len(comparisons) - 0.5, -0.5)
    axes.set_xscale("log")
    axes.set_xlim(FLOOR, 1.8 * CEILING)
    axes.set_xticks(TICKS, [f"{tick:g}" for tick in TICKS], fontsize=8)
    axes.xaxis.minorticks_off()
    axes.axvline(1.0, color="#555555", linewidth=0.8, linestyle=":", zorder=0)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_xlabel("ratio, lower is better; thin lines: quartiles over turns", fontsize=9)
    figure.suptitle(
        f"gradwire {machine['gradwire']} beside TensorPipe (torch {machine['torch']}), "
        f"{machine['cores']} cores, {str(machine['date'])[:10]}",
        fontsize=11,
    )
    figure.legend(
        handles=[
            Patch(color=COLORS[True], label="target met"),
            Patch(color=COLORS[False], label="target missed"),
            Patch(color=COLORS[None], label="no target, for information"),
            Line2D([], [], color="black", linewidth=2, label="target"),
        ],
        loc="outside lower center",
        ncols=4,
        fontsize=8,
        frameon=False,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def _draw_bar(axes: Axes, position: int, one: Comparison) -> None:
    low, end, high = (
        min(max(number, FLOOR), CEILING) for number in (one.value.low, one.value.median, one.value.high)
    )
    axes.barh(position, end - FLOOR, left=FLOOR, color=COLORS[one.is_met], height=0.62)
    axes.plot([low, high], [position, position], color="#333333", linewidth=0.9)
    axes.annotate(
        f"{one.value.median:.2f}",
        (max(high, one.target or 0), position),
        (5, 0),
        textcoords="offset points",
        va="center",
        fontsize=8,
    )
    if one.target is not None:
        axes.plot([one.target] * 2, [position - 0.4, position + 0.4], color="black", linewidth=2)
