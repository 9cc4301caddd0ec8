"""Numbers that gradwire itself draws at random: ids, and pauses.

They come from the operating system. Training scripts seed Python's `random`, often alike in all processes:
ids drawn from it would be equal in two trainers, and so would pauses that are there to keep them apart. And
whatever gradwire drew from it would be missing in the user's own sequence.
"""

from __future__ import annotations

import secrets

__all__ = ["between", "new_id"]

between = secrets.SystemRandom().uniform
"""A number between two others."""


def new_id() -> int:
    """64 bits that nobody else has; not 0, which stands for none."""
    return secrets.randbits(64) or new_id()
