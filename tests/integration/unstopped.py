"""A program with a worker, or with a client, that it never stops: it ends in the way that it is told to.

Run by `test_exits.py` with an interpreter of its own, because it is about how an interpreter ends.
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import torch
from tests.faults.carriers import SETTINGS

import gradwire as gw
import gradwire_server as gws

torch.set_num_threads(1)


def double(x: Any) -> Any:
    return 2 * x


def sleep() -> None:
    time.sleep(3600)


def wait_until_cancelled() -> None:
    while not gw.cancelled():
        time.sleep(0.01)


def compute() -> None:
    """Never asks whether it is still wanted, and is within torch most of the time."""
    x = torch.eye(64)
    while True:
        x = x @ x


def backward_that_computes(x: torch.Tensor) -> torch.Tensor:
    y = 2 * x
    y.register_hook(lambda _: compute())
    return y


class Named(torch.nn.Linear):
    pass


def end(how: str) -> None:
    """Ends the main thread."""
    if how == "exception":
        raise ValueError("nobody catches this")
    if how == "sys.exit":
        sys.exit(3)
    if how == "interrupt":
        threading.Event().wait()  # for the signal


def serve(how: str, state_dir: str | None) -> None:
    worker = gws.Worker(double, sleep, compute, backward_that_computes, Named, state_dir=state_dir)
    worker.start()
    print(worker.address, flush=True)
    sys.stdin.readline()
    end(how)


futures: list[gw.CallFuture] = []
"""Alive when the interpreter ends."""
results: list[torch.Tensor] = []


def call(how: str, address: str) -> None:
    for settings in SETTINGS.values():
        worker = gw.connect(address, **settings)
        x = torch.ones(3, requires_grad=True)
        futures.append(worker.call_async("double", x))  # done, and never looked at
        futures[-1].exception(60)
        results.append(worker.double(x))
        futures.append(worker.call_async("wait_until_cancelled"))
        futures[-1].add_done_callback(lambda _: None)
    print("called", flush=True)
    sys.stdin.readline()
    end(how)


if __name__ == "__main__":
    role, how, *rest = sys.argv[1:]
    if role == "serve":
        serve(how, rest[0] if rest else None)
    else:
        call(how, rest[0])
