"""What a curve is."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

import gradwire as gw

__all__ = ["Curve", "Place"]


@dataclass(frozen=True)
class Place:
    """The two workers, connected and by address."""

    worker: gw.RemoteWorker
    addresses: tuple[str, str]
    pid: int
    """Of the one that is connected."""


@dataclass(frozen=True)
class Curve:
    """One thing that gets larger."""

    name: str
    sizes: tuple[int, ...]
    prepared: Callable[[Place, int], ExitStack | None]
    """Brings about what is there before a step, until it is closed."""
    step: Callable[[Place, int], float]
    rounds: int = 9
    weighs_worker: bool = False
    """Whether what the worker needs for it, threads and memory, is of interest, too."""
