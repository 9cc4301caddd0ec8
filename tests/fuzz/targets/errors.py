"""Errors of other processes, which are raised here."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from pathlib import Path

from tests.fuzz.inputs import Input
from tests.fuzz.target import Target

from gradwire import errors, wire
from gradwire.proto.v1 import link_pb2
from gradwire.transport import faults

__all__ = ["Errors"]


class Errors(Target):
    name = "errors"
    kinds = (link_pb2.Error,)
    words = (
        *(f"builtins.{name}" for name in dir(__builtins__) if name.endswith(("Error", "Exit", "Group"))),
        *("builtins.StopIteration", "builtins.int", "builtins.__import__", "served.Odd", "leaving", "busy"),
        *("made a", "unknown b", "failed c"),
    )

    def corpus(self) -> dict[str, Input]:
        torn = errors.StepTorn("half a step")
        torn.made, torn.failed = ("a",), ("b",)
        refused = errors.StepRefused("busy")
        refused.reason = "busy"
        exhausted = errors.ResourceExhausted("too many", retryable=True)
        exhausted.retry_after, exhausted.not_started = 0.5, True
        unknown = errors.UnknownFunction("no f")
        unknown.suggestions = ("g", "h")
        raised = []
        failures: list[Callable[[], object]] = [
            lambda: {}["x"],
            lambda: 1 / 0,
            b"\xff".decode,
            Path("/nowhere").read_text,
        ]
        for make in failures:
            try:
                make()
            except Exception as error:
                error.add_note("a note")
                raised.append(error)
        inputs = {}
        for error in (torn, refused, exhausted, unknown, *raised):
            described = faults.describe(error, "worker")
            # Without the places of this machine.
            described.traceback = re.sub(r'File ".*/', 'File "', described.traceback)
            inputs[type(error).__name__] = (described.SerializeToString(),)
        return inputs

    def run(self, parts: Input) -> object:
        error = faults.rebuild(wire.parse(link_pb2.Error, parts[0]))
        assert isinstance(error, errors.GradwireError)
        text = str(error), repr(error), error.retryable
        traceback.format_exception(error.again())
        faults.describe(error, "other")
        return text
