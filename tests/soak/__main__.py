"""``python -m tests.soak --seconds 120 --seed 0``: exits with 1 if anything was not as it should be."""

from __future__ import annotations

import argparse
import os
import sys

# Before torch is loaded, here and in every process that is started: results are compared bit for bit.
os.environ["OMP_NUM_THREADS"] = "1"

from rich.console import Console
from tests.faults.carriers import CARRIERS
from tests.soak.checks import check
from tests.soak.report import print_report
from tests.soak.run import Size, run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="how long to load the workers")
    parser.add_argument("--seed", type=int, default=0, help="what happens when, as far as threads allow")
    parser.add_argument("--clients", type=int, default=3, help="processes at a time")
    parser.add_argument("--threads", type=int, default=3, help="of each client")
    parser.add_argument(
        "--carrier",
        choices=["mixed", *CARRIERS],
        default="mixed",
        help="what sessions go over while they can; mixed: another one to each worker, by the seed",
    )
    size = Size(**vars(parser.parse_args()))
    with run(size) as outcome:
        remains = check(outcome)
        print_report(outcome, remains, Console(soft_wrap=True))
    return 1 if outcome.violations else 0


if __name__ == "__main__":
    sys.exit(main())
