"""What tests of waiting have in common."""

from __future__ import annotations

import time
from collections.abc import Callable

SECONDS = 20.0
"""After which what should have happened counts as never happening."""


def eventually(condition: Callable[[], bool]) -> None:
    """Returns when it is so."""
    give_up_at = time.monotonic() + SECONDS
    while not condition():
        assert time.monotonic() < give_up_at
        time.sleep(0.001)
