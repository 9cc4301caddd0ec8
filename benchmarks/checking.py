"""A contender with wrong results does not get to look fast."""

from __future__ import annotations

import torch
from torch import Tensor

from benchmarks.operations import Operation


def check_alike(operation: Operation, reference: Operation, times: int) -> None:
    """Does both so many times; raises an `AssertionError` if they come to something else."""
    for _ in range(times):
        outcome, expected = operation(), reference()
        assert len(outcome) == len(expected), f"{len(outcome)} results in place of {len(expected)}"
        for ours, theirs in zip(outcome, expected, strict=True):
            _check(ours, theirs)


def _check(ours: object, theirs: object) -> None:
    # Equal nearly always, and a small part of the cost of finding how far apart large tensors are.
    if not (isinstance(ours, Tensor) and isinstance(theirs, Tensor) and torch.equal(ours, theirs)):
        torch.testing.assert_close(ours, theirs)
