"""The work of the far side, in plain PyTorch: the same for every contender."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

WIDTH = 256
"""Features per token of the transformer."""
HEADS = 4
MLP_WIDTH = 32
TOUCHED_BYTES = 64 << 20


def echo(x: Tensor) -> Tensor:
    """Returns its argument."""
    return x


def scale(x: Tensor) -> Tensor:
    """A little work with a gradient."""
    return torch.tanh(x * 0.5)


def double(x: Tensor) -> Tensor:
    """Elementwise and cheap, so that moving a large tensor is most of what a call costs."""
    return x * 2.0


def double_each(xs: list[Tensor]) -> list[Tensor]:
    """The same for many tensors at once."""
    return [double(x) for x in xs]


def consume(x: Tensor) -> float:
    """Takes a large tensor and answers with a number."""
    return float(x[0]) + float(x[-1])


def spin(seconds: float) -> float:
    """Has a thread compute in pure Python for so long, as a worker's own code may, and waits for it."""

    def work() -> None:
        end_at = time.monotonic() + seconds
        while time.monotonic() < end_at:
            sum(range(1000))

    thread = threading.Thread(target=work, name="busy")
    thread.start()
    thread.join()
    return seconds


@cache
def _touched() -> Tensor:
    return torch.zeros(TOUCHED_BYTES // 4)


def touch() -> float:
    """Writes to more memory than the processor's caches hold."""
    return float(_touched().fill_(1.0)[-1])


class Mlp(nn.Module):
    """A small model; its seed makes the parameters the same everywhere."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.Sequential(
            nn.Linear(MLP_WIDTH, MLP_WIDTH), nn.Tanh(), nn.Linear(MLP_WIDTH, MLP_WIDTH), nn.Tanh()
        )

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class TransformerLayers(nn.Module):
    """Some layers of a transformer, without dropout so that every contender computes the same."""

    def __init__(self, seed: int, layers: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, HEADS, 4 * WIDTH, dropout=0.0, batch_first=True)
            for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


FUNCTIONS: dict[str, Callable[..., object]] = {
    f.__name__: f for f in (echo, scale, double, double_each, consume, spin, touch)
}

MODULES: dict[str, type[nn.Module]] = {m.__name__: m for m in (Mlp, TransformerLayers)}
