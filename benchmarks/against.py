"""Measures this version of gradwire beside an earlier one, in turns, in real processes on this machine.

``python -m benchmarks.against 52e96dd`` checks the other version out into a temporary folder. The ratio of a
case is the median over all rounds of this version's time by the other's in the same round.

``--network`` measures both over TCP, ``--grpc`` over gRPC streams alone, ``--only TEXT`` the cases whose name
contains this. ``--set NAME=VALUE`` changes the environment of this version.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parent.parent
MEMBER = ROOT / "benchmarks" / "against_member.py"
ROUND_SECONDS = 0.1
"""How long a turn of one case takes, about."""


class Trainer:
    """A trainer process of one version, with a worker process of the same version."""

    def __init__(self, root: Path, carrier: str, stack: ExitStack, settings: dict[str, str]) -> None:
        path = os.pathsep.join([str(root / "client"), str(root / "server")])
        self._environment = {**os.environ, **settings, "PYTHONPATH": path}
        worker = stack.enter_context(self._member("serve"))
        address = _line(worker)
        self._process = stack.enter_context(self._member("train", address, carrier))
        self.cases = _line(self._process).split("|")

    @contextmanager
    def _member(self, *arguments: str) -> Iterator[subprocess.Popen[str]]:
        command = [sys.executable, str(MEMBER), *arguments]
        with subprocess.Popen(
            command, env=self._environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                yield process
            finally:
                process.kill()

    def seconds(self, case: str, count: int) -> float:
        """The time of one operation, on average over a turn."""
        _stream(self._process.stdin).write(f"{case} {count}\n")
        _stream(self._process.stdin).flush()
        return float(_line(self._process))


def _stream(stream: IO[str] | None) -> IO[str]:
    assert stream is not None
    return stream


def _line(process: subprocess.Popen[str]) -> str:
    line = _stream(process.stdout).readline()
    if not line:
        raise SystemExit(f"{process.args!r} ended; what it wrote is above")
    return line.rstrip("\n")


@contextmanager
def checked_out(ref: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "other"
        subprocess.run(["git", "-C", ROOT, "worktree", "add", "-q", "--detach", root, ref], check=True)
        try:
            build = root / "hatch_build.py"  # versions before the native module have none
            if build.exists():
                module = root / "client" / "gradwire" / "transport" / "native.abi3.so"
                subprocess.run([sys.executable, build, module], check=True)
            yield root
        finally:
            subprocess.run(["git", "-C", ROOT, "worktree", "remove", "--force", root], check=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.against", description=__doc__)
    parser.add_argument("ref", help="the commit to compare with")
    parser.add_argument("--rounds", type=int, default=40)
    carriers = parser.add_mutually_exclusive_group()
    carriers.add_argument("--network", action="store_true", help="over TCP, not around the network")
    carriers.add_argument("--grpc", action="store_true", help="over gRPC streams alone")
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name contains this")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="for this version's environment",
    )
    options = parser.parse_args()
    settings = dict(assignment.split("=", 1) for assignment in options.set)
    carrier = "grpc" if options.grpc else "tcp" if options.network else "same-host"
    table = Table("case", "other", "this", "ratio", "quartiles of the ratio")
    with ExitStack() as stack:
        other = Trainer(stack.enter_context(checked_out(options.ref)), carrier, stack, {})
        this = Trainer(ROOT, carrier, stack, settings)
        for case in filter(lambda name: options.only in name, this.cases):
            count = max(int(ROUND_SECONDS / min(this.seconds(case, 5), other.seconds(case, 5))), 1)
            pairs = []
            for number in range(options.rounds):
                first, second = (other, this) if number % 2 else (this, other)
                times = {first: first.seconds(case, count), second: second.seconds(case, count)}
                pairs.append((times[other], times[this]))
            low, middle, high = statistics.quantiles([here / there for there, here in pairs], n=4)
            there, here = (statistics.median(column) for column in zip(*pairs, strict=True))
            table.add_row(
                case,
                f"{there * 1e6:.0f} µs",
                f"{here * 1e6:.0f} µs",
                f"{middle:.2f}",
                f"{low:.2f} to {high:.2f}",
            )
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
