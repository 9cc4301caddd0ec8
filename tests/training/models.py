"""What the workers of these tests serve. Daemons load it by its name, tests import it as the oracle."""

from __future__ import annotations

import dataclasses
import functools
import threading
from typing import Any

import numpy
import torch
from torch import nn

import gradwire as gw
import gradwire_server as gws


@gws.expose
class Layer(nn.Module):
    """A linear layer with tanh, in double precision, the same for the same seed."""

    def __init__(self, width: int = 4, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = nn.Parameter(torch.randn(width, width, generator=generator, dtype=torch.float64) / 2)
        self.bias = nn.Parameter(torch.randn(width, generator=generator, dtype=torch.float64) / 2)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        return torch.tanh(x @ self.weight + self.bias) * scale

    def penalty(self, power: int = 2) -> torch.Tensor:
        return self.weight.abs().pow(power).sum()

    def itself(self) -> Layer:
        return self

    @staticmethod
    def plus_one(x: int) -> int:
        return x + 1

    @classmethod
    def what(cls) -> str:
        return cls.__name__


@gws.expose
class Counting(nn.Module):
    """One parameter whose gradient is what it is called with: its sum counts all steps exactly."""

    def __init__(self) -> None:
        super().__init__()
        self.total = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.total * x).sum()


class Stop:
    """A place where a thread of the worker stops, once a test has set it up, until the test lets it go on."""

    def __init__(self) -> None:
        self.reached, self._go_on = threading.Event(), threading.Event()
        self._is_set_up = False

    def __enter__(self) -> Stop:
        self.reached.clear()
        self._go_on.clear()
        self._is_set_up = True
        return self

    def __exit__(self, *_: object) -> None:
        self.go_on()

    def go_on(self) -> None:
        self._is_set_up = False
        self._go_on.set()

    def here(self) -> None:
        if self._is_set_up:
            self._is_set_up = False
            self.reached.set()
            assert self._go_on.wait(60)


in_a_step, in_a_forward, in_a_backward = Stop(), Stop(), Stop()


class _Stopping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        in_a_backward.here()
        return gradient


@gws.expose
class Stops(nn.Module):
    """Multiplies and adds; can be stopped before that, and in its backward before the multiplication."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.bias = nn.Parameter(torch.zeros(4, dtype=torch.float64))
        self.state = torch.zeros(4, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        in_a_forward.here()
        stopping: torch.Tensor = _Stopping.apply(x * self.weight)  # type: ignore[no-untyped-call]
        return stopping + self.bias

    def weights(self) -> dict[str, torch.Tensor]:
        return {"weight": self.weight, "bias": self.bias.detach()}

    def through(self, x: torch.Tensor, other: Any) -> torch.Tensor:
        """Calls a module elsewhere. Its backward computes with no parameter, but there is one in it."""
        result: torch.Tensor = other(x + self.bias)
        return result

    def recur(self, x: torch.Tensor) -> torch.Tensor:
        self.state = (self.state + x) * self.weight
        return self.state


weight = nn.Parameter(torch.zeros(3, dtype=torch.float64))
"""What the functions below train."""
optimizer = torch.optim.SGD([weight], lr=1.0)


@gws.expose
def weigh(x: torch.Tensor) -> torch.Tensor:
    """Its gradient for the weight is x."""
    return (weight * x).sum()


@gws.expose
def fit(x: torch.Tensor) -> float:
    """Trains by itself, as in one process."""
    optimizer.zero_grad()
    loss = (weight * x).sum()
    loss.backward()
    optimizer.step()
    return loss.item()


@gws.expose
def step_from_context() -> None:
    gw.current_context().step(optimizer)


@gws.expose
def step_by_hand(forget: bool) -> None:
    context = gw.current_context()
    with torch.no_grad():
        for parameter, gradient in context.gradients().items():
            parameter -= gradient
    if forget:
        context.zero_grad()


@gws.expose
def gradient_of_weight() -> torch.Tensor | None:
    return gw.current_context().gradients().get(weight)


@gws.expose
def weight_now(start_at: float | None = None) -> torch.Tensor:
    """What the weight is, or is from now on."""
    with torch.no_grad():
        if start_at is not None:
            weight.fill_(start_at)
            weight.grad = None
    return weight.detach().clone()


@gws.expose
class InTwoHalves(torch.optim.SGD):
    """Changes the first half of each parameter and then, when it may go on, the second."""

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for half in (slice(None, 2), slice(2, None)):
                for group in self.param_groups:
                    for parameter in group["params"]:
                        if parameter.grad is not None:
                            parameter[half] -= group["lr"] * parameter.grad[half]
                in_a_step.here()


class _Uniform(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        assert weight.min() == weight.max(), "a forward met half a step"
        ctx.save_for_backward(weight)
        return weight.sum() * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        (weight,) = ctx.saved_tensors
        for _ in range(2):
            assert weight.min() == weight.max(), "a backward met half a step"
        return torch.full_like(weight, float(gradient)), None


@gws.expose
class Uniform(nn.Module):
    """All its numbers are the same, in forward and in backward, unless they meet half a step."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Uniform.apply(self.weight, x)  # type: ignore[no-untyped-call]
        return result


stepped_in_order: list[float] = []


@gws.expose
class InOrder(torch.optim.SGD):
    """Notes down which learning rates it stepped with."""

    def step(self, closure: Any = None) -> None:
        stepped_in_order.append(self.param_groups[0]["lr"])
        super().step(closure)


@gws.expose
class Blocks(nn.Module):
    """Modules in modules, with buffers, dropout and a shared parameter."""

    def __init__(self, width: int = 4, dropout: float = 0.5) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        self.stack = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))
        self.tied = nn.Linear(width, width)
        self.tied.weight = self.stack[0].weight
        self.dropout = nn.Dropout(dropout)
        self.hooked = 0
        self.register_forward_hook(self._count)

    def _count(self, *_: object) -> None:
        self.hooked += 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.tied(self.stack(self.norm(x))))

    def hook_calls(self) -> int:
        return self.hooked

    def is_training(self) -> bool:
        return self.training and self.norm.training


@gws.expose
class Branching(nn.Module):
    """Returns tuples and dicts, takes keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(3, 2).double()
        self.right = nn.Linear(3, 2).double()

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, dict[str, Any]]:
        right = self.right(x)
        return self.left(x), {"right": right if mask is None else right * mask, "count": len(x)}


@gws.expose
class Table(nn.Module):
    """Rows to look up, with sparse gradients."""

    def __init__(self, rows: int = 6, width: int = 3) -> None:
        super().__init__()
        self.rows = nn.Embedding(rows, width, sparse=True, dtype=torch.float64)
        with torch.no_grad():
            self.rows.weight.copy_(torch.arange(rows * width, dtype=torch.float64).reshape(rows, width))

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.rows(index)
        return result


@gws.expose
class Nothing(nn.Module):
    """Has no parameters."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


@gws.expose
class Mixin:
    def mixed_in(self) -> str:
        return "mixed in"

    def half(self) -> str:
        return "behind torch's own"


class Hidden:
    """Not exposed itself."""

    def hidden(self) -> str:
        return "hidden"

    def shown(self) -> str:
        return "hidden"


@gws.expose
class Mixed(nn.Linear, Mixin, Hidden):
    """Its other bases come after torch's own in the order of bases."""

    def shown(self) -> str:
        return super().shown()

    @functools.lru_cache  # noqa: B019
    def wrapped(self) -> str:
        return "wrapped"


@gws.expose
class Notebook:
    """An object that is no module."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def write(self, line: str) -> int:
        self.lines.append(line)
        return len(self.lines)

    def read(self) -> list[str]:
        return self.lines


@gws.expose
@dataclasses.dataclass
class Setting:
    name: str
    value: int


@gws.expose(name="Adam")
class Backwards(torch.optim.SGD):
    """A user's own optimizer, unluckily called like one of torch's: it goes uphill."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["lr"] = -abs(group["lr"])
        super().step(closure)


@gws.expose
class Uphill(torch.optim.SGD):
    """A user's own optimizer."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["lr"] = -abs(group["lr"])
        super().step(closure)


@gws.expose
def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


@gws.expose
def make_setting() -> Setting:
    return Setting("width", 3)


@gws.expose
def is_layer(value: object) -> bool:
    return isinstance(value, Layer)


@gws.expose
def kind_of(value: object) -> str:
    return type(value).__name__


@gws.expose
def call_it(value: Any, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = value(x) * 3
    return result


@gws.expose
def echo(value: object) -> object:
    return value


@gws.expose
def numbers(count: int) -> Any:
    return numpy.arange(count)


@gws.expose
def layer_with(more: object = None, size: int = 0) -> object:
    return [Layer(), Layer(), more, bytes(size)]


@gws.expose
def nothing() -> None:
    return None


shared = gws.expose(Layer(4, seed=7), name="shared")

plain = {"a": 1}
