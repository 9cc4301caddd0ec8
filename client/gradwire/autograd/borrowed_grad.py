"""Borrows `.grad` of leaves. A leaf has a single `.grad` for all contexts, so users take turns."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from gradwire.runtime.scope import waiting

__all__ = ["borrowed_grad"]


class _GradLock:
    """The lock of one leaf's `.grad`. Reentrant: a hook that runs with a gradient there may step an
    optimizer."""

    __slots__ = ("lock", "number")

    def __init__(self, number: int) -> None:
        self.lock = threading.RLock()
        self.number = number


_locks = WeakTensorKeyDictionary()
_locks_lock = threading.Lock()
_numbers = itertools.count()


def _lock_of(leaf: torch.Tensor) -> _GradLock:
    with _locks_lock:
        lock: _GradLock | None = _locks.get(leaf)  # type: ignore[no-untyped-call]
        if lock is None:
            lock = _locks[leaf] = _GradLock(next(_numbers))
        return lock


@contextmanager
def borrowed_grad(leaves: Iterable[torch.Tensor]) -> Iterator[None]:
    """For optimizers and hooks that look for a context's gradients in `.grad`.

    Within the block `.grad` is the borrower's, and None at first. At the end it is again what it was before.
    """
    leaves = list(leaves)
    # All threads take the locks in the same order, so that none waits for another in a circle.
    locks = sorted({_lock_of(leaf) for leaf in leaves}, key=lambda lock: lock.number)
    with ExitStack() as borrowed:
        for one in locks:
            if not one.lock.acquire(blocking=False):
                waiting(one.lock.acquire)  # steps of others go on meanwhile
            borrowed.callback(one.lock.release)
        for leaf in leaves:
            borrowed.callback(_put_back, leaf, leaf.grad)
            leaf.grad = None
        yield


def _put_back(leaf: torch.Tensor, gradient: torch.Tensor | None) -> None:
    leaf.grad = gradient
