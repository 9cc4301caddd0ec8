"""A target with faults, to see that they are found: its inputs say which. Prints what was found as JSON."""

from __future__ import annotations

import json
import os
import threading
from typing import ClassVar

from tests.fuzz import running
from tests.fuzz.inputs import Input
from tests.fuzz.target import Target

from gradwire.errors import MalformedMessage

FAULTS = (
    *("none", "refuse", "raise", "raise", "abort", "none", "exit", "none", "hang"),
    *("none", "compute", "take", "keep"),
)
"""After each that ends the process one that does nothing: the first input of a process is not measured."""


class Planted(Target):
    name = "planted"
    kept: ClassVar[list[bytes]] = []

    def corpus(self) -> dict[str, Input]:
        return {}

    def run(self, parts: Input) -> object:
        match parts[0]:
            case b"refuse":
                raise MalformedMessage("as it should")
            case b"raise":
                raise KeyError("as it should not")
            case b"abort":
                os.abort()
            case b"exit":
                os._exit(7)
            case b"hang":
                threading.Event().wait()
            case b"compute":
                return sum(range(30_000_000))
            case b"take":
                return len(b"x" * (300 << 20))
            case b"keep":
                self.kept.append(b"x" * (120 << 20))
        return None


def main() -> None:
    running.HANGS_AFTER = 10.0
    running.CPU_SECONDS = 0.1
    running.load_corpus = lambda target: [(fault.encode(),) for fault in FAULTS]
    outcome = running.fuzz(Planted, inputs=len(FAULTS), tell=lambda finding: None)
    found = {finding.what: finding.path is not None for finding in outcome.findings}
    print(json.dumps({"found": found, "inputs": outcome.inputs, "accepted": outcome.accepted}))
