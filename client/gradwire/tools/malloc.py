"""Settings of the C library's memory allocator, for processes that allocate large tensors."""

from __future__ import annotations

import ctypes
import os
import sys

__all__ = ["tune_malloc"]

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_THRESHOLD_BYTES = 32 << 20
"""The largest value that glibc accepts."""
_KEPT_BYTES = 512 << 20


def tune_malloc() -> bool:
    """Makes this process keep up to 512 MiB of freed memory for the next large tensors, and put tensors of 2
    MiB and more into huge pages.

    By default glibc returns the memory of a large tensor to the system when the tensor is freed, and the next
    tensor of the same size costs a page fault for every 4 KiB, often more time than the computation with it.
    Blocks of 32 MiB and more are always returned; huge pages reduce their page faults, if the system has huge
    pages. torch reads that setting (``THP_MEM_ALLOC_ENABLE``) when the first tensor is made, so call this
    function before. A worker calls it when it starts, unless ``--no-tune-malloc`` is given; a trainer may.
    Returns whether the C library accepted the settings: False if it is not glibc.

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
    # Both settings are needed: with one alone the heap would be trimmed and grown again all the time.
    return bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES) and mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES))
