"""What the workers of a soak serve. The clients use the same code locally, to know the right results."""

from __future__ import annotations

import ctypes
import gc
import threading
import time
import weakref
from collections import Counter
from typing import Any

import torch
from tests.soak import cuts

import gradwire as gw
import gradwire_server as gws

WIDTH = 6
LOST_AFTER = 30.0

weight = torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64).requires_grad_()

cuts.obey()  # the daemon loads this in its main thread

_lock = threading.Lock()
_counted: Counter[int] = Counter()
_lingering = 0
_alive: weakref.WeakSet[object] = weakref.WeakSet()


@gws.expose
def count(token: int) -> int:
    """How often it was called with this token."""
    with _lock:
        _counted[token] += 1
        return _counted[token]


@gws.expose
def counted() -> dict[int, int]:
    return dict(_counted)


@gws.expose
def faults() -> dict[str, int]:
    """What happened to the sockets of this process."""
    return dict(cuts.happened)


@gws.expose
def echo(x: Any) -> Any:
    return x


@gws.expose
def mix(x: torch.Tensor, factor: float) -> torch.Tensor:
    """A polynomial: of whole numbers, its gradients are exact in whatever order they are added up."""
    return x * (x + factor)


@gws.expose
def weighted(x: torch.Tensor) -> torch.Tensor:
    return (x * weight).cos()


@gws.expose
def weight_gradient() -> torch.Tensor | None:
    """That of the caller's context."""
    return gw.current_context().gradients().get(weight)


@gws.expose
def chain(x: torch.Tensor, factors: list[float], addresses: list[str]) -> torch.Tensor:
    """Mixes here and on each of the other workers, one calling the next."""
    mixed = mix(x, factors[0])
    if addresses:
        next_worker = gw.connect(addresses[0], connect_timeout=LOST_AFTER, lost_after=LOST_AFTER)
        mixed = next_worker.call("chain", mixed, factors[1:], addresses[1:]) + mixed
    return mixed


def chain_locally(x: torch.Tensor, factors: list[float]) -> torch.Tensor:
    mixed = mix(x, factors[0])
    return chain_locally(mixed, factors[1:]) + mixed if factors[1:] else mixed


@gws.expose
def linger(token: int, addresses: list[str]) -> bool:
    """Takes until it is cancelled, here or on the last of some workers. Whether it was."""
    if addresses:
        next_worker = gw.connect(addresses[0], connect_timeout=LOST_AFTER, lost_after=LOST_AFTER)
        return bool(next_worker.call("linger", token, addresses[1:]))
    global _lingering
    count(token)
    with _lock:
        _lingering += 1
    try:
        end = time.monotonic() + 60
        while not gw.cancelled() and time.monotonic() < end:
            time.sleep(0.005)
        return gw.cancelled()
    finally:
        with _lock:
            _lingering -= 1


@gws.expose
def fail(token: int, message: str) -> None:
    count(token)
    raise ValueError(message)


class _FailingBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, message: str) -> torch.Tensor:
        ctx.message = message
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        raise ValueError(ctx.message)


@gws.expose
def fail_in_backward(x: torch.Tensor, message: str) -> torch.Tensor:
    result: torch.Tensor = _FailingBackward.apply(x, message)
    return result


@gws.expose
class Layer(torch.nn.Module):
    """The same for the same seed, wherever it is made."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        scale = WIDTH**-0.5
        self.weight = torch.nn.Parameter(
            scale * torch.randn(WIDTH, WIDTH, dtype=torch.float64, generator=generator)
        )
        self.bias = torch.nn.Parameter(scale * torch.randn(WIDTH, dtype=torch.float64, generator=generator))
        _alive.add(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(torch.nn.functional.linear(x, self.weight, self.bias))


@gws.expose
class Adder:
    """Something with a state that shows whether a call was lost, or counted twice."""

    def __init__(self) -> None:
        self._total = 0
        self._lock = threading.Lock()
        _alive.add(self)

    def add(self, number: int) -> int:
        with self._lock:
            self._total += number
            return self._total


@gws.expose
def census() -> dict[str, int]:
    """What is there in this process, after what is garbage has gone."""
    gc.collect()
    # Else memory that was freed counts as resident for as long as malloc likes.
    ctypes.CDLL(None).malloc_trim(0)
    kinds = Counter(type(one).__name__ for one in list(_alive))
    optimizers = sum(type(one).__name__ == "WorkerOptimizer" for one in gc.get_objects())
    return {
        "layers": kinds["Layer"],
        "adders": kinds["Adder"],
        "optimizers": optimizers,
        "lingering calls": _lingering,
        "threads": len(threading.enumerate()),
    }
