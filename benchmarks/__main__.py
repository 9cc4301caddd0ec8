"""Measures gradwire beside torch.distributed.rpc (TensorPipe), in turns, in real processes on this machine.

Absolute times say little on a busy machine; the ratios of one run do.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from pathlib import Path

from rich.console import Console

from benchmarks.cases import CASES, Case
from benchmarks.chart import draw
from benchmarks.comparing import compare
from benchmarks.contenders import CONTENDERS
from benchmarks.machine import facts
from benchmarks.measuring import Plan, measure
from benchmarks.members import MemberFailed
from benchmarks.report import print_report, write_json

RESULTS = Path(__file__).resolve().parent / "results"
TABLE_WIDTH = 140
"""Of the tables, where there is no terminal that has a width of its own."""
QUICK_SHARE = 0.25
"""Of the turns, and of the operations in a turn, where there is little time."""


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer turns, up to 64 MB")
    parser.add_argument("--rows", type=_rows, default=None, help="only these rows, e.g. 1,6,7")
    parser.add_argument("--contenders", type=_contenders, default=None, help=f"of {', '.join(CONTENDERS)}")
    parser.add_argument("--repetitions", type=_positive, default=None, help="turns of each contender")
    parser.add_argument(
        "--output",
        type=Path,
        default=None,
        help="JSON file to write, with a chart beside it; by default results/benchmark.json for a whole run "
        "and results/partial.json for any other",
    )
    return parser.parse_args()


def _rows(text: str) -> set[int]:
    rows, known = {int(row) for row in text.split(",")}, {case.row for case in CASES.values()}
    if not rows <= known:
        raise argparse.ArgumentTypeError(f"rows are {min(known)} to {max(known)}")
    return rows


def _contenders(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(CONTENDERS):
        raise argparse.ArgumentTypeError(f"no {', '.join(sorted(unknown))} among {', '.join(CONTENDERS)}")
    return names


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("at least 1")
    return number


def _is_wanted(case: Case, options: argparse.Namespace) -> bool:
    return (options.rows is None or case.row in options.rows) and (case.is_quick or not options.quick)


def main() -> int:
    options = parse()
    progress = Console(stderr=True)
    console = Console() if sys.stdout.isatty() else Console(width=TABLE_WIDTH)
    plan = Plan(
        cases=[case for case in CASES.values() if _is_wanted(case, options)],
        contenders=[CONTENDERS[name] for name in options.contenders or CONTENDERS],
        turns=options.repetitions,
        share=QUICK_SHARE if options.quick else 1.0,
    )
    is_whole = not (options.quick or options.rows or options.contenders)
    output = options.output or RESULTS / ("benchmark.json" if is_whole else "partial.json")
    machine = facts()
    begun = time.monotonic()

    def say(what: str) -> None:
        progress.print(f"[dim]{time.monotonic() - begun:5.0f} s  {what}[/]", highlight=False)

    # As Ctrl-C does: all processes are ended on the way out.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        results = measure(plan, say)
    except MemberFailed as error:
        progress.print(str(error), style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        progress.print("interrupted")
        return 130
    comparisons = compare(results)
    print_report(console, results, comparisons)
    write_json(output, machine, results, comparisons)
    draw(output.with_suffix(".png"), machine, comparisons)
    say(f"wrote {output} and {output.with_suffix('.png').name}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
