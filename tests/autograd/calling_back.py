"""What the worker of `test_callbacks.py` serves: functions that call back whoever called them."""

from __future__ import annotations

import threading
from typing import Any

import torch

import gradwire as gw
import gradwire_server as gws

torch.set_num_threads(1)
weight = torch.tensor([1.5, -2.0, 0.5], dtype=torch.float64, requires_grad=True)
handles: list[Any] = []


@gws.expose
def double(x: Any) -> Any:
    return 2 * x


@gws.expose
def send_request(function: str, *args: Any) -> Any:
    """Calls its caller, and returns what that said."""
    return gw.caller().call(function, *args)


@gws.expose
def between(x: torch.Tensor, function: str, times: int = 1) -> torch.Tensor:
    """Computes, has its caller compute, and computes again."""
    for _ in range(times):
        x = gw.caller().call(function, torch.sin(x) * weight) + x
    return x * weight


@gws.expose
def rally(x: torch.Tensor, strokes: int) -> torch.Tensor:
    """Whoever is called calls the other back, until the strokes are used up."""
    if strokes == 0:
        return x * weight
    return torch.tanh(gw.caller().rally(x * weight, strokes - 1))


@gws.expose
def create_there(class_name: str) -> None:
    """Has its caller make a module, and keeps the handle."""
    handles.append(gw.caller().create(class_name))


@gws.expose
def call_it(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(handles[-1](x)) * weight


@gws.expose
def drop_it() -> None:
    handles.clear()


@gws.expose
def gradient() -> torch.Tensor | None:
    return gw.current_context().gradients().get(weight)


@gws.expose
def forget_gradient() -> None:
    gw.current_context().zero_grad()


@gws.expose
def train_for_itself(address: str, function: str, x: torch.Tensor) -> torch.Tensor:
    """As a trainer of its own, who has nothing to do with whoever called."""
    gradients = []

    def train() -> None:
        leaf = x.detach().requires_grad_()
        with gw.connect(address) as worker:
            worker.call(function, leaf).sum().backward()
            assert leaf.grad is not None
            gradients.append((leaf.grad, worker.call("gradient_in_context")))

    thread = threading.Thread(target=train)  # the surroundings of a call do not follow to a thread
    thread.start()
    thread.join(60)
    return gradients[0]
