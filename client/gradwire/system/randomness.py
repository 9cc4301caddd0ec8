"""Random numbers for gradwire itself: ids and pauses.

They come from the operating system. Training scripts seed Python's `random`, often alike in all processes:
ids drawn from it would be equal in two trainers, and so would pauses that are meant to differ. Besides, every
number that gradwire drew from it would change the user's own random sequence.
"""

from __future__ import annotations

import secrets

__all__ = ["between", "new_id"]

between = secrets.SystemRandom().uniform
"""A random number between two others."""


def new_id() -> int:
    """A random 64-bit id; never 0, which means that there is none."""
    return secrets.randbits(64) or new_id()
