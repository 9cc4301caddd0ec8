"""What runs in the process of each peer, in the peer's own environment: it needs torch and the peer alone.

It speaks over stdin and stdout, a line for a line: first it says which cases it has, then it answers ``check
CASE`` with ``right``, and ``time CASE COUNT`` with seconds per operation. It ends with its stdin.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from benchmarks.checking import check_alike
from benchmarks.functions import FUNCTIONS
from benchmarks.operations import Operation

__all__ = ["Call", "run"]

Call = Callable[[str, Tensor], Tensor]
"""Calls a function of `functions.py` in the peer's other process, and waits for the result."""

LARGE = 1 << 18
"""Elements of a tensor of 1 MB."""


def operations(call: Call, *, has_backward: bool) -> dict[str, Operation]:
    """The cases."""

    def echo(elements: int) -> Operation:
        x = torch.arange(float(elements))
        return lambda: [call("echo", x)]

    def backward() -> list[Tensor]:
        x = torch.arange(16.0).div(16).requires_grad_()
        y = call("scale", x)
        y.sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is not None
        return [y, x.grad]

    made: dict[str, Operation] = {"small call": echo(16), "echo of 1 MB": echo(LARGE)}
    if has_backward:
        made["forward + backward"] = backward
    return made


def run(connected: Callable[[], AbstractContextManager[Call]], *, has_backward: bool = False) -> None:
    """Does what it is told, for as long as somebody tells."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print is no answer
    torch.set_num_threads(1)
    expected = operations(lambda function, x: FUNCTIONS[function](x), has_backward=has_backward)  # type: ignore[arg-type, return-value]
    with connected() as call:
        made = operations(call, has_backward=has_backward)
        print("|".join(made), file=answers)
        for line in sys.stdin:
            command, _, rest = line.rstrip("\n").partition(" ")
            if command == "check":
                check_alike(made[rest], expected[rest], times=2)
                print("right", file=answers)
            else:
                case, _, count = rest.rpartition(" ")
                print(_seconds(made[case], int(count)), file=answers)


def _seconds(operation: Operation, count: int) -> float:
    begun = time.perf_counter()
    for _ in range(count):
        operation()
    return (time.perf_counter() - begun) / count
