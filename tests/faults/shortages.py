"""What a process may run short of: descriptors, memory for segments, any memory."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

__all__ = ["ROOM_BYTES", "SHORTAGES"]


ROOM_BYTES = 100 << 20
"""Address space that is left where there is no memory."""


@contextmanager
def no_descriptors() -> Iterator[None]:
    """Nothing can be opened: EMFILE."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 20, limits[1]))
    filling = []
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EMFILE)):  # noqa: PT012 - at some round of this
            while True:
                filling.append(os.open("/dev/null", os.O_RDONLY))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in filling:
            os.close(descriptor)


@contextmanager
def no_segments() -> Iterator[None]:
    """No file may grow, which segments of shared memory are to the system."""
    with limited(resource.RLIMIT_FSIZE, 0):
        with open(os.memfd_create("check"), "wb") as file:
            with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
                file.truncate(1)
        yield


@contextmanager
def no_memory() -> Iterator[None]:
    """There is address space for small things alone: ENOMEM."""
    with open("/proc/self/statm") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    with limited(resource.RLIMIT_AS, used + ROOM_BYTES):
        yield


@contextmanager
def limited(kind: int, limit: int) -> Iterator[None]:
    before = resource.getrlimit(kind)
    resource.setrlimit(kind, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(kind, before)


SHORTAGES = {"descriptors": no_descriptors, "segments": no_segments, "memory": no_memory}
