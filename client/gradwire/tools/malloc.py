"""The C library's memory settings, for processes that move large tensors."""

from __future__ import annotations

import ctypes
import os
import sys

__all__ = ["tune_malloc"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_FROM = 32 << 20
"""The most that glibc takes."""
_KEPT_BYTES = 512 << 20


def tune_malloc() -> bool:
    """Makes this process keep memory that it has freed, up to 512 MiB, for the next large tensor, and put
    tensors of 2 MiB and more into huge pages.

    By default glibc gives the memory of a large tensor back to the system when the tensor goes, and the next
    one of the same size costs a page fault for every 4 KiB: often more than what is computed with it. Blocks
    of 32 MiB and more are always given back; huge pages make for fewer faults there, where the system has
    them. torch reads that setting (``THP_MEM_ALLOC_ENABLE``) when the first tensor is made, so call this
    before. A worker does this when it starts, unless it is told not to (``--no-tune-malloc``); a trainer may.
    Returns whether the C library took it: False where it is not glibc.

    >>> import gradwire as gw
    >>> gw.tune_malloc() in (True, False)
    True
    """
    if sys.platform != "linux":
        return False
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Both, or it gets worse: the heap would be cut and grown again all the time.
    return bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_FROM) and mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))
