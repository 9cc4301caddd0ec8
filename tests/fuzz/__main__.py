"""``python -m tests.fuzz --seconds 60 --seed 0 [--target NAME]``: exits with 1 if something was found.

``python -m tests.fuzz --target NAME FILE...`` runs inputs again that were found, which are in build/fuzz.
``--make-corpus`` writes the inputs anew from which all others are made: messages that gradwire itself writes.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

# Before torch is loaded: one input after another is run, each in no time.
os.environ["OMP_NUM_THREADS"] = "1"

from tests.fuzz.inputs import write_corpus
from tests.fuzz.running import Outcome, fuzz, replay
from tests.fuzz.targets import TARGETS


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="how long, for all targets together")
    parser.add_argument("--inputs", type=int, help="how many for each target, however long it takes")
    parser.add_argument("--seed", type=int, default=0, help="decides how inputs are changed")
    parser.add_argument(
        "--target", action="append", choices=[*TARGETS], help="only this one; may be repeated"
    )
    parser.add_argument("--make-corpus", action="store_true", help="write tests/fuzz/corpus anew")
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE", help="inputs to run again")
    options = parser.parse_args()
    names = options.target or [*TARGETS]
    if options.make_corpus:
        for name in names:
            write_corpus(name, TARGETS[name]().corpus())
        return 0
    if options.files and len(names) != 1:
        parser.error("--target says what to run files with")
    found = 0
    for name in names:
        if options.files:
            outcome = replay(TARGETS[name], options.files, _tell)
        else:
            seconds = float("inf") if options.inputs else options.seconds / len(names)
            outcome = fuzz(
                TARGETS[name], seed=options.seed, inputs=options.inputs, seconds=seconds, tell=_tell
            )
        _report(name, outcome)
        found += len(outcome.findings)
    return 1 if found else 0


def _tell(finding: object) -> None:
    print(finding, flush=True)


def _report(name: str, outcome: Outcome) -> None:
    accepted = outcome.accepted / max(outcome.inputs, 1)
    print(
        f"{name:16} {outcome.inputs:9,} inputs in {outcome.seconds:6.1f} s, {accepted:4.0%} accepted, "
        f"{len(outcome.findings)} kinds of findings",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
