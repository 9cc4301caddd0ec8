"""The tables and the JSON file."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.cases import Unit
from benchmarks.comparing import Comparison
from benchmarks.results import Results


def print_report(console: Console, results: Results, comparisons: Sequence[Comparison]) -> None:
    """Times of everybody, then the ratios with their targets."""
    console.print(_times(results))
    console.print(_ratios(comparisons))
    judged = [comparison for comparison in comparisons if comparison.target is not None]
    if judged:
        met = sum(bool(comparison.is_met) for comparison in judged)
        console.print(f"{met} of {len(judged)} targets met")


def _times(results: Results) -> Table:
    table = Table("row", "what", "contender", title="Per call or step")
    for heading in ("median", "quartiles"):
        table.add_column(heading, justify="right")
    previous = ""
    for case, contender in results.measured():
        spread = results.spread(case.key, contender)
        show = SHOWN[case.unit]
        if case.key != previous:
            table.add_section()
        row, title = ("", "") if case.key == previous else (str(case.row), case.title)
        table.add_row(
            row, title, contender.label, show(spread.median), f"{show(spread.low)} – {show(spread.high)}"
        )
        previous = case.key
    return table


def _ratios(comparisons: Sequence[Comparison]) -> Table:
    table = Table("row", "what", "who", "against", title="Ratios: lower is better, below 1 wins")
    for heading in ("ratio", "quartiles", "target", "met"):
        table.add_column(heading, justify="right")
    previous = 0
    for one in comparisons:
        if one.case.row != previous:
            table.add_section()
        previous = one.case.row
        table.add_row(
            str(one.case.row),
            one.case.title,
            one.ours.label,
            one.against,
            f"{one.value.median:.2f}",
            f"{one.value.low:.2f} – {one.value.high:.2f}",
            "" if one.target is None else f"{one.target:g}",
            {None: "", True: "[green]yes[/]", False: "[bold red]no[/]"}[one.is_met],
        )
    return table


def _time(seconds: float) -> str:
    if seconds < 1e-3:
        return f"{1e6 * seconds:,.1f} µs"
    return f"{1e3 * seconds:,.2f} ms"


SHOWN: dict[Unit, Callable[[float], str]] = {
    Unit.SECONDS: _time,
    Unit.BYTES: "{:.2f}".format,
    Unit.PERCENT: "{:.1f} %".format,
    Unit.THREADS: "{:.0f}".format,
}


def write_json(
    path: Path, machine: dict[str, object], results: Results, comparisons: Sequence[Comparison]
) -> None:
    """Everything, for programs."""
    document = {
        "machine": machine,
        "comparisons": [_as_json(comparison) for comparison in comparisons],
        "measurements": results.as_json(),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")


def _as_json(one: Comparison) -> dict[str, Any]:
    return {
        "case": one.case.key,
        "row": one.case.row,
        "title": one.case.title,
        "contender": one.ours.name,
        "against": one.against,
        "ratio": one.value.median,
        "quartiles": [one.value.low, one.value.high],
        "target": one.target,
        "met": one.is_met,
    }
