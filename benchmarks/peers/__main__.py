"""Measures gradwire beside what one would use in its place, in turns, in real processes on this machine.

Each peer is installed into an environment of its own below .venv-peers, and left out, with the reason, where
it cannot be installed or started. Results are compared with those of one process before anything is timed.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.machine import facts
from benchmarks.peers.environments import PEERS, CannotInstall, python_of
from benchmarks.peers.measuring import Found, measure
from benchmarks.peers.processes import PeerFailed

RESULTS = Path(__file__).resolve().parents[1] / "results"
TURNS, QUICK_TURNS = 30, 4


def _peers(text: str) -> list[str]:
    names = text.split(",")
    if unknown := set(names) - set(PEERS):
        raise argparse.ArgumentTypeError(f"no {', '.join(sorted(unknown))} among {', '.join(PEERS)}")
    return names


def table_of(results: Sequence[Found]) -> Table:
    """Everything that was measured, case by case."""
    table = Table("case", "peer", title="gradwire beside its peers: a ratio below 1 is gradwire's to win")
    for heading in ("peer, ms", "gradwire, ms", "ratio", "quartiles"):
        table.add_column(heading, justify="right")
    for case in dict.fromkeys(found.case for found in results):
        table.add_section()
        for found in results:
            if found.case == case:
                ratio = found.ratio
                table.add_row(
                    case,
                    found.peer.label,
                    *(f"{1e3 * statistics.median(times):.2f}" for times in (found.theirs, found.ours)),
                    f"{ratio.median:.2f}",
                    f"{ratio.low:.2f} – {ratio.high:.2f}",
                )
    return table


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.peers", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer turns")
    parser.add_argument("--peers", type=_peers, default=list(PEERS), help=f"of {', '.join(PEERS)}")
    parser.add_argument(
        "--output",
        type=Path,
        default=None,
        help="JSON file to write; by default results/peers.json for a whole run and "
        "results/partial.peers.json for any other",
    )
    options = parser.parse_args()
    is_whole = not options.quick and options.peers == list(PEERS)
    output = options.output or RESULTS / ("peers.json" if is_whole else "partial.peers.json")
    console = Console(width=None if sys.stdout.isatty() else 110)
    progress = Console(stderr=True, highlight=False, style="dim")
    # As Ctrl-C does: all processes are ended on the way out.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    results: list[Found] = []
    skipped: dict[str, str] = {}
    machine = facts()
    try:
        for peer in (PEERS[name] for name in options.peers):
            try:
                progress.print(f"{peer.label}: installing it, unless it is there")
                python = python_of(peer)
                progress.print(f"{peer.label}: measuring")
                results += measure(peer, python, QUICK_TURNS if options.quick else TURNS)
            except (CannotInstall, PeerFailed) as error:
                skipped[peer.name] = str(error)
    except KeyboardInterrupt:
        progress.print("interrupted")
        return 130
    console.print(table_of(results))
    for name, reason in skipped.items():
        console.print(f"left out: {PEERS[name].label}: {reason}", markup=False)
    document = {
        "machine": machine,
        "requirements": {name: PEERS[name].requirements for name in options.peers},
        "skipped": skipped,
        "results": [found.as_json() for found in results],
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
