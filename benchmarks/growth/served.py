"""What the measured workers serve."""

from __future__ import annotations

import torch

import gradwire as gw
import gradwire_server as gws
from benchmarks import functions

gws.expose(functions.echo)

weight = torch.ones(16, requires_grad=True)
state: dict[str, torch.Tensor] = {}


@gws.expose
def scale(x: torch.Tensor) -> torch.Tensor:
    """A little work with a parameter."""
    return torch.tanh(x * weight)


@gws.expose
def scale_each(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The same for many tensors in one call."""
    return [x * weight for x in tensors]


@gws.expose
def nest(x: torch.Tensor, depth: int, here: str, there: str) -> torch.Tensor:
    """Calls to and fro between two workers, so deep."""
    y = torch.tanh(x * weight)
    if depth > 1:
        y = y + gw.connect(there).nest(y, depth - 1, there, here)
    return y


@gws.expose
def recur(x: torch.Tensor) -> torch.Tensor:
    """A step of a recurrent network whose state stays here, with its graph."""
    before = state.get("")
    state[""] = torch.tanh(x * weight if before is None else x * weight + before)
    return state[""] * 0.5


@gws.expose
def forget() -> None:
    """Starts over."""
    state.clear()
