"""What the workers of the demo serve: ``gradwire-server serve demo_functions``."""

from __future__ import annotations

import os
import time

import torch

import gradwire as gw
import gradwire_server as gws


@gws.expose
def hello(who: str) -> str:
    """Greets, and says in which process."""
    return f"hello {who}, this is process {os.getpid()}"


@gws.expose
def standardize(x: torch.Tensor) -> dict[str, torch.Tensor]:
    """Shifts and scales each column to mean 0 and deviation 1; returns all three."""
    mean, deviation = x.mean(dim=0), x.std(dim=0)
    return {"mean": mean, "deviation": deviation, "result": (x - mean) / deviation}


@gws.expose
def count_down(n: int, here: str, there: str) -> list[int]:
    """Counts down from n. The worker at `there` is asked to go on, and asks the one at `here` in turn.

    Each hop returns the id of its process first.
    """
    if n == 0:
        return [os.getpid()]
    return [os.getpid(), *gw.connect(there).call("count_down", n - 1, there, here)]


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
