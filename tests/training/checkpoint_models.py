"""What the workers of the checkpoint tests serve."""

from __future__ import annotations

from typing import Any

import torch

import gradwire_server as gws

torch.manual_seed(0)


@gws.expose
class Layer(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(width, width, dtype=torch.float64)
        self.norm = torch.nn.BatchNorm1d(width, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(self.linear(x)))


@gws.expose
class Tied(torch.nn.Module):
    """Two names for one parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = torch.nn.Linear(width, width, bias=False)
        self.second = torch.nn.Linear(width, width, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))

    def is_tied(self) -> bool:
        return self.first.weight is self.second.weight


@gws.expose
class Around(torch.nn.Module):
    """A module made of another one, and of a tensor too large to travel inside a message."""

    def __init__(self, inner: torch.nn.Module, scale: torch.Tensor) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("scale", scale.clone(), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.scale.sum()


@gws.expose
class Tally:
    """No module, but it has a state."""

    def __init__(self, start: int) -> None:
        self.count = start

    def add(self, number: int) -> int:
        self.count += number
        return self.count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


@gws.expose
class Plain:
    """Neither."""

    def __init__(self, word: str) -> None:
        self.word = word
        self.times = 0

    def say(self) -> str:
        self.times += 1
        return f"{self.word} {self.times}"


shared = gws.expose(Layer(3), name="shared")
