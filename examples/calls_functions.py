"""What the workers of calls.py serve: ``gradwire-server serve calls_functions``."""

from __future__ import annotations

import os
import socket
import time

import torch

import gradwire as gw
import gradwire_server as gws


def _here() -> str:
    # The host belongs to it: in containers every worker may be process 1.
    return f"{socket.gethostname()}:{os.getpid()}"


@gws.expose
def hello(who: str) -> str:
    """Greets, and says in which process."""
    return f"hello {who}, this is {_here()}"


@gws.expose
def standardize(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Shifts and scales each column to mean 0 and deviation 1; returns all three."""
    mean, deviation = x.mean(dim=0), x.std(dim=0)
    return {"mean": mean, "deviation": deviation, "result": (x - mean) / deviation}


@gws.expose
def bounce(hops: int, here: str, there: str) -> list[str]:
    """Asks the worker at `there` to go on, which asks the one at `here`; returns where each hop ran."""
    if hops == 1:
        return [_here()]
    return [_here(), *gw.connect(there).bounce(hops - 1, there, here)]


@gws.expose
def nap(seconds: float) -> float:
    """Sleeps, as a slow function would compute."""
    time.sleep(seconds)
    return seconds


@gws.expose
def echo(x: torch.Tensor) -> torch.Tensor:
    """Sends back what came."""
    return x


@gws.expose
def mean_of(numbers: list[float]) -> float:
    """The mean; raises for an empty list."""
    if not numbers:
        raise ValueError("the mean of no numbers is not defined")
    return sum(numbers) / len(numbers)
