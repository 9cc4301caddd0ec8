"""Where the owner of a peer's objects and parameters takes part in the peer's autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch.autograd.graph import Node

from gradwire.autograd.borrowed_grad import borrowed_grad
from gradwire.wire.ids import AutogradMessageId

__all__ = ["EngineHooks"]

_NOTHING = nullcontext()


def _ignore_released(ids: Sequence[AutogradMessageId]) -> None:
    pass


def _ignore_owner(owner: int) -> None:
    pass


def _no_guard(leaves: Sequence[Node]) -> AbstractContextManager[object]:
    return _NOTHING


@dataclass(frozen=True)
class EngineHooks:
    """What a worker does on events of a peer's autograd; `DistEngine.attach` takes them.

    The defaults are for a peer that stores no objects and on which nothing else changes parameters.
    """

    when_released: Callable[[Sequence[AutogradMessageId]], None] = _ignore_released
    """Called with the ids that another peer released. A ref is released in the same way as an autograd
    message, so there may be refs among them."""
    when_owner_dropped: Callable[[int], None] = _ignore_owner
    """Called with the id of a client that is gone, after its contexts were dropped."""
    guard_backward: Callable[[Sequence[Node]], AbstractContextManager[object]] = _no_guard
    """Entered around a backward that reaches these leaves: keeps optimizer steps from changing the leaves
    meanwhile."""
    guard_step: Callable[[Sequence[torch.Tensor]], AbstractContextManager[object]] = borrowed_grad
    """Entered around a step that finds its gradients in `.grad` of these leaves: other steps wait."""
