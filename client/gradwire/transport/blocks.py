"""Memory that attachments arrived in. It is pooled (`native/memory.cpp`), since mapping fresh memory costs
more than filling it."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np

from gradwire.system.timers import call_later
from gradwire.transport import native
from gradwire.transport.base import Buffer

__all__ = ["buffers", "trim_later"]

_KEPT_SECONDS = 30.0
"""How long memory that is not used is kept, to be used again."""


def buffers(blocks: Sequence[native.Block]) -> tuple[Buffer, ...]:
    if blocks:
        trim_later()
    return tuple(np.frombuffer(memoryview(block), dtype=np.uint8) for block in blocks)


_trimming = False


def trim_later() -> None:
    """Has memory given back that was not used again for a while: that of attachments, and shared memory."""
    global _trimming
    if not _trimming:
        _trimming = True
        call_later(_KEPT_SECONDS, _trim)


def _trim() -> None:
    global _trimming
    _trimming = False
    if native.trim_pool(_KEPT_SECONDS):
        trim_later()


def _after_fork() -> None:
    global _trimming
    _trimming = False  # the timer is the parent's


os.register_at_fork(after_in_child=_after_fork)
