"""What the workers of the integration tests serve."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from typing import NoReturn

import torch

import gradwire as gw
import gradwire_server as gws

torch.set_num_threads(1)

_events: dict[str, threading.Event] = {}
_counts: dict[str, int] = {}
_lock = threading.Lock()


def _event(name: str) -> threading.Event:
    with _lock:
        return _events.setdefault(name, threading.Event())


@gws.expose
def double(x):
    """Twice as much."""
    return 2 * x


@gws.expose
def echo(*args, **kwargs):
    return args, kwargs


@gws.expose
def total(x: torch.Tensor) -> float:
    return float(x.sum())


@gws.expose
def same(x: torch.Tensor) -> torch.Tensor:
    return x


@gws.expose
def zeros(count: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.uint8)


@gws.expose
def add(x: int, y: int = 1, *, scale: int = 1) -> int:
    """Adds, then scales."""
    return (x + y) * scale


@gws.expose
async def add_async(x: int, y: int) -> int:
    await asyncio.sleep(0)
    return x + y


@gws.expose
def fail(kind: str = "ValueError", message: str = "it failed") -> NoReturn:
    kinds = {
        type_.__name__: type_
        for type_ in (ValueError, KeyError, ZeroDivisionError, SystemExit, KeyboardInterrupt, OSError, Own)
    }
    raise kinds[kind](message)


class Own(LookupError):
    """A type that only the worker knows."""


@gws.expose
def own_timeout(timeout: float = 0.0, *, name: str = "", stale: str = "", self: int = 0) -> tuple:
    """A function whose parameters have names that gradwire uses, too."""
    return timeout, name, stale, self


@gws.expose
class Named:
    """A class whose parameters have names that gradwire uses, too."""

    def __init__(self, *, name: str = "", stale: str = "", timeout: float = 0.0) -> None:
        self._given = name, stale, timeout

    def given(self) -> tuple:
        return self._given

    def wait(self, *, timeout: float) -> float:
        return timeout


@gws.expose
class Plain(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


@gws.expose
class WithRemote(torch.nn.Module):
    def remote(self, x: int) -> int:
        return x


@gws.expose
def fail_with_cause() -> NoReturn:
    try:
        raise KeyError("the cause")
    except KeyError as error:
        failure = ValueError("the effect")
        failure.add_note("a note from afar")
        raise failure from error


@gws.expose
def call_on(target: str, function: str, *args):
    """Calls a function of another worker."""
    return gw.connect(target).call(function, *args)


@gws.expose
def call_nowhere():
    gw.connect("127.0.0.1:1", connect_timeout=0.2)


@gws.expose
def use_closed(target: str) -> None:
    with gw.connect(target) as worker:
        pass
    worker.process()


@gws.expose
def unencodable() -> object:
    return {"here": [object()]}


@gws.expose
def hop(count: int, there: str, here: str) -> int:
    """Goes back and forth between two workers."""
    return 0 if count == 0 else 1 + gw.connect(there).call("hop", count - 1, here, there)


@gws.expose
def wait_for_cancel(name: str) -> bool:
    """Signals that it runs, then waits until it is cancelled."""
    _event(f"{name} runs").set()
    give_up_at = time.monotonic() + 30
    while not gw.cancelled() and time.monotonic() < give_up_at:
        time.sleep(0.002)
    if gw.cancelled():
        _event(f"{name} was cancelled").set()
    return gw.cancelled()


@gws.expose
def wait_for_cancel_further_on(target: str, name: str):
    """Has another worker wait, and tells whether that was cancelled."""
    try:
        return gw.connect(target).call("wait_for_cancel", name)
    finally:
        _event(f"{name} was left").set()


@gws.expose
def happened(name: str, seconds: float = 20.0) -> bool:
    """Whether something was signalled in time."""
    return _event(name).wait(seconds)


@gws.expose
def signal(name: str) -> None:
    _event(name).set()


@gws.expose
def count(name: str) -> int:
    """How often it was called with that name."""
    with _lock:
        _counts[name] = _counts.get(name, 0) + 1
        return _counts[name]


@gws.expose
def deadline() -> float | None:
    return gw.deadline()


@gws.expose
def call_back(function: str, *args):
    """Calls its caller."""
    return gw.caller().call(function, *args)


@gws.expose
def threads() -> list[str]:
    """Names of the worker's threads."""
    return [thread.name for thread in threading.enumerate()]


@gws.expose
def process() -> int:
    return os.getpid()


@gws.expose
def peak_memory(reset: bool = False) -> tuple[int, int]:
    """Bytes in memory now and at most, as the kernel counts them."""
    if reset:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
    with open("/proc/self/status") as file:
        lines = dict(line.split(":", 1) for line in file)
    return tuple(int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
