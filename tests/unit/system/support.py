"""Helpers for tests that wait for a condition."""

from __future__ import annotations

import time
from collections.abc import Callable

SECONDS = 20.0
"""After this long, an expected event counts as never happening."""


def eventually(condition: Callable[[], bool]) -> None:
    """Returns when the condition holds."""
    give_up_at = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.001)
