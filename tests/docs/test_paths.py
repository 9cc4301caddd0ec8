"""The functions on the page's paths of a call and of a backward are those that really run, in that order."""

from __future__ import annotations

import inspect
import re
import sys
import threading
from collections.abc import Iterator
from types import CodeType, FrameType

import pytest
import torch
from tests.docs.naming import ROOT, resolve, spans

import gradwire as gw
import gradwire_server as gws
from gradwire.transport import Session

PAGE = (ROOT / "docs" / "architecture.md").read_text()
SOMETIMES = {
    *(
        "GrpcLink.connect",
        "Registry.method",
        "GraphSegments.dependencies_of_results",
        "GraphSegments.reached_by",
    ),
    *("gradients.decode_gradients", "serving._encode_contributions", "serving._suspended"),
    *("Gathering.add", "hooks.run_waiting_hooks", "ParameterAccess.read", "Scope.cancel_with_caller"),
    "GrpcStream.__next__",
}
"""What a plain call and its backward do not need, or need earlier for another reason."""
SECONDS = 60.0


class Trace:
    """The code that runs, on the main thread, which calls, and on others, which serve."""

    def __init__(self) -> None:
        self.ran: dict[str, list[CodeType]] = {"C": [], "W": []}
        self.caller_waits = threading.Event()

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            is_caller = threading.current_thread() is threading.main_thread()
            self.ran["C" if is_caller else "W"].append(frame.f_code)
            if frame.f_code is Session.read_for.__code__:
                self.caller_waits.set()

    def restart(self) -> None:
        self.ran = {"C": [], "W": []}
        self.caller_waits.clear()


@pytest.fixture
def trace() -> Iterator[Trace]:
    trace = Trace()
    threading.setprofile(trace)
    sys.setprofile(trace)
    yield trace
    sys.setprofile(None)
    threading.setprofile(None)


def documented(heading: str, end: str) -> dict[str, CodeType]:
    """The functions that the steps of one end name, in the order of the page."""
    section = PAGE.split(f"\n## {heading}\n", 1)[1].split("\n## ", 1)[0]
    steps = re.findall(rf"^\d+\. {end} (.*?)(?=^\d+\. |^\S|\Z)", section, flags=re.DOTALL | re.MULTILINE)
    found = ((span, resolve(span)) for span in spans("".join(steps)) if "." in span and span not in SOMETIMES)
    return {span: value.__code__ for span, value in found if inspect.isfunction(value)}


def check(heading: str, ran: dict[str, list[CodeType]]) -> None:
    for end, codes in ran.items():
        named = documented(heading, end)
        assert len(named) > 5
        assert not [name for name, code in named.items() if code not in [*ran["C"], *ran["W"]]]
        # A response may be read by another thread of the caller than the one that waits for it.
        first = {name: codes.index(code) for name, code in named.items() if code in codes}
        assert sorted(first, key=first.__getitem__) == list(first)


def test_a_call_and_its_backward_take_the_paths_of_the_page(trace: Trace) -> None:
    weight = torch.ones(3, requires_grad=True)

    def scale(x: torch.Tensor) -> torch.Tensor:
        assert trace.caller_waits.wait(SECONDS)
        return x * weight

    with gws.Worker(scale, bind="127.0.0.1:0") as server, gw.connect(server.address) as worker:
        x = torch.ones(3, requires_grad=True)
        for _ in range(2):  # the first ones make what later ones find
            worker.scale(x).sum().backward()
        trace.restart()
        result = worker.scale(x)
        called = trace.ran
        trace.restart()
        result.sum().backward()
        propagated = trace.ran
    assert x.grad is not None
    assert x.grad.tolist() == [3.0, 3.0, 3.0]
    check("The path of one call", called)
    check("The path of one backward", propagated)
