"""Ctrl-C at a chosen place of a function."""

from __future__ import annotations

import dis
import itertools
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any


def interrupted_at(number: int, code: CodeType, work: Callable[[], object]) -> bool:
    """Interrupts some work within a function at the n-th place where Python would. Returns whether there is
    such a place: interrupts take effect when a function begins, after a call and before a loop's next
    round."""
    places = itertools.count()
    names = {instruction.offset: instruction.opname for instruction in dis.get_instructions(code)}
    previous = ""

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal previous
        if event == "opcode":
            previous, before = names[frame.f_lasti], previous
            if before in ("RESUME", "CALL", "JUMP_BACKWARD") and next(places) == number:
                sys.settrace(None)
                raise KeyboardInterrupt
        return trace

    def trace_calls(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code is not code:
            return None
        frame.f_trace_opcodes = True
        return trace

    outer = sys.gettrace()
    sys.settrace(trace_calls)
    try:
        work()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(outer)
    return False
